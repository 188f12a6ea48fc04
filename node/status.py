"""What a node tells of itself: description, stages, load."""

import platform
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil

from node.config import NodeConfig
from node.deployment import Deployment
from node.device import Device, platform_text
from node.stage_loader import Progress
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.unix_socket import host_id
from stagemesh.rpc.v1 import node_pb2, profile_pb2, weights_pb2


class NodeReporter:
    """Makes the node's description and status messages.

    Args:
        config: the daemon's settings.
        device: its device.
        profile: its profile, once it is measured.
    """

    def __init__(
        self,
        config: NodeConfig,
        device: Device,
        *,
        profile: Callable[[], profile_pb2.NodeProfile | None],
    ) -> None:
        self.start_id = uuid.uuid4().hex
        self.address = config.advertise or ""
        self.unix_path = ""
        self._config = config
        self._device = device
        self._profile = profile
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only starts the measurement
        self._started = time.monotonic()

    def description(self) -> node_pb2.NodeDescription:
        """Who this node is."""
        return node_pb2.NodeDescription(
            version=our_version(),
            node_id=self._config.node_id,
            address=self.address,
            device=str(self._device.torch_device),
            num_threads=self._device.num_threads,
            memory_bytes=self._device.memory_bytes,
            memory_total_bytes=self._device.memory_total_bytes,
            hostname=platform.node(),
            platform=platform_text(),
            start_id=self.start_id,
            unix_path=self.unix_path,
            host_id=host_id() if self.unix_path else "",
            will_measure=self._config.measure,
            machine_id=host_id(),
            num_cores=self._device.num_cores,
        )

    def status(self, stages: list[node_pb2.StageStatus]) -> node_pb2.NodeStatus:
        """How it is doing."""
        return node_pb2.NodeStatus(
            description=self.description(),
            rss_bytes=self._process.memory_info().rss,
            cpu_percent=self._process.cpu_percent(),
            stages=stages,
            uptime_seconds=time.monotonic() - self._started,
            profile=self._profile(),
        )


def describe_stage(deployment: Deployment) -> node_pb2.StageStatus:
    """A stage and its counters."""
    request, runner = deployment.request, deployment.runner
    cache = runner.engine.cache
    return node_pb2.StageStatus(
        deployment_id=request.deployment_id,
        model=request.model.name,
        stage=request.stage,
        start_layer=request.model.start_layer,
        end_layer=request.model.end_layer,
        weight_bytes=runner.engine.stage.weight_bytes,
        kv_used_bytes=cache.used_bytes,
        kv_limit_bytes=cache.limit_bytes,
        num_sessions=cache.num_sessions,
        num_steps=runner.counters.num_steps,
        num_tokens=runner.counters.num_tokens,
        compute_seconds=runner.counters.compute_nanos / 1e9,
        tensor_rank=deployment.tensor_rank,
        num_ranks=deployment.num_ranks,
        execution=runner.engine.execution,
    )


def load_progress(progress: Progress) -> node_pb2.LoadStageProgress:
    """How far a load is."""
    fetch = progress.fetch
    message = node_pb2.LoadStageProgress(
        loaded_bytes=progress.loaded_bytes, total_bytes=progress.total_bytes
    )
    if fetch.total_bytes or fetch.hashed_bytes:
        message.fetch.CopyFrom(
            weights_pb2.WeightFetch(
                total_bytes=fetch.total_bytes,
                present_bytes=fetch.present_bytes,
                received_bytes=fetch.received_bytes,
                hashed_bytes=fetch.hashed_bytes,
                origins=[
                    weights_pb2.WeightOrigin(source=source, num_bytes=num_bytes)
                    for source, num_bytes in fetch.received.items()
                ],
            )
        )
    return message


def stage_metrics(status: node_pb2.StageStatus) -> dict[str, Any]:
    """A stage as it is measured for telemetry."""
    return {
        "deployment_id": status.deployment_id,
        "model": status.model,
        "stage": status.stage,
        "start_layer": status.start_layer,
        "end_layer": status.end_layer,
        "weight_bytes": status.weight_bytes,
        "kv_used_bytes": status.kv_used_bytes,
        "kv_limit_bytes": status.kv_limit_bytes,
        "num_sessions": status.num_sessions,
        "num_steps": status.num_steps,
        "num_tokens": status.num_tokens,
        "compute_seconds": status.compute_seconds,
        "tensor_rank": status.tensor_rank,
        "num_ranks": status.num_ranks,
        "execution": status.execution,
    }

"""NodeService: the daemon's gRPC face to the coordinator and to the stage before."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import torch

from node.deployment import Deployment
from node.executor import ComputeThread
from node.model_wanted import ModelWanted
from node.next_stage import NextStage
from node.profiler import Load
from node.stage_group import StageGroup, group_request, open_stage_group
from node.stage_loader import Loaded, StageLoader, StageRequest
from node.stage_runner import QueuedStep, StageRunner
from node.status import describe_stage, load_progress
from stagemesh.comm.service import CommServicer
from stagemesh.errors import NotReady, ProtocolError
from stagemesh.rpc.codec import TensorAssembler
from stagemesh.rpc.convert import (
    check_version,
    step_header_from_proto,
    step_result_to_proto,
)
from stagemesh.rpc.v1 import node_pb2, node_pb2_grpc

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """Loads stages and carries steps through them.

    Args:
        node_id: this node.
        describe: makes the node's current description.
        status: makes the node's current status from its stages.
        loader: loads stages.
        compute: the device's thread.
        comm: opens the groups of ranks that run a stage together.
        token: shown to the next stage.
        max_tensor_bytes: largest activation that is accepted.
    """

    def __init__(
        self,
        *,
        node_id: str,
        describe: Callable[[], node_pb2.NodeDescription],
        status: Callable[[list[node_pb2.StageStatus]], node_pb2.NodeStatus],
        loader: StageLoader,
        compute: ComputeThread,
        comm: CommServicer,
        token: str | None,
        max_tensor_bytes: int,
    ) -> None:
        self._node_id = node_id
        self._describe = describe
        self._status = status
        self._loader = loader
        self._compute = compute
        self._comm = comm
        self._token = token
        self._max_tensor_bytes = max_tensor_bytes
        self._deployments: dict[str, Deployment] = {}

    async def Describe(  # noqa: N802
        self, request: node_pb2.DescribeRequest, context: Context
    ) -> node_pb2.NodeDescription:
        """Handshake."""
        check_version(request.version, peer="the caller")
        return self._describe()

    async def LoadStage(  # noqa: N802
        self, request: node_pb2.LoadStageRequest, context: Context
    ) -> AsyncGenerator[node_pb2.LoadStageProgress, None]:
        """Load a stage; an older incarnation of the deployment is unloaded first."""
        check_version(request.version, peer="the coordinator")
        wanted = _stage_request(request)
        ranks = group_request(request, node_id=self._node_id)
        await self._unload(wanted.deployment_id)
        # Closed with this call, so that a caller who goes away stops the load at once, and so that
        # the other ranks of a load that fails do not wait for this one.
        async with contextlib.AsyncExitStack() as stack:
            group = None
            if ranks is not None:
                group = await open_stage_group(ranks, comm=self._comm)
                stack.push_async_callback(group.close)
            events = await stack.enter_async_context(
                contextlib.aclosing(self._loader.load(wanted, group=group))
            )
            async for event in events:
                if not isinstance(event, Loaded):
                    yield load_progress(event)
                    continue
                # Another load of the same deployment may have ended meanwhile; the later wins.
                await self._unload(wanted.deployment_id)
                ready = self._start(wanted, event, group)
                stack.pop_all()  # the stage has the group now, and closes it
                yield ready

    def _start(
        self, request: StageRequest, loaded: Loaded, group: StageGroup | None
    ) -> node_pb2.LoadStageProgress:
        engine = loaded.engine
        self._deployments[request.deployment_id] = Deployment(
            request, engine, node_id=self._node_id, compute=self._compute, group=group
        )
        logger.info(
            "stage loaded",
            extra={
                "deployment_id": request.deployment_id,
                "stage": request.stage,
                "layers": f"{request.model.start_layer}-{request.model.end_layer - 1}",
                "load_seconds": round(loaded.seconds, 2),
            },
        )
        return node_pb2.LoadStageProgress(
            loaded_bytes=engine.stage.read_bytes,
            total_bytes=engine.stage.read_bytes,
            ready=node_pb2.StageReady(
                weight_bytes=engine.stage.weight_bytes,
                kv_bytes_per_token=engine.cache.layout.bytes_per_token,
                load_seconds=loaded.seconds,
                read_bytes=engine.stage.read_bytes,
            ),
        )

    async def LinkStage(  # noqa: N802
        self, request: node_pb2.LinkStageRequest, context: Context
    ) -> node_pb2.LinkStageReply:
        """Open the stream to a rank of the next stage; one to the same rank is replaced."""
        deployment = self._deployment(request.deployment_id)
        runner = deployment.runner
        next_stage = NextStage(
            node_id=request.next_node_id,
            address=request.next_address,
            deployment_id=request.deployment_id,
            incarnation=deployment.request.incarnation,
            stage=deployment.request.stage + 1,
            tensor_rank=request.next_tensor_rank,
            token=self._token,
        )
        try:
            seconds = await next_stage.connect(request.timeout_seconds)
        except BaseException:
            await next_stage.close()
            raise
        old = runner.next_ranks.get(request.next_tensor_rank)
        runner.next_ranks[request.next_tensor_rank] = next_stage
        if old is not None:
            await old.close()
        return node_pb2.LinkStageReply(connect_seconds=seconds)

    async def UnloadStage(  # noqa: N802
        self, request: node_pb2.UnloadStageRequest, context: Context
    ) -> node_pb2.UnloadStageReply:
        """Free a stage; one that is not here is unloaded already."""
        await self._unload(request.deployment_id)
        return node_pb2.UnloadStageReply()

    async def RunSteps(  # noqa: N802
        self, request_iterator: AsyncIterator[node_pb2.StepFrame], context: Context
    ) -> AsyncGenerator[node_pb2.StepAck, None]:
        """Take steps in until the sender ends the stream."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            raise ProtocolError("the first frame of a stream of steps must be a hello")
        hello = first.hello
        check_version(hello.version, peer="the sender of steps")
        runner = self._accept(hello)
        yield node_pb2.StepAck(accepted=True)
        header: node_pb2.StepHeader | None = None
        assembler: TensorAssembler | None = None
        async for frame in request_iterator:
            arrived = time.monotonic_ns()
            activation: torch.Tensor | None = None
            if frame.HasField("header"):
                if assembler is not None:
                    raise ProtocolError(
                        "a step began before the activation of the last one was whole"
                    )
                header = frame.header
            if header is None:
                raise ProtocolError("an activation came without a step's header")
            if frame.HasField("activation"):
                assembler = assembler or TensorAssembler(max_bytes=self._max_tensor_bytes)
                activation = assembler.add(frame.activation)
                if activation is None:
                    continue
            step, timings = step_header_from_proto(header)
            header, assembler = None, None
            await runner.submit(
                QueuedStep(step=step, activation=activation, timings=timings, arrived_nanos=arrived)
            )

    def _accept(self, hello: node_pb2.StepHello) -> StageRunner:
        deployment = self._deployment(hello.deployment_id)
        own = deployment.request
        place = (own.incarnation, own.stage, deployment.tensor_rank)
        if (hello.incarnation, hello.stage, hello.tensor_rank) != place:
            raise NotReady(
                f"node {self._node_id} is rank {deployment.tensor_rank} of stage {own.stage} of "
                f"incarnation {own.incarnation} of {hello.deployment_id}; the sender wants rank "
                f"{hello.tensor_rank} of stage {hello.stage} of incarnation {hello.incarnation}"
            )
        return deployment.runner

    async def WatchResults(  # noqa: N802
        self, request: node_pb2.WatchResultsRequest, context: Context
    ) -> AsyncGenerator[node_pb2.StepResult, None]:
        """Hand out results and failures of a stage."""
        deployment = self._deployment(request.deployment_id)
        if deployment.request.incarnation != request.incarnation:
            raise NotReady(
                f"node {self._node_id} runs incarnation {deployment.request.incarnation} of "
                f"{request.deployment_id}, not {request.incarnation}"
            )
        watcher = deployment.runner.watch()
        try:
            yield node_pb2.StepResult(accepted=True)
            async for result in watcher.results():
                yield step_result_to_proto(result)
        finally:
            deployment.runner.unwatch(watcher)

    async def GetNodeStatus(  # noqa: N802
        self, request: node_pb2.GetNodeStatusRequest, context: Context
    ) -> node_pb2.NodeStatus:
        """The node and its stages, now."""
        return self.node_status()

    def node_status(self) -> node_pb2.NodeStatus:
        """The node and its stages, now."""
        return self._status(self.stage_statuses())

    def stage_statuses(self) -> list[node_pb2.StageStatus]:
        """The stages, now."""
        return [describe_stage(d) for d in self._deployments.values()]

    def load(self) -> Load:
        """What the stages have computed and hold, now."""
        runners = [d.runner for d in self._deployments.values()]
        return Load(
            num_steps=sum(r.counters.num_steps for r in runners),
            stage_bytes=sum(
                r.engine.stage.weight_bytes + r.engine.cache.used_bytes for r in runners
            ),
        )

    async def unload_all(self) -> None:
        """Free every stage."""
        for deployment_id in list(self._deployments):
            await self._unload(deployment_id)

    async def _unload(self, deployment_id: str) -> None:
        deployment = self._deployments.pop(deployment_id, None)
        if deployment is not None:
            await deployment.close()
            logger.info("stage unloaded", extra={"deployment_id": deployment_id})

    def _deployment(self, deployment_id: str) -> Deployment:
        deployment = self._deployments.get(deployment_id)
        if deployment is None:
            held = ", ".join(self._deployments) or "none"
            raise NotReady(
                f"node {self._node_id} has no stage of deployment {deployment_id} (it has: {held})"
            )
        return deployment


def _stage_request(request: node_pb2.LoadStageRequest) -> StageRequest:
    return StageRequest(
        deployment_id=request.deployment_id,
        incarnation=request.incarnation,
        model=ModelWanted(
            name=request.model.name,
            path=request.model.path,
            reference=request.model.reference,
            fingerprint=request.model.fingerprint,
            start_layer=request.start_layer,
            end_layer=request.end_layer,
            weights_address=request.model.weights_address,
            peers=tuple((peer.node_id, peer.address) for peer in request.model.weight_peers),
            ranks=tuple(member.node_id for member in request.tensor_group.members),
        ),
        stage=request.stage,
        num_stages=request.num_stages,
        dtype=request.dtype,
        kv_cache_bytes=request.kv_cache_bytes,
        quantize=request.quantize or "none",
        compile=request.compile,
    )

"""What the coordinator tells the MQTT bus, and what it takes from it; see docs/mqtt.md."""

import time
import uuid

from coordinator.cluster import Cluster, RequestEvent
from coordinator.deployment import Deployment
from stagemesh.telemetry.payload import Presence
from stagemesh.telemetry.publisher import MqttTelemetry
from stagemesh.telemetry.topics import MAX_ID_LENGTH
from stagemesh.version import SOFTWARE_VERSION


class CoordinatorTelemetry:
    """Publishes placements and request events; listens to the nodes' presence.

    Args:
        url: the broker; None makes every call do nothing.
        cluster_name: first level of all topics.
    """

    def __init__(self, url: str | None, *, cluster_name: str) -> None:
        self.bus = (
            None
            if url is None
            else MqttTelemetry(
                url,
                client_id=f"stagemesh-{cluster_name}-coordinator",
                start_id=uuid.uuid4().hex,
                details={"version": SOFTWARE_VERSION},
                cluster=cluster_name,
            )
        )

    def listen(self, cluster: Cluster) -> None:
        """Take a node's last will as one more sign of its death."""
        if self.bus is None:
            return

        def on_presence(presence: Presence) -> None:
            if presence.state == "offline":
                cluster.registry.presence_offline(
                    presence.node_id, start_id=presence.start_id, now=time.monotonic()
                )

        self.bus.watch_presence(on_presence)

    def deployment(self, deployment: Deployment) -> None:
        """Publish a deployment's phase and placement, retained."""
        if self.bus is None:
            return
        plan = deployment.plan
        payload = {
            "model": deployment.name,
            "deployment_id": deployment.deployment_id,
            "state": deployment.phase,
            "detail": deployment.detail,
            "time": time.time(),
            "stages": [
                {
                    "stage": s.stage,
                    "tensor_rank": index,
                    "num_ranks": s.num_ranks,
                    "node_id": rank.node_id,
                    "start_layer": s.start_layer,
                    "end_layer": s.end_layer,
                    "weight_bytes": rank.weight_bytes,
                }
                for s in (() if plan is None else plan.stages)
                for index, rank in enumerate(s.ranks)
            ],
        }
        # By name, not by id: an id is of one process, whose successor could not clear its topic.
        topic = self.bus.topics.placement(deployment.name[:MAX_ID_LENGTH])
        self.bus.publish(topic, payload, retain=True)

    def request(self, event: RequestEvent) -> None:
        """Publish what happened to a sequence of a request."""
        if self.bus is not None:
            payload = {
                "event": event.kind,
                "time": time.time(),
                "model": event.model,
                "prompt_tokens": event.num_prompt_tokens,
                "completion_tokens": event.num_generated_tokens,
                "detail": event.detail,
            }
            self.bus.publish(self.bus.topics.request_events(event.request_id), payload)

"""What a node tells the MQTT bus: that it is there, and what it measures; see docs/mqtt.md."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from stagemesh.telemetry.publisher import MqttTelemetry
from stagemesh.version import SOFTWARE_VERSION


class NodeTelemetry:
    """Presence and measurements of a node; the broker may come and go.

    Args:
        url: the broker.
        cluster: first level of all topics.
        node_id: the node.
        start_id: of this start of the daemon, the same as in its join: so the coordinator knows
            which incarnation a last will is about.
        address: host:port of the gRPC server.
        interval_seconds: pause between two measurements.
        stages: measures the loaded stages.

    Raises:
        ConfigError: the URL or a name is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        cluster: str,
        node_id: str,
        start_id: str,
        address: str,
        interval_seconds: float,
        stages: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        self.bus = MqttTelemetry(
            url,
            client_id=f"stagemesh-{cluster}-{node_id}",
            start_id=start_id,
            node_id=node_id,
            details={"address": address, "version": SOFTWARE_VERSION},
            cluster=cluster,
        )
        self._topic = self.bus.topics.node_metrics(node_id)
        self._interval_seconds = interval_seconds
        self._stages = stages
        self._started = time.monotonic()
        # One of our own: cpu_percent measures since the last call on the same object.
        self._process = psutil.Process()
        self._process.cpu_percent()

    async def run(self) -> None:
        """Publish until `stop` or cancelled; both end with "offline"."""
        measuring = asyncio.create_task(self._measure(), name="metrics")
        try:
            await self.bus.run()
        finally:
            measuring.cancel()

    async def stop(self) -> None:
        """Say "offline" and let `run` end; bounded by the bus's own grace."""
        await self.bus.stop()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds)
            # Measurements that could only be sent later are of no use to anybody.
            if self.bus.is_connected:
                self.bus.publish(self._topic, self._metrics())

    def _metrics(self) -> dict[str, Any]:
        return {
            "time": time.time(),
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "rss_bytes": self._process.memory_info().rss,
            "cpu_percent": self._process.cpu_percent(),
            "stages": list(self._stages()),
        }

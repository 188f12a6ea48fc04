"""A publisher in a process of its own, for tests that kill it.

Arguments: URL, node id, start id, keepalive in seconds.
"""

import asyncio
import sys

from stagemesh.telemetry.config import MqttLimits
from stagemesh.telemetry.publisher import MqttTelemetry


async def main(url: str, node_id: str, start_id: str, keepalive_seconds: str) -> None:
    telemetry = MqttTelemetry(
        url,
        client_id=f"stagemesh-{node_id}",
        node_id=node_id,
        start_id=start_id,
        limits=MqttLimits(keepalive_seconds=int(keepalive_seconds)),
    )
    await telemetry.run()


asyncio.run(main(*sys.argv[1:]))

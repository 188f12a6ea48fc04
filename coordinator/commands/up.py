"""`coordinator up`: a whole cluster on this machine, until it is stopped."""

import asyncio
import json
from typing import Any

import click
from rich.console import Console

from coordinator.commands.options import (
    deployment_config,
    json_option,
    local_options,
    model_options,
    placement_options,
)
from coordinator.commands.render import LoadBars
from coordinator.commands.running import announce, run_with_announcement
from coordinator.config import CoordinatorConfig
from coordinator.local_cluster import LocalClusterConfig, local_cluster, wait_ready
from stagemesh.cli_support import guarded, log_options, run_until_signalled
from stagemesh.layout import Plan


@click.command("up")
@click.option("--nodes", type=int, default=3, show_default=True, help="Node daemons to start.")
@model_options
@placement_options(objective=None)
@local_options
@click.option("--port", type=int, default=8000, show_default=True, help="The API's port.")
@click.option(
    "--rpc-bind", default="127.0.0.1:7000", show_default=True, help="HOST:PORT for nodes."
)
@click.option("--mqtt", "mqtt_url", metavar="URL", help="Broker, e.g. mqtt://host:1883.")
@log_options
@json_option
def command(
    *,
    nodes: int,
    threads: int | None,
    memory: int | None,
    device: str,
    port: int,
    rpc_bind: str,
    mqtt_url: str | None,
    log_level: str,
    log_format: str,
    as_json: bool,
    **model: Any,
) -> None:
    """Run a coordinator, its API and node daemons on loopback."""

    def start() -> int:
        config = LocalClusterConfig(
            coordinator=CoordinatorConfig(
                deployments=(deployment_config(**model),),
                http_port=port,
                rpc_bind=rpc_bind,
                mqtt_url=mqtt_url,
            ),
            num_nodes=nodes,
            threads=threads,
            memory_bytes=memory,
            device=device,
        )
        return run_until_signalled(_up(config, as_json=as_json))

    guarded(start, log_format=log_format, log_level="warning" if log_level == "info" else log_level)


async def _up(config: LocalClusterConfig, *, as_json: bool) -> int:
    console = Console(stderr=as_json)
    console.print(f"starting {config.num_nodes} node daemons on this machine", style="dim")
    async with local_cluster(config) as cluster:
        coordinator = cluster.coordinator
        shown: dict[str, Plan] = {}
        if as_json:
            await wait_ready(coordinator, nodes=cluster.nodes)
            addresses = {"api": coordinator.api_url, "rpc": coordinator.rpc_address}
            click.echo(json.dumps({"event": "listening", **addresses}))
        else:
            with LoadBars(console) as bars:
                await wait_ready(coordinator, on_poll=bars.update, nodes=cluster.nodes)
                for deployment in coordinator.cluster.deployments.values():
                    bars.finish(deployment)
                    if deployment.plan is not None:
                        shown[deployment.name] = deployment.plan
            console.print(f"API ready: {coordinator.api_url}/v1 (Ctrl-C stops the cluster)")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(coordinator.run())
            show = announce(as_json=as_json)
            tasks.create_task(run_with_announcement(coordinator, show, shown=shown))
    return 0

"""`coordinator serve`: the head node of a real cluster."""

import asyncio
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from coordinator.commands.options import (
    deployment_config,
    json_option,
    model_options,
    placement_options,
    read_api_keys,
)
from coordinator.commands.running import announce, run_with_announcement
from coordinator.config import CoordinatorConfig
from coordinator.server import Coordinator
from stagemesh.cli_support import (
    guarded,
    log_options,
    read_token,
    run_until_signalled,
    token_options,
)


@click.command("serve")
@model_options
@placement_options(objective="latency")
@click.option("--min-nodes", type=int, help="Place the model once this many nodes are there.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the API listens.")
@click.option("--port", type=int, default=8000, show_default=True, help="The API's port.")
@click.option(
    "--rpc-bind", default="127.0.0.1:7000", show_default=True, help="HOST:PORT for nodes."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of API keys, one a line; clients must then show one.",
)
@click.option("--insecure", is_flag=True, help="Listen publicly without a token or API key.")
@click.option("--mqtt", "mqtt_url", metavar="URL", help="Broker, e.g. mqtt://host:1883.")
@click.option("--cluster", default="default", show_default=True, help="Name in MQTT topics.")
@token_options
@log_options
@json_option
def command(
    *,
    host: str,
    port: int,
    rpc_bind: str,
    api_key_file: Path | None,
    insecure: bool,
    mqtt_url: str | None,
    cluster: str,
    token: str | None,
    token_file: Path | None,
    log_level: str,
    log_format: str,
    as_json: bool,
    **model: Any,
) -> None:
    """Serve a model on the nodes that register here."""

    def start() -> int:
        config = CoordinatorConfig(
            deployments=(deployment_config(**model),),
            http_host=host,
            http_port=port,
            rpc_bind=rpc_bind,
            token=read_token(token_file, token),
            insecure=insecure,
            api_keys=read_api_keys(api_key_file),
            mqtt_url=mqtt_url,
            cluster=cluster,
        )
        return run_until_signalled(_serve(config, as_json=as_json))

    guarded(start, log_format=log_format, log_level=log_level)


async def _serve(config: CoordinatorConfig, *, as_json: bool) -> int:
    async with Coordinator(config) as coordinator:
        if as_json:
            click.echo(
                json.dumps(
                    {
                        "event": "listening",
                        "api": coordinator.api_url,
                        "rpc": coordinator.rpc_address,
                    }
                )
            )
        else:
            console = Console()
            console.print(f"API     {coordinator.api_url}/v1")
            console.print(f"nodes   node-daemon --coordinator {coordinator.rpc_address}")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(coordinator.run())
            tasks.create_task(run_with_announcement(coordinator, announce(as_json=as_json)))
    return 0

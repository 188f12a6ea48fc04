"""`coordinator status`: nodes, models and placement of a running cluster."""

import json
from pathlib import Path

import click
import grpc.aio
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from coordinator.commands.options import json_option
from coordinator.commands.render import status_tables
from stagemesh.cli_support import guarded, read_token, run_until_signalled, token_options
from stagemesh.rpc.channels import open_channel, wait_ready
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc

_TIMEOUT_SECONDS = 5.0
_MEASURE_SECONDS = 60.0


@click.command("status")
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    default="127.0.0.1:7000",
    show_default=True,
    help="The coordinator's gRPC address.",
)
@click.option(
    "--measure", is_flag=True, help="Measure nodes and links anew first; takes some seconds."
)
@token_options
@json_option
def command(
    *, coordinator: str, measure: bool, token: str | None, token_file: Path | None, as_json: bool
) -> None:
    """Show a running cluster."""

    def start() -> int:
        shown_token = read_token(token_file, token)
        return run_until_signalled(
            _status(coordinator, measure=measure, token=shown_token, as_json=as_json)
        )

    guarded(start, log_format="text", log_level="warning")


async def _status(address: str, *, measure: bool, token: str | None, as_json: bool) -> int:
    status = await fetch_status(address, token=token, measure=measure)
    if as_json:
        fields = MessageToDict(
            status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        click.echo(json.dumps(fields))
        return 0
    console = Console()
    for table in status_tables(status):
        console.print(table)
    return 0


async def fetch_status(
    address: str, *, token: str | None, measure: bool = False
) -> coordinator_pb2.ClusterStatus:
    """Ask a coordinator.

    Args:
        address: its host:port.
        token: the cluster's token.
        measure: have nodes and links measured first.

    Raises:
        PeerLost: nobody answers at the address.
    """
    channel = open_channel(address, token=token, kind="control")
    try:
        await wait_ready(channel, address=address, timeout_seconds=_TIMEOUT_SECONDS)
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        )
        if measure:
            order = coordinator_pb2.MeasureClusterRequest(
                version=our_version(), timeout_seconds=_MEASURE_SECONDS
            )
            return await stub.MeasureCluster(order, timeout=_MEASURE_SECONDS + _TIMEOUT_SECONDS)
        request = coordinator_pb2.GetClusterStatusRequest(version=our_version())
        return await stub.GetClusterStatus(request, timeout=_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, operation="status", peer=address) from error
    finally:
        await channel.close()

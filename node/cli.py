"""Command line of the node daemon. Torch is imported when the daemon starts, so --help is quick."""

import importlib
import os
import platform
from pathlib import Path

import click

from node.config import NodeConfig
from stagemesh.cli_support import (
    Bytes,
    guarded,
    log_options,
    read_token,
    run_until_signalled,
    token_options,
)
from stagemesh.errors import ConfigError
from stagemesh.version import SOFTWARE_VERSION


@click.command(context_settings={"show_default": True})
@click.option("--coordinator", metavar="HOST:PORT", help="The coordinator's gRPC address.")
@click.option("--bind", metavar="HOST:PORT", default="127.0.0.1:0", help="Where to listen.")
@click.option("--advertise", metavar="HOST:PORT", help="Where peers reach this node.")
@click.option("--node-id", default=platform.node() or "node", help="Name in the cluster.")
@click.option("--device", default="auto", help="auto, cpu, cuda:N or mps.")
@click.option("--threads", "num_threads", type=int, help="CPU threads; all cores by default.")
@click.option("--memory", "memory_bytes", type=Bytes(), help="Memory to offer, e.g. 8GiB.")
@click.option("--measure/--no-measure", default=True, help="Measure the device at the start.")
@click.option("--insecure", is_flag=True, help="Listen publicly without a token.")
@click.option("--unix-socket", is_flag=True, help="Carry groups of this host over unix sockets.")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where fetched weights are kept; by default in ~/.cache/stagemesh/weights.",
)
@click.option("--cache-limit", type=Bytes(), help="Most bytes of weights to keep, e.g. 50GiB.")
@click.option("--no-local-files", is_flag=True, help="Fetch weights even if files are here.")
@click.option("--local-only", is_flag=True, help="Never fetch weights; use files that are here.")
@click.option(
    "--mqtt",
    "mqtt_url",
    metavar="URL",
    envvar="STAGEMESH_MQTT",
    show_envvar=True,
    help="Broker, e.g. mqtt://host:1883.",
)
@click.option("--cluster", default="default", help="Cluster name in MQTT topics.")
@click.option("--exit-with-parent", is_flag=True, help="Stop when standard input ends.")
@token_options
@log_options
@click.version_option(SOFTWARE_VERSION)
def main(
    *,
    token: str | None,
    token_file: Path | None,
    log_level: str,
    log_format: str,
    exit_with_parent: bool,
    coordinator: str | None,
    bind: str,
    advertise: str | None,
    node_id: str,
    device: str,
    num_threads: int | None,
    memory_bytes: int | None,
    measure: bool,
    insecure: bool,
    unix_socket: bool,
    cache_dir: Path | None,
    cache_limit: int | None,
    no_local_files: bool,
    local_only: bool,
    mqtt_url: str | None,
    cluster: str,
) -> None:
    """Offer this host to a stagemesh cluster."""

    def start() -> int:
        config = NodeConfig(
            node_id=node_id,
            coordinator=coordinator,
            bind=bind,
            advertise=advertise,
            device=device,
            num_threads=num_threads,
            memory_bytes=memory_bytes,
            measure=measure,
            token=read_token(token_file, token),
            insecure=insecure,
            unix_socket=unix_socket,
            cache_folder=cache_dir,
            cache_limit_bytes=cache_limit,
            has_local_files=not no_local_files,
            is_streaming=not local_only,
            mqtt_url=mqtt_url or None,
            cluster=cluster,
        )
        _quiet_idle_threads()
        return run_until_signalled(_serve(config), exit_with_parent=exit_with_parent)

    guarded(start, log_format=log_format, log_level=log_level)


async def _serve(config: NodeConfig) -> int:
    # torch's OpenMP runtime reads its environment when it is loaded, so the import comes last.
    try:
        daemon_module = importlib.import_module("node.daemon")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a node needs the package {error.name}, which is not installed here; install all that "
            "a node needs with: pip install 'stagemesh[node]'"
        ) from error
    async with daemon_module.NodeDaemon(config) as daemon:
        await daemon.run()
    return 0


def _quiet_idle_threads() -> None:
    """Let OpenMP's workers sleep soon after a parallel region.

    By default they spin for milliseconds. While a stage waits for its turn, that takes a core from
    the stage whose turn it is, when both share a host. With `benchmarks.decode` on 2 cores, counts
    of 0 and 2,000 made one stage of two threads 10 to 40 % slower (the next layer's region finds
    the workers asleep), 200,000 made two stages that take turns 10 to 20 % slower.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

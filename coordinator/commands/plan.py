"""`coordinator plan`: who would run what, what it takes and how fast it should be; a dry run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from coordinator.cluster_file import read_cluster_file
from coordinator.commands.options import (
    deployment_config,
    json_option,
    model_options,
    placement_options,
)
from coordinator.commands.plan_tables import print_plan
from coordinator.commands.status import fetch_status
from coordinator.config import DeploymentConfig
from coordinator.memory_fit import run_dtype
from coordinator.placing import best_plan, is_measured
from coordinator.plan_report import plan_report, prediction_basis
from coordinator.plan_svg import plan_svg
from coordinator.planner.profiles import ClusterProfile
from coordinator.profile_messages import cluster_profile
from stagemesh.cli_support import guarded, read_token, run_until_signalled, token_options
from stagemesh.errors import ConfigError, PlacementError
from stagemesh.model_spec import load_model_spec

Show = Callable[[DeploymentConfig, ClusterProfile], int]

_LIVE = "live"


@click.command("plan")
@model_options
@placement_options(objective="latency")
@click.option(
    "--nodes",
    default=_LIVE,
    show_default=True,
    metavar="FILE|live",
    help="A cluster file (see docs/placement.md), or the running coordinator's nodes.",
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    default="127.0.0.1:7000",
    show_default=True,
    help="The coordinator's gRPC address, for live nodes.",
)
@click.option("--max-replicas", type=int, default=1, show_default=True, help="Copies of the model.")
@click.option(
    "--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture of the plan."
)
@token_options
@json_option
def command(
    *,
    nodes: str,
    coordinator: str,
    max_replicas: int,
    svg: Path | None,
    token: str | None,
    token_file: Path | None,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Plan a placement without loading anything."""

    def start() -> int:
        config = deployment_config(**wishes)
        if nodes == _LIVE:
            shown_token = read_token(token_file, token)
            return run_until_signalled(_live(coordinator, shown_token, config, show))
        return show(config, read_cluster_file(Path(nodes)))

    def show(config: DeploymentConfig, cluster: ClusterProfile) -> int:
        spec = load_model_spec(config.model, name=config.name)
        if not is_measured(cluster, config, spec):
            raise ConfigError(
                f"a node has no rates for {run_dtype(config, spec)}; choose another with --dtype"
            )
        result, workload = best_plan(config, spec, cluster, max_replicas=max_replicas)
        basis = prediction_basis(config)
        if svg is not None:
            _write(svg, plan_svg(spec.name, result, workload))
        if as_json:
            shown = plan_report(spec.name, result, workload, basis=basis)
            click.echo(json.dumps(shown | {"quantize": config.quantize}))
        else:
            print_plan(Console(), spec.name, result, workload, basis=basis)
        return 0

    guarded(start, log_format="text", log_level="error")


async def _live(address: str, token: str | None, config: DeploymentConfig, show: Show) -> int:
    status = await fetch_status(address, token=token)
    ready = [node.status for node in status.nodes if node.state == "ready"]
    # The order in which a deployment takes them.
    ready.sort(key=lambda node: node.description.node_id)
    cluster = cluster_profile(ready, status.links)
    if cluster is None:
        raise PlacementError(
            f"no node of the cluster at {address} is measured: "
            + (", ".join(node.description.node_id for node in ready) or "there are no nodes")
        )
    # A node that is away is left alone as it is.
    present = config.excluded & {node.node_id for node in cluster.nodes}
    return show(replace(config, excluded=present), cluster)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error

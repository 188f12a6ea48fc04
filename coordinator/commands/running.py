"""What `serve` and `up` print while they run: each placement once it is ready."""

import asyncio
import json
from collections.abc import Callable

import click
from rich.console import Console

from coordinator.commands.render import plan_json, print_placement
from coordinator.deployment import Deployment
from coordinator.server import Coordinator
from stagemesh.layout import Plan

_POLL_SECONDS = 0.2


def announce(*, as_json: bool) -> Callable[[Deployment, Plan], None]:
    """A function that prints a placement that has become ready."""
    console = Console()

    def show(deployment: Deployment, plan: Plan) -> None:
        if as_json:
            click.echo(json.dumps({"event": "ready", **plan_json(deployment.name, plan)}))
        else:
            reasons = None if deployment.planned is None else deployment.planned.unused
            print_placement(console, deployment.name, plan, reasons=reasons)
            console.print(f"[green]{deployment.name} is ready[/green]")

    return show


async def run_with_announcement(
    coordinator: Coordinator,
    show: Callable[[Deployment, Plan], None],
    *,
    shown: dict[str, Plan] | None = None,
) -> None:
    """Call `show` whenever a deployment is ready with another plan than before; until cancelled.

    Args:
        coordinator: a running one.
        show: what prints.
        shown: plans by model name that the user has seen.
    """
    shown = dict(shown or {})
    while True:
        for name, deployment in coordinator.cluster.deployments.items():
            plan = deployment.plan
            if deployment.phase == "ready" and plan is not None and shown.get(name) is not plan:
                shown[name] = plan
                show(deployment, plan)
        await asyncio.sleep(_POLL_SECONDS)

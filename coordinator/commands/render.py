"""Tables and progress bars; all a person sees of the coordinator on a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from coordinator.commands.measured_tables import measured_tables
from coordinator.commands.titled_table import titled_table
from coordinator.commands.units import gib
from coordinator.deployment import Deployment
from stagemesh.layout import Plan, StageAssignment
from stagemesh.rpc.v1 import coordinator_pb2


def layers(start: int, end: int) -> str:
    """A half-open layer range for a person."""
    return f"{start}-{end - 1} ({end - start})"


def print_placement(
    console: Console, name: str, plan: Plan, *, reasons: Mapping[str, str] | None = None
) -> None:
    """A plan: a headline, a table with one row a stage, and the nodes that got none, and why."""
    stages = f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
    console.print(
        f"[bold]{name}[/bold]: {plan.num_layers} layers over {stages}, {plan.dtype}, "
        f"context {plan.max_context_tokens} tokens",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_placement_table(plan))
    for node_id, reason in (reasons or {}).items():
        console.print(f"not used: {node_id}: {reason}", highlight=False, soft_wrap=True)
    if plan.unused_node_ids and not reasons:
        console.print(f"not used: {', '.join(plan.unused_node_ids)}", highlight=False)


def _placement_table(plan: Plan) -> Table:
    table = Table()
    is_shared = any(stage.num_ranks > 1 for stage in plan.stages)
    for heading, justify in (
        ("stage", "right"),
        ("node", "left"),
        ("layers", "left"),
        *((("rank", "left"), ("heads", "right"), ("columns", "right")) if is_shared else ()),
        ("weights", "right"),
        ("KV cache", "right"),
    ):
        table.add_column(heading, justify=justify)
    for stage in plan.stages:
        for index, rank in enumerate(stage.ranks):
            table.add_row(
                str(stage.stage) if index == 0 else "",
                rank.node_id,
                layers(stage.start_layer, stage.end_layer) if index == 0 else "",
                *(_share_cells(stage, index) if is_shared else ()),
                gib(rank.weight_bytes),
                gib(rank.kv_cache_bytes),
            )
    return table


def rank_text(rank: int, num_ranks: int) -> str:
    """Which of the ranks of a stage."""
    return "alone" if num_ranks == 1 else f"{rank} of {num_ranks}"


def _share_cells(stage: StageAssignment, rank: int) -> tuple[str, str, str]:
    """A rank's number, query heads and MLP columns."""
    name, shares = rank_text(rank, stage.num_ranks), stage.shares
    if shares is None:
        return name, "all", "all"
    return name, str(shares.query_heads[rank]), str(shares.mlp_columns[rank])


def plan_json(name: str, plan: Plan) -> dict[str, Any]:
    """A plan for programs."""
    return {
        "model": name,
        "num_layers": plan.num_layers,
        "dtype": plan.dtype,
        "max_context_tokens": plan.max_context_tokens,
        "unused_node_ids": list(plan.unused_node_ids),
        "stages": [
            {
                "stage": s.stage,
                "node_id": s.node_id,
                "start_layer": s.start_layer,
                "end_layer": s.end_layer,
                "weight_bytes": s.weight_bytes,
                "kv_cache_bytes": s.kv_cache_bytes,
                "ranks": [_rank_json(s, rank) for rank in range(s.num_ranks)],
            }
            for s in plan.stages
        ],
    }


def _rank_json(stage: StageAssignment, rank: int) -> dict[str, Any]:
    assigned, shares = stage.ranks[rank], stage.shares
    divided = (
        {}
        if shares is None
        else {
            "query_heads": shares.query_heads[rank],
            "kv_heads": list(shares.kv_range(rank)),
            "mlp_columns": shares.mlp_columns[rank],
            "vocab_rows": shares.vocab_rows[rank],
        }
    )
    return {
        "node_id": assigned.node_id,
        **divided,
        "weight_bytes": assigned.weight_bytes,
        "kv_cache_bytes": assigned.kv_cache_bytes,
    }


class LoadBars:
    """One progress bar per stage and rank while a deployment loads, the placement above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )
        self._bars: dict[tuple[int, int], Any] = {}
        self._plan: Plan | None = None
        self._detail = ""

    def __enter__(self) -> "LoadBars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, deployment: Deployment) -> None:
        """Show what has changed."""
        # Before the first plan it only waits for daemons that are starting.
        if self._plan is not None and deployment.phase == "waiting":
            if deployment.detail != self._detail:
                self._detail = deployment.detail
                self._progress.console.print(f"[dim]{deployment.name}: {deployment.detail}[/dim]")
            return
        if deployment.plan is not None and deployment.plan is not self._plan:
            self._plan = deployment.plan
            for bar in self._bars.values():
                self._progress.remove_task(bar)
            self._bars.clear()
            reasons = None if deployment.planned is None else deployment.planned.unused
            print_placement(
                self._progress.console, deployment.name, deployment.plan, reasons=reasons
            )
        for part, load in sorted(deployment.loads.items()):
            name, done, total = self._part_name(*part), load.loaded_bytes, load.total_bytes
            text = f"load {name}"
            if load.fetch is not None and load.is_fetching:
                node_id = self._plan.stages[part[0]].node_ids[part[1]] if self._plan else ""
                text = f"{name} on {node_id}: {load.fetch.text}"
                done, total = load.fetch.present_bytes, load.fetch.total_bytes
            if part not in self._bars:
                self._bars[part] = self._progress.add_task(text, total=total)
            # Without a total the bar only says that something goes on.
            self._progress.update(
                self._bars[part], description=text, completed=done, total=total or None
            )

    def _part_name(self, stage: int, rank: int) -> str:
        is_shared = self._plan is not None and self._plan.stages[stage].num_ranks > 1
        return f"stage {stage} rank {rank}" if is_shared else f"stage {stage}"

    def finish(self, deployment: Deployment) -> None:
        """Fill the bars: the deployment is ready."""
        self.update(deployment)
        for bar in self._bars.values():
            total = self._progress.tasks[self._progress.task_ids.index(bar)].total
            self._progress.update(bar, completed=total)


def status_tables(status: coordinator_pb2.ClusterStatus) -> list[Table | Text]:
    """A cluster: a table of nodes, a table per deployment."""
    nodes = titled_table("nodes", "node", "state", "address", "device", "memory", "used", "beat")
    for node in status.nodes:
        description = node.status.description
        nodes.add_row(
            description.node_id,
            node.state,
            description.address,
            f"{description.device} x {description.num_threads}",
            gib(description.memory_bytes),
            gib(node.status.rss_bytes),
            f"{node.last_beat_seconds:.1f} s",
        )
    parts: list[Table | Text] = [nodes, *measured_tables(status)]
    for deployment in status.deployments:
        parts += [_deployment_table(deployment, status), *_expected(deployment)]
        parts += list(_fetched(deployment))
    return parts


def _expected(deployment: coordinator_pb2.DeploymentStatus) -> Iterator[Text]:
    """What the planner says of a placement that it made."""
    if deployment.HasField("prediction"):
        expected = deployment.prediction
        yield Text(
            f"predicted: {1 / expected.time_per_token_seconds:.4g} tokens/s for one stream, "
            f"{expected.tokens_per_second:.4g} for all; limited by {expected.limiting}"
        )
        if expected.basis:
            yield Text(expected.basis)
    for unused in deployment.unused:
        yield Text(f"not used: {unused.node_id}: {unused.reason}")


def _fetched(deployment: coordinator_pb2.DeploymentStatus) -> Iterator[Text]:
    """How far nodes without files are with their weights, and who sent them."""
    for load in deployment.loads:
        if not load.HasField("fetch"):
            continue
        fetch = load.fetch
        sent = ", ".join(f"{gib(o.num_bytes)} from {o.source}" for o in fetch.origins)
        yield Text(
            f"stage {load.stage} on {load.node_id}: {gib(fetch.present_bytes)} of "
            f"{gib(fetch.total_bytes)} cached; " + (sent or "none sent")
        )


def _deployment_table(
    deployment: coordinator_pb2.DeploymentStatus, status: coordinator_pb2.ClusterStatus
) -> Table:
    state = deployment.state + (f": {deployment.detail}" if deployment.detail else "")
    title = (
        f"{deployment.model} ({deployment.dtype or 'no placement'}): {state}; "
        f"{deployment.active_requests} active, {deployment.generated_tokens} tokens generated"
    )
    is_shared = any(placed.num_ranks > 1 for placed in deployment.stages)
    live = {
        (node.status.description.node_id, stage.stage): stage
        for node in status.nodes
        for stage in node.status.stages
        if stage.deployment_id == deployment.deployment_id
    }
    is_compiled = any(stage.execution not in ("", "eager") for stage in live.values())
    table = titled_table(
        title,
        *("stage", "node", *(("rank",) if is_shared else ()), "layers", "weights"),
        *("KV used", "KV limit", "steps", *(("runs",) if is_compiled else ())),
    )
    for placed in deployment.stages:
        stage = live.get((placed.node_id, placed.stage))
        table.add_row(
            str(placed.stage),
            placed.node_id,
            *((rank_text(placed.tensor_rank, placed.num_ranks),) if is_shared else ()),
            layers(placed.start_layer, placed.end_layer),
            gib(placed.weight_bytes if stage is None else stage.weight_bytes),
            "-" if stage is None else gib(stage.kv_used_bytes),
            gib(placed.kv_bytes),
            "-" if stage is None else str(stage.num_steps),
            *((stage.execution if stage is not None else "-",) if is_compiled else ()),
        )
    return table

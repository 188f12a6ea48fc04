"""The planner's answer for a person: two tables, the prediction in words, what is not used."""

from rich.console import Console
from rich.table import Table

from coordinator.commands.render import layers
from coordinator.commands.units import duration, gib
from coordinator.planner.plan import PlanResult
from coordinator.planner.profiles import Workload

_MAX_UNUSED_SHOWN = 16


def print_plan(
    console: Console, name: str, result: PlanResult, workload: Workload, *, basis: str = ""
) -> None:
    """Print it; `basis` says what the prediction leaves out."""
    plan = result.plan
    console.print(
        f"[bold]{name}[/bold]: {plan.num_layers} layers, {plan.dtype}, "
        f"{workload.concurrency} x {plan.max_context_tokens} tokens, for {workload.objective}",
        highlight=False,
        soft_wrap=True,
    )
    for table in plan_tables(result):
        console.print(table)
    for line in prediction_lines(result, workload, basis=basis):
        console.print(line, highlight=False, soft_wrap=True)


def plan_tables(result: PlanResult) -> tuple[Table, Table]:
    """Who runs what, and the memory that it takes by kind: a row for each rank in both.

    Two tables, so that both fit a terminal of 80 columns.
    """
    is_single = len(result.plan.replicas) == 1
    names = () if is_single else ("replica",)
    placed = _table(
        (*names, "stage", "layers", "node"), ("KV groups", "memory", "of limit", "step")
    )
    kinds = _table(
        (*names, "stage", "node"), ("weights", "embed+head", "KV cache", "activations", "process")
    )
    for number, replica in enumerate(result.plan.replicas):
        for index, stage in enumerate(replica.stages):
            seconds = result.prediction.stage_seconds[number][index]
            for rank_number, rank in enumerate(stage.ranks):
                memory, is_first = rank.memory, rank_number == 0
                place = (
                    *(() if is_single else (str(number) if index == 0 and is_first else "",)),
                    str(index) if is_first else "",
                )
                placed.add_row(
                    *place,
                    layers(stage.start_layer, stage.end_layer) if is_first else "",
                    rank.node_id,
                    str(rank.kv_groups),
                    gib(memory.total),
                    f"{memory.total / rank.memory_limit_bytes:.0%}",
                    duration(seconds) if is_first else "",
                )
                kinds.add_row(
                    *place,
                    rank.node_id,
                    gib(memory.weights),
                    gib(memory.embedding_head),
                    gib(memory.kv),
                    gib(memory.activations),
                    gib(memory.overhead),
                )
    return placed, kinds


def _table(places: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table()
    for heading in places:
        table.add_column(heading, overflow="fold")
    for heading in figures:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def prediction_lines(result: PlanResult, workload: Workload, *, basis: str = "") -> list[str]:
    """How fast it should be, what limits it, what is not used and why."""
    expected = result.prediction
    lines = [
        f"predicted: {1 / expected.time_per_token_seconds:.4g} tokens/s for one stream "
        f"({duration(expected.time_per_token_seconds)} a token)"
        + (
            f", {expected.tokens_per_second:.4g} tokens/s for {workload.concurrency} streams"
            if workload.concurrency > 1
            else ""
        ),
        *([basis] if basis else []),
        f"first token of a prompt of {workload.prompt_tokens} tokens after "
        f"{duration(expected.time_to_first_token_seconds)}",
        f"limited by {expected.limiting}; slowest stage: {expected.limiting_stage}, slowest link: "
        f"{expected.limiting_link}",
        "no better plan exists by these figures"
        if result.is_exact
        else f"found by a heuristic: at most {result.gap:.1%} slower than a bound that no plan "
        "can beat",
    ]
    shown = list(result.unused.items())
    lines += [f"not used: {node}: {reason}" for node, reason in shown[:_MAX_UNUSED_SHOWN]]
    if len(shown) > _MAX_UNUSED_SHOWN:
        lines.append(f"not used: {len(shown) - _MAX_UNUSED_SHOWN} more nodes (--json lists them)")
    return lines

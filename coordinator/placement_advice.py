"""What to tell a person when a model does not fit: the numbers, and what would fit.

Each piece of advice is computed with the same search that refused the placement, so following it
works.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.model_cost import ModelCost, NodeCapacity, StageCosts
from stagemesh.errors import ConfigError
from stagemesh.model_spec import ELEMENT_BYTES

_GIB = 2**30
_MAX_NODES_SHOWN = 16
_SMALL_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a placement must hold."""

    model: ModelCost
    """The weights."""
    max_context_tokens: int
    """Longest session."""
    concurrency: int
    """Sessions of that length at once."""

    def __post_init__(self) -> None:
        if self.max_context_tokens < 1 or self.concurrency < 1:
            raise ConfigError(
                f"max_context_tokens and concurrency must be at least 1, got "
                f"{self.max_context_tokens} and {self.concurrency}"
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens that each stage's KV cache must hold."""
        return self.max_context_tokens * self.concurrency


def explain_misfit(
    demand: Demand,
    *,
    nodes: Sequence[NodeCapacity],
    wanted: Sequence[int],
    would_fit: Callable[[Demand], bool],
    is_slow: bool = False,
) -> str:
    """The message of a refused placement.

    Args:
        demand: what was asked.
        nodes: those that were to be used, in pipeline order.
        wanted: layers of each node by its memory.
        would_fit: whether another demand fits the same nodes.
        is_slow: whether asking that takes long; streams and context are then halved until they
            fit, and the most that fits may be up to twice as much.
    """
    model = demand.model
    costs = StageCosts(model, kv_tokens=demand.kv_tokens)
    weights, kv = model.total_weight_bytes(), costs.kv_bytes(model.num_layers)
    if model.tied and len(nodes) > 1:
        weights += model.head_bytes
    available = sum(node.memory_bytes for node in nodes)
    return "\n".join(
        [
            f"the model does not fit: {model.num_layers} layers in {model.dtype} require "
            f"{_gib(weights + kv)} ({_gib(weights)} weights, {_gib(kv)} KV cache for "
            f"{demand.concurrency} x {demand.max_context_tokens} tokens), available are "
            f"{_gib(available)} on {len(nodes)} node(s)",
            *_node_lines(costs, nodes, wanted),
            *(
                f"would fit: {line}"
                for line in _advice(demand, would_fit, _halved if is_slow else _largest_fitting)
            ),
        ]
    )


def _node_lines(
    costs: StageCosts, nodes: Sequence[NodeCapacity], wanted: Sequence[int]
) -> list[str]:
    lines: list[str] = []
    start = 0
    for node, count in zip(nodes, wanted, strict=True):
        end = start + count
        need = costs.stage_bytes(start, end)
        lack = need - node.memory_bytes
        lines.append(
            f"  {node.node_id}: layers [{start}, {end}) by its share of memory require "
            f"{_gib(need)}, available {_gib(node.memory_bytes)}"
            + (f": lacks {_gib(lack)} ({lack} bytes)" if lack > 0 else "")
        )
        start = end
    if len(lines) > _MAX_NODES_SHOWN:
        return [*lines[:_MAX_NODES_SHOWN], f"  and {len(lines) - _MAX_NODES_SHOWN} more nodes"]
    return lines


def _advice(
    demand: Demand,
    would_fit: Callable[[Demand], bool],
    most: Callable[[int, Callable[[int], bool]], int],
) -> list[str]:
    lines: list[str] = []
    streams = most(demand.concurrency, lambda n: would_fit(replace(demand, concurrency=n)))
    if streams:
        lines.append(f"{streams} stream(s) of {demand.max_context_tokens} tokens")
    context = most(
        demand.max_context_tokens, lambda n: would_fit(replace(demand, max_context_tokens=n))
    )
    if context:
        lines.append(f"a context of {context} tokens for {demand.concurrency} stream(s)")
    elif demand.concurrency > 1:
        single = replace(demand, concurrency=1)
        context = most(
            demand.max_context_tokens, lambda n: would_fit(replace(single, max_context_tokens=n))
        )
        if context:
            lines.append(f"a context of {context} tokens for 1 stream")
    if ELEMENT_BYTES[demand.model.dtype] > ELEMENT_BYTES[_SMALL_DTYPE]:
        smaller = replace(demand, model=demand.model.with_dtype(_SMALL_DTYPE))
        if would_fit(smaller):
            lines.append(f"dtype {_SMALL_DTYPE} with the same context and streams")
    if not lines:
        lines.append(
            "nothing on these nodes (no shorter context, fewer streams or smaller dtype helps); "
            "add nodes or memory, or take a smaller model"
        )
    return lines


def _largest_fitting(asked: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [1, asked) that fits, 0 when none does; what is below it fits too."""
    if asked <= 1 or not fits(1):
        return 0
    low, high = 1, asked - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _halved(asked: int, fits: Callable[[int], bool]) -> int:
    """The first of asked / 2, asked / 4, ... that fits, 0 when none does."""
    while asked > 1:
        asked //= 2
        if fits(asked):
            return asked
    return 0


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"

"""A placement as a picture: stages from left to right, what fills each node, what limits the whole.

    coordinator -> [stage 0 | layers | node: memory bar] -> [stage 1 ...] -> coordinator

Rows break as text does. What limits the plan is red. The picture is made of shapes and text only,
so every browser shows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from coordinator.planner.plan import MemoryByKind, PlanResult, RankShare, ReplicaPlan, StagePlan
from coordinator.planner.profiles import Workload

_WIDTH, _MARGIN, _TOP = 1240, 28, 84
_CARD, _PILL, _GAP, _ROW_GAP = 232, 104, 76, 36
_HEAD, _RANK, _PILL_HEIGHT = 58, 62, 36
_MAX_RANKS, _MAX_NAME, _MAX_LINE, _MAX_UNUSED = 4, 26, 170, 8
_BAR = _CARD - 24
_INK, _FAINT, _LINE, _RED, _PAPER, _CARD_FILL = (
    "#1f2933",
    "#616e7c",
    "#9aa5b1",
    "#c62828",
    "#ffffff",
    "#f7f9fb",
)
_KINDS = (
    ("weights", "weights", "#3b6fb6"),
    ("embedding_head", "embedding, head", "#7fb3e0"),
    ("kv", "KV cache", "#e08b3a"),
    ("activations", "activations", "#5fae62"),
    ("overhead", "process", "#a3a9b1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Something on the way of a step."""

    stage: int | None
    """None for the coordinator."""
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """Height at which arrows arrive."""
        return self.y + _PILL_HEIGHT / 2


def plan_svg(name: str, result: PlanResult, workload: Workload) -> str:
    """The picture."""
    parts: list[str] = []
    y = float(_TOP)
    for number, replica in enumerate(result.plan.replicas):
        if len(result.plan.replicas) > 1:
            parts.append(_text(_MARGIN, y + 4, f"replica {number}", weight="bold"))
            y += 18
        boxes = _layout(replica, y)
        parts += _links(replica, boxes, result, number)
        parts += [line for box in boxes for line in _box(box, replica, result, number)]
        y = max(box.y + box.height for box in boxes) + _ROW_GAP
    parts += _legend(y)
    y += 30
    for line in _footer(result):
        parts.append(_text(_MARGIN, y, _short(line, _MAX_LINE), color=_FAINT))
        y += 18
    height = y + _MARGIN - 10
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{_WIDTH}" height="{height:g}" fill="{_PAPER}"/>',
        '<defs><marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        f'<path d="M0,0.5 L5.5,3 L0,5.5 z" fill="{_LINE}"/></marker>'
        '<marker id="redtip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        f'<path d="M0,0.5 L5.5,3 L0,5.5 z" fill="{_RED}"/></marker></defs>',
        _text(_MARGIN, 36, _title(_short(name, 60), result, workload), size=18, weight="bold"),
        _text(_MARGIN, 58, _summary(result, workload), color=_FAINT, size=13),
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _title(name: str, result: PlanResult, workload: Workload) -> str:
    plan = result.plan
    return (
        f"{name}: {plan.num_layers} layers in {plan.dtype}, "
        f"{workload.concurrency} x {plan.max_context_tokens} tokens"
    )


def _summary(result: PlanResult, workload: Workload) -> str:
    expected = result.prediction
    return (
        f"predicted {1 / expected.time_per_token_seconds:.3g} tokens/s for one stream, "
        f"{expected.tokens_per_second:.3g} for {workload.concurrency}; first token of "
        f"{workload.prompt_tokens} after {_ms(expected.time_to_first_token_seconds)}; "
        f"limited by {_short(expected.limiting, 60)}"
    )


def _footer(result: PlanResult) -> Iterator[str]:
    shown = list(result.unused.items())
    for node, reason in shown[:_MAX_UNUSED]:
        yield f"not used: {_short(node)}: {reason}"
    if len(shown) > _MAX_UNUSED:
        yield f"not used: {len(shown) - _MAX_UNUSED} more"


def _layout(replica: ReplicaPlan, top: float) -> list[_Box]:
    """Places from left to right; a row that is full is followed by the next."""
    boxes: list[_Box] = []
    x, y, row_height = float(_MARGIN), top, 0.0
    stages: list[int | None] = [None, *range(replica.num_stages), None]
    for stage in stages:
        width = _PILL if stage is None else _CARD
        height = _PILL_HEIGHT if stage is None else _card_height(replica.stages[stage])
        if x + width > _WIDTH - _MARGIN:
            x, y, row_height = _MARGIN + _GAP, y + row_height + _ROW_GAP, 0.0
        boxes.append(_Box(stage=stage, x=x, y=y, width=width, height=height))
        x += width + _GAP
        row_height = max(row_height, height)
    return boxes


def _card_height(stage: StagePlan) -> float:
    shown = min(len(stage.ranks), _MAX_RANKS)
    return _HEAD + shown * _RANK + (18 if len(stage.ranks) > shown else 0)


def _links(
    replica: ReplicaPlan, boxes: list[_Box], result: PlanResult, number: int
) -> Iterator[str]:
    names = ["coordinator", *(s.node_ids[0] for s in replica.stages), "coordinator"]
    seconds = result.prediction.link_seconds[number]
    for index, (a, b) in enumerate(pairwise(boxes)):
        is_limit = result.prediction.limiting == f"link {names[index]} -> {names[index + 1]}"
        color, tip = (_RED, "redtip") if is_limit else (_LINE, "tip")
        start, end = a.x + a.width, b.x - 3
        if a.y == b.y:
            path = f"M{start:g},{a.middle:g} L{end:g},{b.middle:g}"
            label_x, label_y = (start + b.x) / 2, a.middle - 7
        else:  # down to the next row, through the gap between rows
            # The text stands beside the last part of the way: rows may end at the margin.
            between = b.y - _ROW_GAP / 2
            path = (
                f"M{start:g},{a.middle:g} h14 V{between:g} H{b.x - 40:g} "
                f"V{b.middle:g} L{end:g},{b.middle:g}"
            )
            label_x, label_y = b.x - 36, b.middle + 18
        yield (
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" '
            f'marker-end="url(#{tip})"/>'
        )
        yield _text(
            label_x, label_y, _ms(seconds[index]), color=color if is_limit else _FAINT,
            size=11, anchor="middle",
        )  # fmt: skip


def _box(box: _Box, replica: ReplicaPlan, result: PlanResult, number: int) -> Iterator[str]:
    if box.stage is None:
        yield _rect(box, fill=_INK, radius=_PILL_HEIGHT / 2)
        yield _text(box.x + box.width / 2, box.y + 23, "coordinator", color=_PAPER, anchor="middle")
        return
    stage = replica.stages[box.stage]
    is_limit = result.prediction.limiting == f"stage {box.stage} on {'+'.join(stage.node_ids)}"
    yield _rect(box, fill=_CARD_FILL, radius=8, stroke=_RED if is_limit else _LINE)
    yield _text(box.x + 12, box.y + 23, f"stage {box.stage}", size=14, weight="bold")
    seconds = result.prediction.stage_seconds[number][box.stage]
    yield _text(
        box.x + box.width - 12, box.y + 23, f"{_ms(seconds)} a step", anchor="end",
        color=_RED if is_limit else _FAINT,
    )  # fmt: skip
    layers = f"layers {stage.start_layer}-{stage.end_layer - 1} ({stage.num_layers})"
    yield _text(box.x + 12, box.y + 43, layers, color=_FAINT)
    for index, rank in enumerate(stage.ranks[:_MAX_RANKS]):
        yield from _rank(
            rank, box.x + 12, box.y + _HEAD + index * _RANK, alone=len(stage.ranks) == 1
        )
    if len(stage.ranks) > _MAX_RANKS:
        y = box.y + _HEAD + _MAX_RANKS * _RANK + 8
        yield _text(box.x + 12, y, f"and {len(stage.ranks) - _MAX_RANKS} more ranks", color=_FAINT)


def _rank(rank: RankShare, x: float, y: float, *, alone: bool) -> Iterator[str]:
    memory, limit = rank.memory, max(rank.memory_limit_bytes, 1)
    yield _text(x, y + 12, _short(rank.node_id), weight="bold")
    if not alone:
        yield _text(x + _BAR, y + 12, f"{rank.kv_groups} KV groups", anchor="end", color=_FAINT)
    yield (f'<rect x="{x:g}" y="{y + 20:g}" width="{_BAR}" height="12" fill="#e4e9ee" rx="2"/>')
    left = x
    for kind, _, color in _KINDS:
        width = _BAR * _bytes_of(memory, kind) / limit
        if width >= 0.2:
            yield (
                f'<rect x="{left:.1f}" y="{y + 20:g}" width="{width:.1f}" height="12" '
                f'fill="{color}"/>'
            )
        left += width
    yield _text(
        x, y + 46, f"{_size(memory.total)} of {_size(limit)} ({memory.total / limit:.0%})",
        color=_FAINT, size=11,
    )  # fmt: skip


def _legend(y: float) -> Iterator[str]:
    x = float(_MARGIN)
    for _, words, color in _KINDS:
        yield f'<rect x="{x:g}" y="{y - 9:g}" width="12" height="12" fill="{color}" rx="2"/>'
        yield _text(x + 18, y + 1, words, color=_FAINT)
        x += 44 + 7 * len(words)


def _bytes_of(memory: MemoryByKind, kind: str) -> int:
    value: int = getattr(memory, kind)
    return value


def _rect(box: _Box, *, fill: str, radius: float, stroke: str | None = None) -> str:
    edge = "" if stroke is None else f' stroke="{stroke}" stroke-width="2"'
    return (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" '
        f'rx="{radius:g}" fill="{fill}"{edge}/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    color: str = _INK,
    size: int = 12,
    weight: str = "normal",
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _short(text: str, limit: int = _MAX_NAME) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"

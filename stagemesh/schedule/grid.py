"""TimeGrid: when each rank does what, and where it idles. Torch-free.

    GPipe, 3 stages, 2 micro-batches, F and B of one slot each; dots are the bubble:

    rank 0 | F0 F1 .  .  .  .  B0 B1
    rank 1 | .  F0 F1 .  .  B0 B1 .        2 (p - 1) = 4 idle slots in each row,
    rank 2 | .  .  F0 F1 B0 B1 .  .        a part of (p - 1) / (m + p - 1) = 2 / 4 of it

`simulate` makes the grid of a schedule under given costs; the executor of a pipeline makes one of
what it measured. Both are counted alike.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import Action, ActionKind, Product, needs_of, product_of
from stagemesh.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long each kind of action takes, in any unit."""

    forward: float = 1
    backward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    transfer: float = 0
    """From the end of an action to where another rank has its result."""

    def __post_init__(self) -> None:
        for kind in (k for k in ActionKind if k.is_compute):
            if not self.of(kind) > 0:
                raise ConfigError(f"cost of {kind.name} must be positive, got {self.of(kind)}")
        if self.transfer < 0:
            raise ConfigError(f"cost of transfer must not be negative, got {self.transfer}")

    def of(self, kind: ActionKind) -> float:
        """The cost of a compute action."""
        return {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.BACKWARD_INPUT: self.backward_input,
            ActionKind.BACKWARD_WEIGHT: self.backward_weight,
        }[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action and when it ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGrid:
    """The compute actions of each rank with their times."""

    rows: tuple[tuple[TimedAction, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        cells = [cell for row in self.rows for cell in row]
        if not cells:
            return 0
        return max(cell.end for cell in cells) - min(cell.start for cell in cells)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(cell.end - cell.start for cell in self.rows[rank])

    def idle(self, rank: int) -> float:
        """How long a rank waits: its bubble."""
        return self.makespan - self.busy(rank)

    def bubble_slots(self, rank: int, *, slot: float = 1) -> int:
        """The bubble of a rank in slots of a given length."""
        return round(self.idle(rank) / slot)

    def bubble_ratio(self) -> float:
        """The part of all ranks' time that is bubble."""
        total = self.makespan * len(self.rows)
        return sum(self.idle(rank) for rank in range(len(self.rows))) / total if total else 0.0

    def render(self, *, slot: float = 1) -> str:
        """A line per rank, a column per slot; dots are idle.

        Cells say kind and micro-batch; also the stage, where a rank has several.
        """
        has_several = any(len({cell.action.stage for cell in row}) > 1 for row in self.rows)
        begin = min((cell.start for row in self.rows for cell in row), default=0)
        columns = round(self.makespan / slot)
        lines = []
        for row in self.rows:
            texts = ["."] * columns
            for cell in row:
                action = cell.action
                text = str(action) if has_several else f"{action.kind.value}{action.microbatch}"
                first = round((cell.start - begin) / slot)
                for column in range(first, max(first + 1, round((cell.end - begin) / slot))):
                    texts[min(column, columns - 1)] = text
            lines.append(texts)
        width = max((len(text) for texts in lines for text in texts), default=1)
        return "\n".join(
            f"rank {rank} | " + " ".join(text.ljust(width) for text in texts).rstrip()
            for rank, texts in enumerate(lines)
        )


def simulate(schedule: Schedule, *, costs: Costs | None = None) -> TimeGrid:
    """Run a schedule in time: each action as soon as its rank is free and its needs are there.

    Raises:
        ConfigError: it deadlocks; names where each rank stands and what it waits for.
    """
    costs = costs or Costs()
    programs = schedule.compute_only().programs
    rows: list[list[TimedAction]] = [[] for _ in programs]
    ready: dict[Product, float] = {}
    remaining = sum(map(len, programs))
    while remaining:
        before = remaining
        for rank, program in enumerate(programs):
            while len(rows[rank]) < len(program):
                action = program[len(rows[rank])]
                start = _start(schedule, action, free=_end(rows[rank]), ready=ready, costs=costs)
                if start is None:
                    break
                end = start + costs.of(action.kind)
                rows[rank].append(TimedAction(action=action, start=start, end=end))
                if (product := product_of(action)) is not None:
                    ready[product] = end
                remaining -= 1
        if remaining == before:
            raise ConfigError(_stuck(schedule, [len(row) for row in rows], ready))
    return TimeGrid(rows=tuple(map(tuple, rows)))


def max_in_flight(actions: Sequence[Action]) -> dict[int, int]:
    """The most micro-batches that each stage of a program has between forward and backward.

    A micro-batch is in flight from its forward to the end of its backward; where that is split, to
    the end of its weight half, which still needs the activations.
    """
    last = {
        (a.stage, a.microbatch): a
        for a in actions
        if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
    }
    now: defaultdict[int, int] = defaultdict(int)
    most: defaultdict[int, int] = defaultdict(int)
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif last.get((action.stage, action.microbatch)) is action:
            now[action.stage] -= 1
    return dict(most)


def _end(row: Sequence[TimedAction]) -> float:
    return row[-1].end if row else 0


def _start(
    schedule: Schedule, action: Action, *, free: float, ready: dict[Product, float], costs: Costs
) -> float | None:
    start = free
    for product in needs_of(action, num_stages=schedule.num_stages):
        if product not in ready:
            return None
        is_remote = schedule.stage_ranks[product.stage] != schedule.stage_ranks[action.stage]
        start = max(start, ready[product] + (costs.transfer if is_remote else 0))
    return start


def _stuck(schedule: Schedule, positions: list[int], ready: dict[Product, float]) -> str:
    waits = []
    for rank, (position, program) in enumerate(
        zip(positions, schedule.compute_only().programs, strict=True)
    ):
        if position < len(program):
            needs = needs_of(program[position], num_stages=schedule.num_stages)
            missing = next(p for p in needs if p not in ready)
            waits.append(
                f"rank {rank} at {program[position]} waits for the {missing.kind} of stage "
                f"{missing.stage}, micro-batch {missing.microbatch}"
            )
    return f"schedule {schedule.name} deadlocks: " + "; ".join(waits)

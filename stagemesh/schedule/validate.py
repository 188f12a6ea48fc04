"""Whether a schedule is right: complete, in an order that can be kept, free of deadlocks.

    validate(schedule)      raises ConfigError with the first thing that is wrong

Checked are, in this order: places (stages on ranks that exist, actions on the rank of their stage),
completeness (each stage and micro-batch has one forward and one backward, whole or in two halves;
each result that another rank needs is sent once and received once), order within a rank, and that
all ranks come to the end of their programs: without transfers each waiting for what it needs, with
them each send waiting for its receive too. Torch-free.
"""

from collections import Counter

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import (
    Action,
    ActionKind,
    Product,
    moved_by,
    needs_of,
    product_of,
    receiver_of,
)
from stagemesh.schedule.grid import simulate
from stagemesh.schedule.schedule import Schedule, check_sizes
from stagemesh.schedule.transfers import peer_of, receive_of, send_of

_WHOLE = (ActionKind.BACKWARD,)
_HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


def validate(schedule: Schedule) -> None:
    """Check a schedule, with or without transfers.

    Raises:
        ConfigError: it is wrong; says what and where.
    """
    check_sizes(num_microbatches=schedule.num_microbatches, num_stages=schedule.num_stages)
    _check_places(schedule)
    _check_computation(schedule)
    if schedule.has_transfers:
        _check_transfers(schedule)
    _check_order(schedule)
    simulate(schedule)
    if schedule.has_transfers:
        run_rendezvous(schedule)


def run_rendezvous(schedule: Schedule) -> None:
    """Run the programs where a send ends only with its receive, and both block their rank.

    The strictest that a backend can be. What ends here ends everywhere.

    Raises:
        ConfigError: the ranks do not come to their ends; says where each stands.
    """
    positions = [0] * schedule.num_ranks
    while True:
        has_moved = False
        for rank, program in enumerate(schedule.programs):
            while positions[rank] < len(program) and _can_pass(schedule, rank, positions):
                action = program[positions[rank]]
                if action.kind.is_send:
                    positions[_peer(schedule, action)] += 1
                positions[rank] += 1
                has_moved = True
        heads = [
            f"rank {rank} at the {program[at].in_words()}"
            for rank, (at, program) in enumerate(zip(positions, schedule.programs, strict=True))
            if at < len(program)
        ]
        if not heads:
            return
        if not has_moved:
            raise ConfigError(
                f"schedule {schedule.name} deadlocks where a send waits for its receive: "
                + "; ".join(heads)
            )


def _can_pass(schedule: Schedule, rank: int, positions: list[int]) -> bool:
    action = schedule.programs[rank][positions[rank]]
    if action.kind.is_compute:
        return True
    if action.kind.is_receive:
        return False  # it passes with its send
    peer = _peer(schedule, action)
    at = positions[peer]
    program = schedule.programs[peer]
    return at < len(program) and program[at] == receive_of(moved_by(action))


def _peer(schedule: Schedule, send: Action) -> int:
    return schedule.stage_ranks[receiver_of(moved_by(send))]


def _check_places(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.num_ranks:
            raise ConfigError(
                f"stage {stage} is on rank {rank}, but the schedule has the ranks "
                f"0 to {schedule.num_ranks - 1}"
            )
    for rank, program in enumerate(schedule.programs):
        for action in program:
            if not 0 <= action.stage < schedule.num_stages:
                raise ConfigError(f"rank {rank}: {action} is of a stage that does not exist")
            if not 0 <= action.microbatch < schedule.num_microbatches:
                raise ConfigError(f"rank {rank}: {action} is of a micro-batch that does not exist")
            if schedule.stage_ranks[action.stage] != rank:
                raise ConfigError(
                    f"rank {rank} has {action}, but stage {action.stage} is on rank "
                    f"{schedule.stage_ranks[action.stage]}"
                )


def _check_computation(schedule: Schedule) -> None:
    counts = _counts(schedule)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            _check_once(counts, ActionKind.FORWARD, stage, microbatch)
            is_split = any(_count(counts, kind, stage, microbatch) for kind in _HALVES)
            for kind in _HALVES if is_split else _WHOLE:
                _check_once(counts, kind, stage, microbatch)
            if is_split and _count(counts, ActionKind.BACKWARD, stage, microbatch):
                raise ConfigError(
                    f"stage {stage}, micro-batch {microbatch} has a whole backward beside its "
                    "halves"
                )


def _check_transfers(schedule: Schedule) -> None:
    wanted: Counter[Action] = Counter()
    for program in schedule.programs:
        for action in program:
            product = product_of(action)
            if product is not None and peer_of(product, schedule) is not None:
                wanted.update([send_of(product), receive_of(product)])
    found = Counter({a: n for a, n in _counts(schedule).items() if not a.kind.is_compute})
    for action in wanted - found:
        raise ConfigError(f"the {action.in_words()} is missing")
    for action in found - wanted:
        raise ConfigError(f"the {action.in_words()} is not needed, or there twice")


def _check_order(schedule: Schedule) -> None:
    """Within a rank; what comes of other ranks is checked by running the programs."""
    for rank, program in enumerate(schedule.programs):
        there: set[Product] = set()
        for action in program:
            for product in _local_needs(schedule, action):
                if product not in there:
                    raise ConfigError(
                        f"rank {rank}: the {action.in_words()} comes before the {product.kind} of "
                        f"stage {product.stage} that it needs"
                    )
            if (made := product_of(action)) is not None:
                there.add(made)
            elif action.kind.is_receive:
                there.add(moved_by(action))


def _local_needs(schedule: Schedule, action: Action) -> list[Product]:
    """What must be on the rank before an action of its program."""
    if action.kind.is_receive:
        return []
    if action.kind.is_send:
        return [moved_by(action)]
    rank = schedule.stage_ranks[action.stage]
    needs = needs_of(action, num_stages=schedule.num_stages)
    if schedule.has_transfers:
        return list(needs)
    return [product for product in needs if schedule.stage_ranks[product.stage] == rank]


def _counts(schedule: Schedule) -> Counter[Action]:
    return Counter(action for program in schedule.programs for action in program)


def _count(counts: Counter[Action], kind: ActionKind, stage: int, microbatch: int) -> int:
    return counts[Action(kind=kind, stage=stage, microbatch=microbatch)]


def _check_once(counts: Counter[Action], kind: ActionKind, stage: int, microbatch: int) -> None:
    count = _count(counts, kind, stage, microbatch)
    if count != 1:
        action = Action(kind=kind, stage=stage, microbatch=microbatch)
        raise ConfigError(f"the {action.in_words()} is there {count} times, not once")

"""Adds sends and receives to a schedule, in an order that cannot deadlock. Torch-free.

All ranks' programs are laid out on one time line (that of the grid). At the end of an action whose
result another rank needs, the send goes into the one program and the receive into the other, at
that same point of the line:

    rank 0 | F0.0 F>0.0       F0.1 F>0.1
    rank 1 |      >F1.0  F1.0      >F1.1  F1.1
    time     ------------------------------------>

So every program is a part of one common order in which a send and its receive are one event, and
the first event of it that has not happened can always happen, even where a send ends only with its
receive (Gloo). Also, of two ranks the one receives in the order in which the other sends: no
message that is wanted waits behind one that nobody takes yet, however small a bound on messages
under way is. `stagemesh.schedule.validate` runs the result by those strict rules.
"""

from stagemesh.schedule.actions import (
    Action,
    ActionKind,
    Product,
    product_of,
    receiver_of,
)
from stagemesh.schedule.grid import Costs, simulate
from stagemesh.schedule.schedule import Schedule

_LIKELY_COSTS = Costs(backward=2)


def add_transfers(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """The schedule with the sends and receives between ranks.

    Args:
        schedule: what each rank computes; transfers that it has are replaced.
        costs: of its actions, to lay them out in time. They change the order of transfers, and
            how long an activation lies at its receiver; any will do.

    Raises:
        ConfigError: the schedule deadlocks.
    """
    grid = simulate(schedule, costs=costs or _LIKELY_COSTS)
    programs: list[list[Action]] = [[] for _ in grid.rows]
    # At one time first what ends, then what begins: a receive comes before what needs it.
    events = [
        (cell.end if is_end else cell.start, 0 if is_end else 1, rank, index, cell.action)
        for rank, row in enumerate(grid.rows)
        for index, cell in enumerate(row)
        for is_end in (False, True)
    ]
    for _, begins, rank, _, action in sorted(events, key=lambda event: event[:4]):
        if begins:
            programs[rank].append(action)
            continue
        product = product_of(action)
        if product is not None and (peer := peer_of(product, schedule)) is not None:
            programs[rank].append(send_of(product))
            programs[peer].append(receive_of(product))
    return schedule.with_programs(programs)


def peer_of(product: Product, schedule: Schedule) -> int | None:
    """The other rank that needs a product; None if none does."""
    receiver = receiver_of(product)
    if not 0 <= receiver < schedule.num_stages:
        return None
    rank = schedule.stage_ranks[receiver]
    return None if rank == schedule.stage_ranks[product.stage] else rank


def send_of(product: Product) -> Action:
    """What sends it."""
    is_activation = product.kind == "activation"
    return Action(
        kind=ActionKind.SEND_ACTIVATION if is_activation else ActionKind.SEND_GRADIENT,
        stage=product.stage,
        microbatch=product.microbatch,
    )


def receive_of(product: Product) -> Action:
    """What receives it."""
    is_activation = product.kind == "activation"
    return Action(
        kind=ActionKind.RECV_ACTIVATION if is_activation else ActionKind.RECV_GRADIENT,
        stage=receiver_of(product),
        microbatch=product.microbatch,
    )

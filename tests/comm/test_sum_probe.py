"""What a sum adds to the work of two ranks, of which now one and now the other is the slower."""

import time

import pytest
import torch

from node.sum_probe import added_to_work
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.process_group import ProcessGroup
from tests.support.ranks import run_ranks

_LONG_SECONDS = 0.006


def added(*, takes_turns: bool) -> list[float]:
    """On both ranks, each of which takes long every other time."""

    def on_rank(group: ProcessGroup) -> float:
        sums = DirectGroup(group)
        sums.connect(within_process=True)
        own = group.rank if takes_turns else 0

        def work(count: int) -> None:
            if (count + own) % 2:
                time.sleep(_LONG_SECONDS)

        try:
            return added_to_work(sums, torch.zeros(4), work)
        finally:
            sums.close()

    results: list[float] = run_ranks(2, on_rank, backend="grpc", timeout_seconds=20.0)
    return results


@pytest.mark.slow  # it sleeps
def test_the_wait_for_the_slower_rank_counts() -> None:
    """Without sums a rank is slow every other time, with them one of the two is each time."""
    together, in_turns = added(takes_turns=False), added(takes_turns=True)
    assert together[0] == together[1]
    assert in_turns[0] == in_turns[1]
    assert in_turns[0] > _LONG_SECONDS / 4  # half, less what the machine blurs
    assert in_turns[0] > 2 * together[0]

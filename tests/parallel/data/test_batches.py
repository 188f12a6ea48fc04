"""Data that does not divide evenly: the same number of steps on each rank, and no hang."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.data.batches import even_batches
from stagemesh.parallel.data.data_parallel import DataParallel
from tests.parallel.data.training import data, distance, loss_of, make_model
from tests.support.ranks import run_ranks


def without_length(batches: list[str]) -> Iterator[str]:
    yield from batches


def steps(group: ProcessGroup, batches: Any, **kwargs: Any) -> list[tuple[str, float]]:
    even = even_batches(batches, process_group=group, num_items=len, **kwargs)
    return [(item.batch, item.weight) for item in even]


@pytest.mark.parametrize("is_sized", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        # Five samples in batches of two on two ranks.
        ([["ab", "e"], ["cd"]], [[("ab", 2), ("e", 1)], [("cd", 2), ("cd", 0)]]),
        (
            [["a", "b", "c"], ["d", "e"]],
            [[("a", 1), ("b", 1), ("c", 1)], [("d", 1), ("e", 1), ("e", 0)]],
        ),
        (
            [["a"], ["b", "c", "d"]],
            [[("a", 1), ("a", 0), ("a", 0)], [("b", 1), ("c", 1), ("d", 1)]],
        ),
        ([["a"], ["b"]], [[("a", 1)], [("b", 1)]]),
        ([[], []], [[], []]),
    ],
)
def test_as_many_steps_as_the_longest(
    by_rank: list[list[str]], expected: list[Any], is_sized: tuple[bool, bool]
) -> None:
    def on_rank(group: ProcessGroup) -> list[tuple[str, float]]:
        batches = by_rank[group.rank]
        return steps(group, batches if is_sized[group.rank] else without_length(batches))

    results = run_ranks(2, on_rank)
    assert len({len(result) for result in results}) == 1
    for result, wanted in zip(results, expected, strict=True):
        assert result == wanted


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_rank_without_any_batch(is_sized: bool) -> None:
    def on_rank(group: ProcessGroup) -> list[tuple[str, float]]:
        batches = [[], ["ab", "c"]][group.rank]
        return steps(group, batches if is_sized else without_length(batches), stand_in="zz")

    assert run_ranks(2, on_rank) == [[("zz", 0), ("zz", 0)], [("ab", 2), ("c", 1)]]


@pytest.mark.parametrize("is_sized", [True, False])
def test_without_a_stand_in_all_ranks_hear_of_it(is_sized: bool) -> None:
    def on_rank(group: ProcessGroup) -> None:
        batches = [["ab"], []][group.rank]
        with pytest.raises(ConfigError, match=r"ranks \[1\] have no batch"):
            steps(group, batches if is_sized else without_length(batches))

    run_ranks(2, on_rank)


def test_a_length_that_is_wrong() -> None:
    class Short(list[str]):
        def __len__(self) -> int:
            return 3

    def on_rank(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match="ended after 1, but their length is 3"):
            steps(group, Short(["a"]))

    run_ranks(1, on_rank)


def test_a_group_of_one() -> None:
    assert run_ranks(1, lambda group: steps(group, ["ab", "c"])) == [[("ab", 2), ("c", 1)]]


def test_training_with_a_tail_is_that_of_one_process() -> None:
    """Seven samples, batches of two on two ranks: each step's mean is over the step's samples."""
    samples = torch.cat([data(0), data(1)])[:7]
    of_rank = [[samples[0:2], samples[4:6]], [samples[2:4], samples[6:7]]]
    of_rank[0].append(samples[0:1])

    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for together in (samples[0:4], samples[4:7], samples[0:1]):
        optimizer.zero_grad()
        loss_of(alone, together).backward()
        optimizer.step()

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DataParallel(make_model(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for item in even_batches(of_rank[group.rank], process_group=group, num_items=len):
            optimizer.zero_grad()
            model.backward(loss_of(model, item.batch), weight=item.weight)
            optimizer.step()
        return dict(model.module.named_parameters())

    for ours in run_ranks(2, on_rank):
        assert distance(ours, dict(alone.named_parameters())) < 1e-5


def test_without_it_the_tail_is_a_timeout() -> None:
    """Negative control: what the helper is for."""

    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(make_model(), process_group=group)
        for step in range(2 - group.rank):
            loss_of(model, data(step)).backward()
        if group.rank == 1:
            group.recv(torch.empty(1), src=0, timeout=5.0)  # alive, and elsewhere

    with pytest.raises(Exception, match="timed out on rank 0") as caught:
        run_ranks(2, on_rank, timeout_seconds=1.0)
    assert type(caught.value).__name__ == "CollectiveTimeout"

"""even_batches: as many steps on each rank, however the data was cut.

A rank with a batch less than the others would leave them waiting in the reduction of a step that it
never makes. The rule here: there are as many steps as the rank with the most batches has. A rank
that has run out goes on with its last batch, of weight 0, so that it takes part in whatever the
others do in a step, and counts nothing in DataParallel.backward(loss, weight=...).

    5 samples, 2 ranks, batches of 2    rank 0: [a b] 2, [e] 1      rank 1: [c d] 2, [c d] 0
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError

BatchT = TypeVar("BatchT")

_UNKNOWN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedBatch(Generic[BatchT]):
    """A batch and what it counts."""

    batch: BatchT
    """Data to compute with, also where it counts nothing."""
    weight: float
    """Its items; 0 when it only stands in."""


def even_batches(
    batches: Iterable[BatchT],
    *,
    process_group: ProcessGroup,
    num_items: Callable[[BatchT], float],
    stand_in: BatchT | None = None,
) -> Iterator[WeightedBatch[BatchT]]:
    """This rank's batches, and then its last one again until no rank has any left.

    A collective of all ranks, at the first step only where all ranks' `batches` have a length, else
    at each step.

    Args:
        batches: this rank's; may be shorter than those of other ranks, and empty.
        process_group: the ranks that step together.
        num_items: what a batch counts: its samples or tokens.
        stand_in: for a rank without any batch.

    Raises:
        ConfigError: on all ranks, if one has neither a batch nor a stand-in while others have; or
            here, if `batches` has fewer batches than its length says.
    """
    num_own = len(batches) if isinstance(batches, Sized) else _UNKNOWN
    told = _tell(num_own, process_group)
    iterator = iter(batches)
    last = stand_in
    num_steps = 0
    while True:
        batch = next(iterator, None)
        if _UNKNOWN in told:
            counts = _tell(int(batch is not None), process_group)
            is_over = not any(counts)
        else:
            counts = told
            is_over = num_steps == max(counts)
        if num_steps == 0 and not is_over:
            _check_start(counts, has_stand_in=stand_in is not None, process_group=process_group)
        if is_over:
            return
        if batch is None and _UNKNOWN not in told and num_steps < num_own:
            raise ConfigError(f"batches ended after {num_steps}, but their length is {num_own}")
        weight = 0.0 if batch is None else num_items(batch)
        last = last if batch is None else batch
        assert last is not None
        num_steps += 1
        yield WeightedBatch(batch=last, weight=weight)


def _tell(number: int, process_group: ProcessGroup) -> list[int]:
    """The numbers of all ranks."""
    told = torch.empty(process_group.size, dtype=torch.int64)
    process_group.all_gather_tensor(told, torch.tensor([number]))
    return [int(value) for value in told.tolist()]


def _check_start(counts: list[int], *, has_stand_in: bool, process_group: ProcessGroup) -> None:
    if all(counts):
        return
    can_stand_in = _tell(int(has_stand_in), process_group)
    without = [rank for rank, count in enumerate(counts) if not count and not can_stand_in[rank]]
    if without:
        raise ConfigError(
            f"ranks {without} have no batch while others have, and nothing to compute with in "
            "their place: cut the data so that each rank gets some, or pass a stand_in"
        )

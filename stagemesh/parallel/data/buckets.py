"""Buckets: memory in which many gradients lie side by side and are reduced by one collective.

    flat   [ gradient 0 | gradient 1 | ... | gradient n-1 | n flags ]

Each gradient is a view of the bucket, so nothing is packed before a collective or unpacked after
it. A flag says that this rank has that gradient; averaged with the rest, it says whether any rank
has, without a collective of its own.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.work import Work
from stagemesh.errors import StagemeshError


def plan_buckets(
    tensors: Sequence[torch.Tensor], *, bucket_bytes: int, first_bucket_bytes: int
) -> list[list[int]]:
    """Which tensors share a bucket, as positions in `tensors`.

    A bucket has one dtype, and is closed once it has reached its limit; the first of each dtype has
    a limit of its own. Buckets are in the order in which they are complete.

    Args:
        tensors: in the order in which their gradients will be there.
        bucket_bytes: limit of a bucket.
        first_bucket_bytes: limit of a dtype's first bucket.
    """
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        dtype = tensor.dtype
        filling.setdefault(dtype, []).append(index)
        sizes[dtype] = sizes.get(dtype, 0) + tensor.numel() * tensor.element_size()
        if sizes[dtype] >= limits.get(dtype, first_bucket_bytes):
            closed.append(filling.pop(dtype))
            sizes[dtype] = 0
            limits[dtype] = bucket_bytes
    return sorted([*closed, *filling.values()], key=lambda bucket: bucket[-1])


@dataclass(slots=True, kw_only=True)
class _Reduction:
    """A bucket on its way."""

    message: torch.Tensor
    """What travels: the bucket itself, or a copy in another dtype."""
    work: Work[torch.Tensor]


class Bucket:
    """Memory for gradients of one dtype and device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Make room for gradients of the shapes of these tensors."""
        sizes = [tensor.numel() for tensor in tensors]
        first = tensors[0]
        self._flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        edges = [0, *itertools.accumulate(sizes)]
        self.views = [
            self._flat[start:end].view(tensor.shape)
            for tensor, (start, end) in zip(tensors, itertools.pairwise(edges), strict=True)
        ]
        self._gradients = self._flat[: edges[-1]]
        self._flags = self._flat[edges[-1] :]
        self._reduction: _Reduction | None = None

    @property
    def num_bytes(self) -> int:
        """Size of its memory."""
        return self._flat.numel() * self._flat.element_size()

    def launch(
        self,
        process_group: ProcessGroup,
        *,
        has_gradient: Sequence[bool],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        """Begin to average it over the ranks; `wait` ends that.

        Args:
            process_group: the ranks.
            has_gradient: for each view, whether this rank has put something there.
            reduce_dtype: as in DataParallelConfig.
        """
        self._flags.copy_(torch.tensor(has_gradient))
        message = self._flat
        if reduce_dtype is not None and message.is_floating_point():
            message = message.to(reduce_dtype)
        work = process_group.all_reduce(message, op=ReduceOp.AVG, async_op=True)
        self._reduction = _Reduction(message=message, work=work)

    def wait(self) -> list[bool]:
        """End the average; for each view, whether any rank had put something there.

        Raises:
            CommError: the collective failed; the gradients are then this rank's own.
        """
        reduction, self._reduction = self._reduction, None
        assert reduction is not None
        reduction.work.wait()
        if reduction.message is not self._flat:
            self._flat.copy_(reduction.message)
        return [flag != 0 for flag in self._flags.tolist()]

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self._gradients.mul_(factor)


def wait_all(buckets: Sequence[Bucket]) -> list[list[bool]]:
    """Wait for every bucket, so that afterwards nothing writes into any; see `Bucket.wait`.

    Raises:
        StagemeshError: the first failure.
    """
    results = []
    failures = []
    for bucket in buckets:
        try:
            results.append(bucket.wait())
        except StagemeshError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results

"""GradientAccumulator: gradients that the caller hands over, added up and averaged over ranks.

    accumulator = GradientAccumulator(process_group=group, accumulation_steps=2)
    accumulator.start_accumulation()
    accumulator.accumulate_gradients(first)      # False: added up here
    accumulator.accumulate_gradients(second)     # True: `second` now holds the ranks' average

For gradients that do not come from autograd; DataParallel does the same by hooks.
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, NotReady
from stagemesh.parallel.data.buckets import Bucket, plan_buckets, wait_all
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.weights import WeightSum, start_mean_factor


class GradientAccumulator:
    """Adds up micro-steps, and reduces their sum with the last of them."""

    def __init__(
        self,
        *,
        process_group: ProcessGroup,
        accumulation_steps: int = 1,
        config: DataParallelConfig | None = None,
    ) -> None:
        """Take a group.

        Args:
            process_group: over which to average.
            accumulation_steps: micro-steps in a reduction; below 1 counts as 1.
            config: size of the buckets.
        """
        self.accumulation_steps = max(1, accumulation_steps)
        self._group = process_group
        self._config = config or DataParallelConfig()
        self._weights = WeightSum()
        self._is_started = False
        self._num_steps = 0
        self._buckets: list[Bucket] = []
        self._sums: list[torch.Tensor] = []

    @property
    def num_accumulated(self) -> int:
        """Micro-steps since `start_accumulation`."""
        return self._num_steps

    def start_accumulation(self) -> None:
        """Begin a sum; one that was begun before and not reduced is dropped."""
        self._is_started = True
        self._num_steps = 0
        self._weights.reset()

    def accumulate_gradients(
        self, grads: Sequence[torch.Tensor], *, weight: float | None = None
    ) -> bool:
        """Count a micro-step, and add its gradients up.

        The last micro-step reduces: its `grads` are given, in place, the sum of all micro-steps
        averaged over the ranks, or the weighted mean (see `weights`). Then the next sum must be
        started. Other micro-steps leave `grads` alone.

        Args:
            grads: of the same dtypes and shapes in each micro-step and on each rank.
            weight: items over which these gradients are a mean; for all micro-steps or none.

        Returns:
            Whether it reduced.

        Raises:
            NotReady: not started.
            ConfigError: `grads` are not as before, or only some micro-steps have weights.
            CommError: the reduction failed; `grads` are unchanged.
        """
        if not self._is_started:
            raise NotReady("accumulation was not started: call start_accumulation() first")
        self._check(grads)
        self._weights.add(weight)
        with torch.no_grad():
            self._add(grads, factor=1.0 if weight is None else weight)
        self._num_steps += 1
        if self._num_steps < self.accumulation_steps:
            return False
        self._is_started = False
        self._num_steps = 0
        self._reduce()
        for grad, total in zip(grads, self._sums, strict=True):
            grad.detach().copy_(total)
        return True

    def _check(self, grads: Sequence[torch.Tensor]) -> None:
        got = [_layout(grad) for grad in grads]
        if not self._num_steps:
            if got != [_layout(total) for total in self._sums]:
                self._make_buckets(grads)
            return
        expected = [_layout(total) for total in self._sums]
        if got != expected:
            raise ConfigError(
                f"micro-step {self._num_steps} has gradients {got}, those before have {expected}"
            )

    def _make_buckets(self, grads: Sequence[torch.Tensor]) -> None:
        plan = plan_buckets(
            grads,
            bucket_bytes=self._config.bucket_bytes,
            first_bucket_bytes=self._config.first_bucket_bytes,
        )
        self._buckets = [Bucket([grads[index] for index in members]) for members in plan]
        views = {
            index: view
            for members, bucket in zip(plan, self._buckets, strict=True)
            for index, view in zip(members, bucket.views, strict=True)
        }
        self._sums = [views[index] for index in range(len(grads))]

    def _add(self, grads: Sequence[torch.Tensor], *, factor: float) -> None:
        for total, grad in zip(self._sums, grads, strict=True):
            if self._num_steps:
                total.add_(grad, alpha=factor)
            elif factor == 1.0:
                total.copy_(grad)
            else:
                torch.mul(grad, factor, out=total)

    def _reduce(self) -> None:
        weight = self._weights.take()
        if self._group.size > 1:
            for bucket in self._buckets:
                bucket.launch(
                    self._group,
                    has_gradient=[True] * len(bucket.views),
                    reduce_dtype=self._config.reduce_dtype,
                )
            wait_all(self._buckets)
        if weight is not None:
            factor = start_mean_factor(weight, process_group=self._group)()
            for bucket in self._buckets:
                bucket.scale(factor)


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

"""Weights that two ranks have copies of, such as an embedding and the head that reads it.

rank 0       dE from the embedding  --+-- sum --> the same dE on both, so equal optimizer steps
rank p - 1   dE from the head       --+           keep the copies equal
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError


class TiedParameters:
    """Copies of the same parameters on the first and the last rank of a group."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, process_group: ProcessGroup
    ) -> None:
        """Make the copies equal: those of the last rank become those of the first.

        All ranks of the group call it. In a group of one it does nothing: there both stages must
        use one parameter, whose gradient autograd sums.

        Args:
            parameters: in the same order on the first and the last rank; none on the others.
            process_group: of the pipeline.

        Raises:
            ConfigError: a rank between has some.
            CollectiveMismatch: the two ranks' parameters differ in shape or dtype.
        """
        last = process_group.size - 1
        if parameters and process_group.rank not in (0, last):
            raise ConfigError(
                f"tied parameters belong to the first and the last rank, got {len(parameters)} on "
                f"rank {process_group.rank} of {process_group.size}"
            )
        self._parameters = list(parameters)
        self._before: list[torch.Tensor | None] = []
        self.process_group = process_group.subgroup([0, last]) if last > 0 else None
        if self.process_group is not None:
            for parameter in self._parameters:
                self.process_group.broadcast(parameter.data, src=0)

    def begin_step(self) -> None:
        """Put aside gradients of earlier steps, whose sum has been taken already."""
        if self.process_group is not None:
            self._before = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def sum_gradients(self) -> None:
        """Sum what the copies have gathered since `begin_step`, and add what was there before.

        A copy without a gradient counts as zero.

        Raises:
            CommError: the other rank is gone, or failed.
        """
        if self.process_group is None:
            return
        works = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(self.process_group.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()
        for parameter, before in zip(self._parameters, self._before, strict=True):
            if before is not None and parameter.grad is not None:
                parameter.grad += before
        self._before = []

    def close(self) -> None:
        """Leave the group of two."""
        if self.process_group is not None:
            self.process_group.close()

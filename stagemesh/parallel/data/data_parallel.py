"""DataParallel: the same module on each rank, each with other data, all with the same gradients.

    model = DataParallel(module, process_group=group)
    for batch in even_batches(batches, process_group=group, num_items=len):
        optimizer.zero_grad()
        loss = loss_fn(model(batch.batch))
        model.backward(loss, weight=batch.weight)      # or loss.backward(): see `weights`
        optimizer.step()

After a backward outside of `no_sync` each gradient is the average over the ranks, so equal
optimizers do equal steps. Whether a backward reduces is decided while it runs.

Not for gradients of gradients: `param.grad` has no graph. `torch.autograd.grad` through the
wrapper's outputs belongs within `no_sync`. A group is used by one backward at a time: what runs in
another thread needs a group of its own.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.data.accumulation import GradientAccumulator
from stagemesh.parallel.data.agreement import broadcast_tensors, check_same_module
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.reducer import GradientReducer
from stagemesh.parallel.data.weights import WeightSum
from stagemesh.parallel.tensors import tensors_in


class DataParallel(nn.Module):
    """Wraps a module; `.module` is it. A GradientSync.

    A parameter that some ranks do not use counts as zero there. One that no rank uses has the
    gradient None, so that no optimizer changes it. Tied parameters are one. Frozen ones are only
    made equal, once.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: ProcessGroup,
        accumulation_steps: int = 1,
        config: DataParallelConfig | None = None,
    ) -> None:
        """Compare the ranks' modules, and give all the parameters and buffers of rank 0.

        All ranks call it. In a group of one it does nothing, and costs nothing later.

        Args:
            module: with trainable parameters on one device.
            process_group: the ranks that share gradients.
            accumulation_steps: of the explicit interface; below 1 counts as 1.
            config: buckets, dtype and buffers; the same on all ranks.

        Raises:
            ConfigError: on all ranks, if their modules or settings differ.
        """
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.config = config or DataParallelConfig()
        self.accumulator = GradientAccumulator(
            process_group=process_group,
            accumulation_steps=accumulation_steps,
            config=self.config,
        )
        self._is_syncing = True
        self._weights = WeightSum()
        self._reducer: GradientReducer | None = None
        self._frozen: Mapping[str, nn.Parameter] = {}
        self._synced_buffers: Sequence[str] = ()
        if process_group.size > 1:
            self._join()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives.

        Raises:
            NotReady: an earlier backward failed half-way.
            ConfigError: a parameter that was frozen at wrap is trained now.
        """
        reducer = self._reducer
        if reducer is None or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        reducer.check_usable()
        self._check_frozen()
        if self._weights.is_weighted:
            self._forget_abandoned()
        if self._synced_buffers and self.training and self._is_syncing:
            self._send_buffers()
        output = self.module(*args, **kwargs)
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                # Runs before anything in the module's backward does.
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda _: reducer.begin()
                )
        return output

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> None:
        """`loss.backward()` with a weight, by the rule of `weights`.

        A part of weight 0 is not computed at all; it only takes part in the reduction. The gradient
        of an optimizer step must have been set to None or zero before its first micro-step.

        Args:
            loss: a mean over `weight` items; 0-d.
            weight: their number; for each micro-step on each rank, or for none.

        Raises:
            ConfigError: a weight that is not allowed, or only some micro-steps have one.
            CommError: the reduction failed.
        """
        if weight is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        reducer = self._reducer
        if reducer is not None:
            reducer.check_usable()
        self._forget_abandoned()
        self._weights.add(weight)
        if weight == 0:
            if self._is_syncing:
                self.sync_gradients()
            return
        if reducer is None:
            loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
            if self._is_syncing:
                self.sync_gradients()
            return
        with reducer.weighted():
            loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward adds to this rank's gradients; the next one outside reduces."""
        before = self._is_syncing
        self._set_syncing(False)
        try:
            yield
        finally:
            self._set_syncing(before)

    def sync_gradients(self) -> None:
        """Average what is in the parameters' gradients. A collective, outside of backward.

        Raises:
            CommError: the reduction failed.
        """
        if self._reducer is not None:
            self._reducer.reduce_now()
            return
        weight = self._weights.take()
        if weight:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(weight)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps in a reduction of the explicit interface."""
        return self.accumulator.accumulation_steps

    def start_accumulation(self) -> None:
        """As GradientAccumulator."""
        self.accumulator.start_accumulation()

    def accumulate_gradients(
        self, grads: Sequence[torch.Tensor], *, weight: float | None = None
    ) -> bool:
        """As GradientAccumulator."""
        return self.accumulator.accumulate_gradients(grads, weight=weight)

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket, in the order of the collectives; none in a group of 1."""
        return [] if self._reducer is None else self._reducer.bucket_names

    def unwrap(self) -> nn.Module:
        """Take the hooks off the module and give it, as to wrap it over another group."""
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        return self.module

    def _join(self) -> None:
        check_same_module(self.module, settings=str(self.config), process_group=self.process_group)
        broadcast_tensors(
            [*self.module.parameters(), *self.module.buffers()],
            chunk_bytes=self.config.bucket_bytes,
            process_group=self.process_group,
        )
        parameters = dict(self.module.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        if self.config.sync_buffers:
            saved = self.module.state_dict().keys()
            self._synced_buffers = [n for n, _ in self.module.named_buffers() if n in saved]
        self._reducer = GradientReducer(
            trained,
            process_group=self.process_group,
            weights=self._weights,
            config=self.config,
        )

    def _set_syncing(self, is_syncing: bool) -> None:
        self._is_syncing = is_syncing
        if self._reducer is not None:
            self._reducer.is_syncing = is_syncing

    def _forget_abandoned(self) -> None:
        """Forget the weights of parts whose gradients are gone."""
        if all(parameter.grad is None for parameter in self.module.parameters()):
            self._weights.reset()

    def _check_frozen(self) -> None:
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            raise ConfigError(
                f"parameters {', '.join(thawed)} were frozen when the module was wrapped, so their "
                "gradients would not be reduced: unwrap() it and wrap it again"
            )

    def _send_buffers(self) -> None:
        buffers = dict(self.module.named_buffers())
        # .data: a graph that an earlier forward has built may have saved the buffer, and would
        # refuse a backward once it was written; what it saved it from is not trained.
        broadcast_tensors(
            [buffers[name].data for name in self._synced_buffers],
            chunk_bytes=self.config.bucket_bytes,
            process_group=self.process_group,
        )

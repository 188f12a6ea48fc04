"""FsdpRuntime: gathers and frees around the forward and the backward of the units.

    forward   | gather 1 | compute 1         | free 1, compute 2       | free 2 ...
              |          | gather 2 ........ | gather 3 .............. |
    backward  | gather n | compute n         | free n, compute n - 1   | ...
              |          | gather n - 1 .... | gather n - 2, reduce n  |

What comes next is what came next in the forward before. The root is whole from its forward to the
end of the backward, and so is the unit that runs last: its backward comes first.

What autograd calls:
    hook on a unit's outputs      its backward begins: gather it
    hook on a parameter           its gradient is complete; the last one of a unit lets its
                                  reduction begin and its parameters go
    hook on a unit's inputs       where parameters are frozen: nothing in the unit needs them now
    callback at the end           what is left: unused parameters, waits, the last frees
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.reducer import GradientReducer
from stagemesh.parallel.fsdp.unit import FsdpUnit
from stagemesh.parallel.tensors import cast_floating, tensors_in

_NO_BACKWARD = -1


class FsdpRuntime:
    """Drives the units of one Fsdp."""

    def __init__(
        self,
        units: Sequence[FsdpUnit],
        *,
        strategy: ShardingStrategy,
        input_dtype: torch.dtype | None,
    ) -> None:
        """Hook into the units' modules.

        Args:
            units: in the order of their modules, the root first.
            strategy: when to free.
            input_dtype: of floating inputs of units; None leaves them.
        """
        self._units = tuple(units)
        self._is_full_shard = strategy is ShardingStrategy.FULL_SHARD
        self._input_dtype = input_dtype
        self._reducer = GradientReducer(units)
        self._is_syncing = True
        self._order: list[FsdpUnit] = []
        self._positions: dict[FsdpUnit, int] = {}
        self._running: dict[FsdpUnit, int] = {}
        self._is_in_root = False
        self._backward_id = _NO_BACKWARD
        self._has_gradients = False
        for unit in units:
            self._attach(unit)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the block reduce nothing."""
        before = self._is_syncing
        self._is_syncing = False
        try:
            yield
        finally:
            self._is_syncing = before

    def sync_gradients(self) -> None:
        """Reduce what was not."""
        for unit in self._units:
            unit.awaits_gradients = False
            unit.collect()
        self._reducer.finish()
        self.reshard_all()

    def unshard_all(self) -> None:
        """Make all parameters whole."""
        for unit in self._units:
            unit.unshard()

    def reshard_all(self) -> None:
        """Free all."""
        for unit in self._units:
            unit.reshard()

    def _attach(self, unit: FsdpUnit) -> None:
        unit.module.register_forward_pre_hook(
            partial(self._before_forward, unit), with_kwargs=True, prepend=True
        )
        unit.module.register_forward_hook(partial(self._after_forward, unit))
        on_gradient = partial(self._after_gradient, unit)
        for member in unit.trained_members:
            member.parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]

    # Forward

    def _before_forward(
        self, unit: FsdpUnit, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._recover()
        is_recomputing = self._backward_id != _NO_BACKWARD
        if unit.is_root and not is_recomputing:
            self._begin_root_forward()
        unit.unshard()
        if torch.is_grad_enabled() and unit.gradients:
            unit.is_armed = True
        if self._input_dtype is not None:
            args = cast_floating(args, self._input_dtype)
            kwargs = cast_floating(kwargs, self._input_dtype)
        if not is_recomputing:
            self._prefetch_after(unit)
            unit.calls.append(self._watch_inputs(unit, (args, kwargs)))
        return args, kwargs

    def _after_forward(self, unit: FsdpUnit, _: nn.Module, args: Any, output: Any) -> None:
        if self._backward_id != _NO_BACKWARD:
            # A recomputation: the backward that asked for it needs the parameters next.
            return
        is_watched = unit.calls.pop()
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        has_backward = torch.is_grad_enabled() and bool(outputs)
        if has_backward:
            begin = partial(self._before_backward, unit, is_watched)
            register_multi_grad_hook(outputs, begin, mode="any")
        if not has_backward or (self._is_full_shard and not self._stays_whole(unit)):
            self._release(unit)
        if unit.is_root:
            self._end_root_forward()

    def _begin_root_forward(self) -> None:
        self._is_in_root = True
        self._running = {}
        for unit in self._units:
            unit.calls.clear()

    def _end_root_forward(self) -> None:
        self._is_in_root = False
        self._positions = self._running
        self._order = list(self._running)
        for unit in self._units:
            if unit.is_gathering:  # the forward before this went on with it, this one did not
                unit.reshard()

    def _prefetch_after(self, unit: FsdpUnit) -> None:
        if not self._is_in_root:
            return
        self._running.setdefault(unit, len(self._running))
        following = self._positions.get(unit, len(self._order)) + 1
        if following < len(self._order):
            self._order[following].start_unshard()

    def _stays_whole(self, unit: FsdpUnit) -> bool:
        return unit.is_root or (bool(self._order) and unit is self._order[-1])

    def _watch_inputs(self, unit: FsdpUnit, inputs: Any) -> bool:
        """Whether hooks on the inputs will tell when the backward leaves the unit."""
        if not unit.has_frozen or not torch.is_grad_enabled():
            return False
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if not watched:
            return False

        def on_gradients(_: Sequence[torch.Tensor | None]) -> None:
            unit.close_call()
            self._release_if_done(unit)

        register_multi_grad_hook(watched, on_gradients, mode="all")
        return True

    # Backward

    def _before_backward(self, unit: FsdpUnit, is_watched: bool, _: torch.Tensor) -> None:
        self._begin_backward()
        unit.unshard()
        unit.is_entered = True
        if is_watched:
            unit.open_call()
        preceding = self._positions.get(unit, 0) - 1
        if preceding >= 0:
            self._order[preceding].start_unshard()

    def _after_gradient(self, unit: FsdpUnit, parameter: torch.Tensor) -> None:
        if self._backward_id == _NO_BACKWARD:
            self._begin_backward()
        self._has_gradients = True
        unit.mark_accumulated(parameter)
        if _current_backward() != self._backward_id:
            # A reentrant checkpoint has a backward of its own within ours, and may have several
            # for the same parameters. What it leaves is collected at the end.
            return
        if unit.has_all_gradients:
            unit.collect()
            unit.is_collected = True
            if self._is_syncing:
                self._reducer.advance()
        self._release_if_done(unit)

    def _begin_backward(self) -> None:
        current = _current_backward()
        if self._backward_id == current:
            return
        if self._backward_id != _NO_BACKWARD:
            self._discard_backward()
        self._backward_id = current
        self._has_gradients = False
        self._reducer.begin()
        for unit in self._units:
            unit.begin_backward()
        # Not public, but the only way to run when a backward has ended; DDP and FSDP use it, too.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        try:
            if self._has_gradients:
                for unit in self._units:
                    # Perhaps after its reduction was launched: then there is one more for the rest.
                    unit.is_armed = unit.collect() or unit.is_armed
                if self._is_syncing:
                    self._reducer.finish()
            for unit in self._units:
                is_left = unit.is_entered and not unit.has_all_gradients
                unit.awaits_gradients = not self._is_syncing and (unit.awaits_gradients or is_left)
                if self._frees_in_backward or unit.is_gathering:
                    self._release(unit)
        finally:
            self._backward_id = _NO_BACKWARD

    def _release_if_done(self, unit: FsdpUnit) -> None:
        if unit.is_backward_done and self._frees_in_backward:
            self._release(unit)

    def _release(self, unit: FsdpUnit) -> None:
        if not unit.awaits_gradients:
            unit.reshard()

    @property
    def _frees_in_backward(self) -> bool:
        """ZeRO-2 keeps parameters whole from micro-step to micro-step."""
        return self._is_full_shard or self._is_syncing

    def _recover(self) -> None:
        if self._backward_id != _NO_BACKWARD and _current_backward() == _NO_BACKWARD:
            self._discard_backward()

    def _discard_backward(self) -> None:
        """A backward raised, so its callback never came: drop what was not given to the shards."""
        self._backward_id = _NO_BACKWARD
        self._reducer.discard()
        for unit in self._units:
            unit.discard_gradients()


def _current_backward() -> int:
    """Number of the backward that this thread is in; _NO_BACKWARD outside of any."""
    return torch._C._current_graph_task_id()

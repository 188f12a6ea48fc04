"""GradientReducer: averages gradients over ranks while backward still computes others.

    backward     | layer 3 | layer 2 | layer 1 | layer 0 |wait|
    collectives            [bucket 0][bucket 1   ][bucket 2  ]

Parameters are put into buckets in the reverse of the order in which the module has them, which is
about the order in which backward reaches them. A hook on each parameter sees its gradient, moves it
into its bucket and, once the bucket is full, starts its collective. Buckets start strictly in their
order, whichever is full first: that order pairs the collectives of the ranks. What no gradient came
for is started at the end of backward, so that a parameter that a rank does not use holds up only
the overlap; then all are waited for, and an error of one of them is raised out of backward.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd import Variable

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, NotReady
from stagemesh.parallel.data.buckets import Bucket, plan_buckets, wait_all
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.weights import WeightSum, start_mean_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Where the gradient of a parameter lies."""

    name: str
    parameter: nn.Parameter
    bucket: int
    view: torch.Tensor


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A backward that reduces."""

    num_missing: list[int]
    """By bucket: gradients that have not come."""
    seen: set[str] = field(default_factory=set)
    num_launched: int = 0


class GradientReducer:
    """Reduces the gradients of some parameters. One backward at a time."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        process_group: ProcessGroup,
        weights: WeightSum,
        config: DataParallelConfig,
    ) -> None:
        """Make the buckets, and put a hook on each parameter until `close`.

        Args:
            parameters: those that are trained, by name, in the order of their use.
            process_group: over which to average.
            weights: what parts count; a reduction takes it.
            config: size of the buckets.

        Raises:
            ConfigError: the parameters are on several devices.
        """
        devices = sorted({str(parameter.device) for parameter in parameters.values()})
        if len(devices) > 1:
            raise ConfigError(f"all parameters must be on one device, got {', '.join(devices)}")
        self.is_syncing = True
        self._is_weighted = False
        self._weights = weights
        self._group = process_group
        self._reduce_dtype = config.reduce_dtype
        self._pass: _Pass | None = None
        names = list(parameters)[::-1]
        tensors = [parameters[name] for name in names]
        plan = plan_buckets(
            tensors,
            bucket_bytes=config.bucket_bytes,
            first_bucket_bytes=config.first_bucket_bytes,
        )
        self._buckets = [Bucket([tensors[index] for index in members]) for members in plan]
        self._slots = [
            [
                _Slot(name=names[index], parameter=tensors[index], bucket=number, view=view)
                for index, view in zip(members, bucket.views, strict=True)
            ]
            for number, (members, bucket) in enumerate(zip(plan, self._buckets, strict=True))
        ]
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _hook(self, slot)
            )
            for slots in self._slots
            for slot in slots
        ]

    @property
    def bucket_names(self) -> list[list[str]]:
        """The parameters of each bucket, in the order of the collectives."""
        return [[slot.name for slot in slots] for slots in self._slots]

    def close(self) -> None:
        """Take the hooks away. Gradients stay as they are."""
        self.is_syncing = False
        for handle in self._handles:
            handle.remove()

    def check_usable(self) -> None:
        """Refuse to go on after a backward that failed half-way.

        Raises:
            NotReady: it did.
        """
        if self._pass is not None:
            raise NotReady(
                "an earlier backward failed before its gradients were reduced, so the ranks are "
                "out of step: wrap the module again, over a new group"
            )

    def begin(self) -> None:
        """Say, within a backward, that it has begun; it need not be the first to say so.

        Without, the first gradient does. But a backward within a backward (re-entrant activation
        checkpointing) would then look like the whole, and one without any gradient like none.
        """
        if self._pass is None and self.is_syncing:
            self._pass = _Pass(num_missing=[len(slots) for slots in self._slots])
            # The way of torch's own wrappers: the engine calls it when this backward is through,
            # and raises its errors out of it.
            Variable._execution_engine.queue_callback(self._finish)

    def reduce_now(self) -> None:
        """Reduce what the parameters have as gradients, outside of a backward."""
        self.check_usable()
        self._pass = _Pass(num_missing=[len(slots) for slots in self._slots])
        self._finish()

    @contextlib.contextmanager
    def weighted(self) -> Iterator[None]:
        """Within the block gradients belong to a part whose weight was counted already."""
        self._is_weighted = True
        try:
            yield
        finally:
            self._is_weighted = False

    def on_gradient(self, slot: _Slot) -> None:
        """Take a gradient that backward has just put into its parameter."""
        _move_in(slot)
        if not self._is_weighted:
            self._weights.add(None)
        if not self.is_syncing:
            return
        self.begin()
        current = self._pass
        assert current is not None
        if slot.name in current.seen:
            if slot.bucket < current.num_launched:
                raise ConfigError(
                    f"parameter {slot.name} got a second gradient in one backward after its first "
                    "was reduced: checkpoint with use_reentrant=False, or run this backward within "
                    "no_sync() and call sync_gradients() after it"
                )
            return
        current.seen.add(slot.name)
        current.num_missing[slot.bucket] -= 1
        while (
            current.num_launched < len(self._buckets)
            and not current.num_missing[current.num_launched]
        ):
            self._launch_next(current)

    def _launch_next(self, current: _Pass) -> None:
        number = current.num_launched
        self._buckets[number].launch(
            self._group,
            has_gradient=[slot.parameter.grad is not None for slot in self._slots[number]],
            reduce_dtype=self._reduce_dtype,
        )
        current.num_launched += 1

    def _finish(self) -> None:
        current = self._pass
        assert current is not None
        for slots in self._slots[current.num_launched :]:
            for slot in slots:
                _move_in(slot)
            self._launch_next(current)
        weight = self._weights.take()
        factor = None
        if weight is not None:
            factor = start_mean_factor(weight, process_group=self._group)
        is_used = wait_all(self._buckets)
        if factor is not None:
            value = factor()
            for bucket in self._buckets:
                bucket.scale(value)
        for slots, used in zip(self._slots, is_used, strict=True):
            _show(slots, used)
        # Not after a failure: what came of it must not be trained with.
        self._pass = None


def _hook(reducer: GradientReducer, slot: _Slot) -> Callable[[torch.Tensor], None]:
    # Weak: the parameter would otherwise keep a wrapper alive, and at work, that nobody has.
    reference = weakref.ref(reducer)

    def on_gradient(_: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.on_gradient(slot)

    return on_gradient


def _move_in(slot: _Slot) -> None:
    """Make the bucket's view the gradient. No gradient counts as zeros.

    After `zero_grad` autograd hands over the tensor it has computed, which is copied once; a
    gradient that is the view already was added to in place.
    """
    grad = slot.parameter.grad
    if grad is slot.view:
        return
    if grad is None:
        slot.view.zero_()
        return
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"parameter {slot.name} has a gradient of layout {grad.layout}, which cannot be "
            "reduced; use a dense one (nn.Embedding with sparse=False)"
        )
    slot.view.copy_(grad.detach())
    slot.parameter.grad = slot.view


def _show(slots: Sequence[_Slot], is_used: Sequence[bool]) -> None:
    """Give each parameter that any rank used its gradient; None to the others.

    Zeros instead of None would let weight decay and momentum change them.
    """
    for slot, used in zip(slots, is_used, strict=True):
        if not used:
            slot.parameter.grad = None
        elif slot.parameter.grad is not slot.view:
            slot.parameter.grad = slot.view

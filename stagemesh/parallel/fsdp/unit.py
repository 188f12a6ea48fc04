"""FsdpUnit: a module whose parameters are whole while it computes."""

import torch
from torch import nn

from stagemesh.parallel.fsdp.flat_parameter import FlatParameter, Member
from stagemesh.parallel.fsdp.gradient import FlatGradient


class FsdpUnit:
    """Flat parameters of one module, and how far its backward is."""

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        is_root: bool,
        flats: tuple[FlatParameter, ...],
        gradients: tuple[FlatGradient, ...],
    ) -> None:
        """Join what belongs to a module.

        Args:
            module: gathers before its forward.
            name: in the wrapped module.
            is_root: it is the wrapped module.
            flats: its parameters: one flat parameter for each dtype, trained and frozen apart.
            gradients: of those that are trained.
        """
        self.module = module
        self.name = name
        self.is_root = is_root
        self.flats = flats
        self.gradients = gradients
        self.is_armed = False
        """A forward took part in autograd since the last reduction: a gradient is due."""
        self.is_collected = False
        """All gradients of the current backward are in the buffers."""
        self.awaits_gradients = False
        """A backward within `no_sync` has left parameters without their gradients: if it was the
        first half of a split one, the second comes later and needs the unit whole."""
        self.is_entered = False
        """The current backward has come to the unit."""
        self.calls: list[bool] = []
        """Forwards that run: whether hooks on the inputs watch for the end of their backward."""
        self._open_calls = 0
        self._accumulated: set[int] = set()

    @property
    def trained_members(self) -> list[Member]:
        """Members that get gradients."""
        return [member for flat in self.flats if flat.requires_grad for member in flat.members]

    @property
    def has_frozen(self) -> bool:
        """Whether some member gets no gradient."""
        return any(not flat.requires_grad for flat in self.flats)

    def start_unshard(self) -> None:
        """Begin to gather."""
        for flat in self.flats:
            flat.start_unshard()

    def unshard(self) -> None:
        """Make the parameters whole."""
        # All started before any is waited for.
        self.start_unshard()
        for flat in self.flats:
            flat.finish_unshard()

    def reshard(self) -> None:
        """Free the whole parameters."""
        for flat in self.flats:
            flat.reshard()

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started and not waited for."""
        return any(flat.is_gathering for flat in self.flats)

    def begin_backward(self) -> None:
        """Forget the backward before this."""
        self.is_collected = False
        self.is_entered = False
        self._open_calls = 0
        self._accumulated.clear()

    def open_call(self) -> None:
        """The backward of one forward has come to the unit, and will leave it at its inputs."""
        self._open_calls += 1

    def close_call(self) -> None:
        """It has left it."""
        self._open_calls -= 1

    def mark_accumulated(self, parameter: torch.Tensor) -> None:
        """A member's gradient is complete for this backward."""
        self._accumulated.add(id(parameter))

    @property
    def has_all_gradients(self) -> bool:
        """Whether each trained member has its gradient."""
        return len(self._accumulated) == sum(
            len(flat.members) for flat in self.flats if flat.requires_grad
        )

    @property
    def is_backward_done(self) -> bool:
        """Whether this backward needs the parameters no more.

        When a trained parameter has its gradient, all that used it in the backward is done. Of
        frozen ones only the gradients of the inputs tell.
        """
        return self.has_all_gradients and self._open_calls <= 0

    def collect(self) -> bool:
        """Move the members' gradients into the buffers; whether there were any."""
        found = [gradient.collect() for gradient in self.gradients]
        return any(found)

    def discard_gradients(self) -> None:
        """Forget all gradients that the shards do not have yet."""
        self.is_armed = False
        for member in self.trained_members:
            member.parameter.grad = None
        for gradient in self.gradients:
            gradient.discard()

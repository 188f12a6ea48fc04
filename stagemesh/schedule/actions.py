"""What a rank of a pipeline does: one value per thing done. Torch-free.

    F  forward of a micro-batch through a stage
    B  its backward                             = I and W at once
    I  the backward's half for the inputs: what the stage before waits for
    W  the half for the weights: nobody waits for it
    >  send and receive; see stagemesh.schedule.transfers

Zero-bubble schedules split B into I and W (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
where they are called B and W).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple


class ActionKind(Enum):
    """Kinds of actions; the value is how a grid shows it."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "F>"
    RECV_ACTIVATION = ">F"
    SEND_GRADIENT = "B>"
    RECV_GRADIENT = ">B"

    @property
    def is_compute(self) -> bool:
        """Whether it computes; the others move tensors."""
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        """Whether it sends."""
        return self in (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        """Whether it receives."""
        return self in (ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT)


_COMPUTE = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)

_WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input half of the backward",
    ActionKind.BACKWARD_WEIGHT: "weight half of the backward",
    ActionKind.SEND_ACTIVATION: "send of the activation",
    ActionKind.RECV_ACTIVATION: "receive of the activation",
    ActionKind.SEND_GRADIENT: "send of the gradient",
    ActionKind.RECV_GRADIENT: "receive of the gradient",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing a rank does."""

    kind: ActionKind
    stage: int
    """Whose forward or backward; for a transfer the stage that sends or receives."""
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    def in_words(self) -> str:
        """For errors."""
        return f"{_WORDS[self.kind]} of stage {self.stage}, micro-batch {self.microbatch}"


class Product(NamedTuple):
    """What an action makes for others."""

    kind: Literal["activation", "gradient"]
    """The stage's output, or the gradient of the stage's input."""
    stage: int
    microbatch: int


def product_of(action: Action) -> Product | None:
    """What a compute action makes; None for the weight half, which only adds to gradients."""
    match action.kind:
        case ActionKind.FORWARD:
            return Product("activation", action.stage, action.microbatch)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
            return Product("gradient", action.stage, action.microbatch)
        case _:
            return None


def needs_of(action: Action, *, num_stages: int) -> tuple[Product, ...]:
    """What must be there before a compute action begins."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case ActionKind.FORWARD if stage > 0:
            return (Product("activation", stage - 1, microbatch),)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
            own = Product("activation", stage, microbatch)
            if stage == num_stages - 1:
                return (own,)
            return own, Product("gradient", stage + 1, microbatch)
        case ActionKind.BACKWARD_WEIGHT:
            return (Product("gradient", stage, microbatch),)
        case _:
            return ()


def moved_by(transfer: Action) -> Product:
    """What a send or receive moves."""
    stage, microbatch = transfer.stage, transfer.microbatch
    match transfer.kind:
        case ActionKind.SEND_ACTIVATION:
            return Product("activation", stage, microbatch)
        case ActionKind.RECV_ACTIVATION:
            return Product("activation", stage - 1, microbatch)
        case ActionKind.SEND_GRADIENT:
            return Product("gradient", stage, microbatch)
        case ActionKind.RECV_GRADIENT:
            return Product("gradient", stage + 1, microbatch)
        case _:
            raise AssertionError(f"{transfer} moves nothing")


def receiver_of(product: Product) -> int:
    """The stage that needs it."""
    return product.stage + (1 if product.kind == "activation" else -1)

"""PipelineStage: a module's forwards and backwards for micro-batches that are in flight.

    forward(i) ... backward(i)                       whole
    forward(i) ... backward_input(i) ... backward_weight(i)    in halves

It knows nothing of other ranks: payloads come in and go out. What a backward needs is held from
the forward on; with activation checkpointing only the inputs are, and the backward computes the
forward anew, once, with the random numbers of the first time.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stagemesh.errors import ConfigError
from stagemesh.parallel.pipeline.backward import WeightHalf, backward_inputs
from stagemesh.parallel.pipeline.payload import Payload, payload_of

Compute = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    compute: Compute
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...] | None
    """None where the backward computes them anew."""
    replay: "_Replay | None" = None
    weight_half: WeightHalf | None = None


class PipelineStage:
    """A module and its micro-batches in flight."""

    def __init__(self, module: nn.Module, *, index: int, checkpoint_activations: bool) -> None:
        """Wrap a module.

        Args:
            module: takes the tensors of a payload and gives a tensor or a tuple of tensors.
            index: of the stage.
            checkpoint_activations: hold inputs only, and compute the forward twice.
        """
        self.module = module
        self.index = index
        self._checkpoint = checkpoint_activations
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose activations are held."""
        return len(self._in_flight)

    def reset(self) -> None:
        """Forget what is in flight, as after a failure."""
        self._in_flight.clear()

    def forward(
        self, microbatch: int, arrived: Payload, *, finish: Compute | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The module's outputs.

        Args:
            microbatch: its index.
            arrived: the inputs.
            finish: what follows the module, such as the loss; a part of the stage's backward.
        """
        inputs = self._leaves(arrived)

        def compute(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            outputs = self._as_tuple(self.module(*inputs))
            return outputs if finish is None else finish(outputs)

        if not torch.is_grad_enabled():
            return compute(inputs)
        if not self._checkpoint:
            outputs = compute(inputs)
            self._in_flight[microbatch] = _InFlight(compute=compute, inputs=inputs, outputs=outputs)
            return outputs
        replay = _Replay(device=self._device())
        with torch.no_grad():
            outputs = compute(inputs)
        self._in_flight[microbatch] = _InFlight(
            compute=compute, inputs=inputs, outputs=None, replay=replay
        )
        trains = any(p.requires_grad for p in (*self.module.parameters(), *inputs))
        return tuple(
            output.requires_grad_(trains) if output.is_floating_point() else output
            for output in outputs
        )

    def backward(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> Payload:
        """Add the weights' gradients to them; gives those of the inputs."""
        inputs, outputs, used = self._begin(microbatch, gradients)
        del self._in_flight[microbatch]
        if outputs:
            torch.autograd.backward(outputs, used)
        return payload_of([tensor.grad for tensor in inputs])

    def backward_input(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> Payload:
        """Give the gradients of the inputs; those of the weights are left to `backward_weight`.

        Without inputs that want one, as in a first stage, the whole backward is done here: there
        is nothing that could be sent early, and the activations are free sooner.
        """
        inputs, outputs, used = self._begin(microbatch, gradients)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if not wanted or not outputs:
            if outputs:
                torch.autograd.backward(outputs, used)
            self._in_flight[microbatch].outputs = None
            return payload_of([None for _ in inputs])
        found, half = backward_inputs(outputs, gradients=used, inputs=wanted)
        self._in_flight[microbatch].weight_half = half
        self._in_flight[microbatch].outputs = None
        by_input = iter(found)
        return payload_of([next(by_input) if x.requires_grad else None for x in inputs])

    def backward_weight(self, microbatch: int) -> None:
        """Add the weights' gradients to them."""
        half = self._in_flight.pop(microbatch).weight_half
        if half is not None:
            half.run()

    def _begin(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], list[torch.Tensor]]:
        """Inputs; the outputs that a gradient came for, and those gradients."""
        held = self._in_flight[microbatch]
        outputs = held.outputs
        if outputs is None:
            assert held.replay is not None
            with torch.enable_grad(), held.replay.again():
                outputs = held.compute(held.inputs)
        if len(gradients) != len(outputs):
            raise ConfigError(
                f"stage {self.index} gave {len(outputs)} outputs, but {len(gradients)} gradients "
                "came back"
            )
        pairs = [
            (output, gradient.to(device=output.device, dtype=output.dtype))
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        return held.inputs, [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _leaves(self, arrived: Payload) -> tuple[torch.Tensor, ...]:
        device = self._device()
        leaves = []
        for tensor, wants_grad in zip(arrived.tensors, arrived.wants_grad, strict=True):
            assert tensor is not None, "only gradients may be missing"
            leaf = tensor.detach().to(device)
            leaves.append(leaf.requires_grad_(wants_grad and torch.is_grad_enabled()))
        return tuple(leaves)

    def _device(self) -> torch.device:
        parameter = next(self.module.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _as_tuple(self, outputs: object) -> tuple[torch.Tensor, ...]:
        as_tuple = outputs if isinstance(outputs, tuple) else (outputs,)
        wrong = [type(o).__name__ for o in as_tuple if not isinstance(o, torch.Tensor)]
        if wrong or not as_tuple:
            raise ConfigError(
                f"stage {self.index} must give a tensor or a tuple of tensors, got "
                f"{', '.join(wrong) or 'an empty tuple'}"
            )
        return as_tuple


class _Replay:
    """Random numbers and autocast as they were when it was made."""

    def __init__(self, *, device: torch.device) -> None:
        self._kind = device.type
        self._devices = [device] if device.type == "cuda" else []
        self._cpu_state = torch.get_rng_state()
        self._device_states = [torch.cuda.get_rng_state(d) for d in self._devices]
        self._autocast_dtype = torch.get_autocast_dtype(device.type)
        self._is_autocast = torch.is_autocast_enabled(device.type)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within the block they are so again."""
        autocast = torch.autocast(self._kind, dtype=self._autocast_dtype, enabled=self._is_autocast)
        with torch.random.fork_rng(self._devices), autocast:
            torch.set_rng_state(self._cpu_state)
            for device, state in zip(self._devices, self._device_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

"""Linear layers whose weight is cut over the ranks of a group: by rows of it, or by columns.

    column-parallel   W = [W_0; W_1; ...]    y_r = x W_r^T + b_r        output cut, bias cut
    row-parallel      W = [W_0, W_1, ...]    y = sum x_r W_r^T + b      output whole, bias whole

One after the other they need one all-reduce in forward and one in backward:

    x --> column-parallel --> [y_r] --> activation --> row-parallel --> all-reduce --> z

The names are by the columns and rows of W^T, as in Megatron-LM (arXiv:1909.08053).
"""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.column_linear import column_parallel_linear
from stagemesh.parallel.tensor.operators import (
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from stagemesh.parallel.tensor.shards import resolve_sizes
from stagemesh.parallel.tensor.state import shard_parameter


class ColumnParallelLinear(nn.Module):
    """y_r = x W_r^T + b_r: a linear layer of which each rank computes some output features.

    Also the head of a language model: its output features are then the vocabulary, and
    `vocab_parallel_cross_entropy` takes the loss from the ranks' parts.

    Shapes:
        input: [..., in_features], the same values on each rank.
        result: [..., sizes[rank]]; with `gather_output` [..., out_features] on each rank.
        weight: [sizes[rank], in_features].
        bias: [sizes[rank]].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        process_group: ProcessGroup,
        bias: bool = True,
        gather_output: bool = False,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the rank's part of a layer that is initialised as `nn.Linear` is.

        Each rank draws the whole layer and keeps its part: with equal seeds on all ranks they hold
        exactly what one process would.

        Args:
            in_features: of the whole layer.
            out_features: of the whole layer.
            process_group: the ranks.
            bias: whether to add one.
            gather_output: put the ranks' outputs together on each of them.
            sizes: output features of each rank; equal ones if left out.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ConfigError: the ranks do not divide `out_features`, or the sizes do not add up to it.
        """
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._take(whole, process_group=process_group, gather_output=gather_output, sizes=sizes)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        process_group: ProcessGroup,
        gather_output: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> Self:
        """The rank's part of a whole layer; all ranks must have the same one."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, process_group=process_group, gather_output=gather_output, sizes=sizes)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer; see the class."""
        if self.shared_input is not None:
            output = self.shared_input.output_of(self, input)
        else:
            (output,) = column_parallel_linear(
                input, weights=[self.weight], biases=[self.bias], process_group=self.process_group
            )
        if not self.gather_output:
            return output
        return gather_from_group(output, process_group=self.process_group, sizes=self.sizes)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, sizes={self.sizes}, gather_output={self.gather_output}"
        )

    def _take(
        self,
        whole: nn.Linear,
        *,
        process_group: ProcessGroup,
        gather_output: bool,
        sizes: Sequence[int] | None,
    ) -> None:
        self.in_features = whole.in_features
        self.out_features = whole.out_features
        self.process_group = process_group
        self.gather_output = gather_output
        self.sizes = resolve_sizes(
            sizes, total=whole.out_features, num_ranks=process_group.size, name="out_features"
        )
        self.shared_input: SharedInput | None = None
        rank = process_group.rank
        self.weight = shard_parameter(whole.weight, dim=0, sizes=self.sizes, rank=rank)
        self.bias: nn.Parameter | None = None
        if whole.bias is not None:
            self.bias = shard_parameter(whole.bias, dim=0, sizes=self.sizes, rank=rank)


ColParallelLinear = ColumnParallelLinear
"""The same under its other name in the field."""


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b: each rank works on some of the input features.

    The bias is whole on each rank and added once, after the sum; so its gradient is whole too.

    Shapes:
        input: [..., sizes[rank]]; with `input_is_split=False` [..., in_features] on each rank.
        result: [..., out_features], the same bits on each rank.
        weight: [out_features, sizes[rank]].
        bias: [out_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        process_group: ProcessGroup,
        bias: bool = True,
        input_is_split: bool = True,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the rank's part of a layer; how it is initialised: see ColumnParallelLinear.

        Args:
            in_features: of the whole layer.
            out_features: of the whole layer.
            process_group: the ranks.
            bias: whether to add one.
            input_is_split: the input is the rank's part already; otherwise the layer cuts it.
            sizes: input features of each rank; equal ones if left out.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ConfigError: the ranks do not divide `in_features`, or the sizes do not add up to it.
        """
        super().__init__()
        whole = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._take(whole, process_group=process_group, input_is_split=input_is_split, sizes=sizes)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        process_group: ProcessGroup,
        input_is_split: bool = True,
        sizes: Sequence[int] | None = None,
    ) -> Self:
        """The rank's part of a whole layer; all ranks must have the same one."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, process_group=process_group, input_is_split=input_is_split, sizes=sizes)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer; see the class.

        Raises:
            ConfigError: the input has another number of features than it should.
        """
        group = self.process_group
        expected = self.sizes[group.rank] if self.input_is_split else self.in_features
        if input.shape[-1] != expected:
            raise ConfigError(
                f"the input has {input.shape[-1]} features; rank {group.rank} expects {expected} "
                f"of {self.in_features} with input_is_split={self.input_is_split}"
            )
        if group.size == 1:
            return F.linear(input, self.weight, self.bias)
        if not self.input_is_split:
            input = split_to_group(input, process_group=group, sizes=self.sizes)
        partial = F.linear(input, self.weight)
        output = reduce_from_group(partial, process_group=group, inplace=True)
        # Under autocast the product is of another dtype than the parameters.
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias="
            f"{self.bias is not None}, sizes={self.sizes}, input_is_split={self.input_is_split}"
        )

    def _take(
        self,
        whole: nn.Linear,
        *,
        process_group: ProcessGroup,
        input_is_split: bool,
        sizes: Sequence[int] | None,
    ) -> None:
        self.in_features = whole.in_features
        self.out_features = whole.out_features
        self.process_group = process_group
        self.input_is_split = input_is_split
        self.sizes = resolve_sizes(
            sizes, total=whole.in_features, num_ranks=process_group.size, name="in_features"
        )
        self.weight = shard_parameter(
            whole.weight, dim=1, sizes=self.sizes, rank=process_group.rank
        )
        self.bias: nn.Parameter | None = whole.bias


class SharedInput:
    """Column-parallel layers that are called one after the other with the same input.

    The first call computes the outputs of all of them, in one autograd node; the others take
    theirs. In backward that node adds up the layers' input gradients, so they travel once. A layer
    that is called with something else is computed by itself.
    """

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        """Join the layers, which use it from now on.

        Raises:
            ConfigError: they differ in their input features or their groups.
        """
        if len({(layer.in_features, id(layer.process_group)) for layer in layers}) != 1:
            raise ConfigError(
                "layers that share an input must have one process group and one number of input "
                f"features, got {[layer.in_features for layer in layers]}"
            )
        self._layers = tuple(layers)
        self._input: torch.Tensor | None = None
        self._versions: tuple[int, ...] = ()
        self._waiting: dict[ColumnParallelLinear, torch.Tensor] = {}
        for layer in layers:
            layer.shared_input = self

    def output_of(self, layer: ColumnParallelLinear, input: torch.Tensor) -> torch.Tensor:
        """The rank's output of one of the layers, before any gathering."""
        if not (input.requires_grad and torch.is_grad_enabled()):
            return self._compute(input, [layer])[0]
        versions = self._versions_with(input)
        is_fresh = self._input is input and self._versions == versions and layer in self._waiting
        if not is_fresh:
            outputs = self._compute(input, self._layers)
            self._waiting = dict(zip(self._layers, outputs, strict=True))
            self._input, self._versions = input, versions
        output = self._waiting.pop(layer)
        if not self._waiting:
            # Nothing of this step is kept alive beyond it.
            self._input = None
        return output

    def _compute(
        self, input: torch.Tensor, layers: Sequence[ColumnParallelLinear]
    ) -> tuple[torch.Tensor, ...]:
        return column_parallel_linear(
            input,
            weights=[layer.weight for layer in layers],
            biases=[layer.bias for layer in layers],
            process_group=layers[0].process_group,
        )

    def _versions_with(self, input: torch.Tensor) -> tuple[int, ...]:
        """Change when the input or a parameter was changed in place since."""
        tensors = [input, *(t for layer in self._layers for t in (layer.weight, layer.bias))]
        return tuple(tensor._version for tensor in tensors if tensor is not None)

"""A stage as the dp axis holds it, its optimizer, and the way between both and whole tensors.

                 parameters, optimizer state
    gather_*     shards of tp and dp --> whole tensors on the first rank of both
    load_*       whole tensors       --> what this rank holds of them

Names are those of the stage, which are the model's; a tied parameter has its first name only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.data.data_parallel import DataParallel
from stagemesh.parallel.fsdp.config import FsdpConfig, MixedPrecision, ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import (
    PARAM_GROUPS,
    STATE,
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
)
from stagemesh.parallel.fsdp.optimizer_state import read_groups
from stagemesh.parallel.tensor.state import TensorShard, gather_tensor, tensor_shard_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""An elementwise optimizer (SGD, Adam and their kin) over a rank's parameters."""
OptimizerState = dict[str, dict[str, torch.Tensor]]
"""By name of the parameter, by key: a tensor of its shape, or 0-d."""


class Replica:
    """One stage on one rank. Its collectives are called by all ranks of dp and tp."""

    def __init__(
        self,
        stage: nn.Module,
        *,
        dp: ProcessGroup,
        tp: ProcessGroup,
        is_sharded: bool,
        is_mixed: bool,
        units: Sequence[str],
        flatten: bool,
        make_optimizer: MakeOptimizer,
    ) -> None:
        """Wrap a stage, in place. All ranks of dp call it.

        Args:
            stage: with its shards of tp already.
            dp: who has the same shards.
            tp: who has the other ones.
            is_sharded: Fsdp over dp instead of copies.
            is_mixed: compute in bfloat16.
            units: with Fsdp, names of the modules that are gathered by themselves.
            flatten: with Fsdp, whether the optimizer sees a unit's shards as one.
            make_optimizer: called with the parameters.
        """
        self._tp = tp
        self.module: DataParallel | Fsdp
        if is_sharded or is_mixed:
            strategy = ShardingStrategy.FULL_SHARD if is_sharded else ShardingStrategy.NO_SHARD
            config = FsdpConfig(
                sharding_strategy=strategy,
                mixed_precision=MixedPrecision() if is_mixed else False,
                wrap_policy=tuple(units),
                flatten_parameters=flatten,
            )
            self.module = Fsdp(stage, process_group=dp, config=config)
        else:
            self.module = DataParallel(stage, process_group=dp)
        self.optimizer = make_optimizer(self.module.parameters())
        self._shards = self._find_shards()

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the one that `gather_*` gives the whole tensors."""
        return self.module.process_group.rank == 0 and self._tp.rank == 0

    def gather_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters, whole, on the writer; {} on the others. A collective."""
        if isinstance(self.module, Fsdp):
            own = full_state_dict(self.module, only_rank=0)
        else:
            own = {name: p.detach() for name, p in self.module.module.named_parameters()}
        if self.module.process_group.rank:
            return {}
        wholes = {name: self._gather(name, own[name]) for name in self._shards}
        return {name: whole for name, whole in wholes.items() if whole is not None}

    def gather_optimizer_state(self) -> OptimizerState:
        """The optimizer's state, whole, on the writer; {} on the others. A collective."""
        own = self._own_optimizer_state()
        if self.module.process_group.rank:
            return {}
        gathered: OptimizerState = {}
        for name in self._shards:
            for key, value in sorted(own.get(name, {}).items()):
                whole = self._gather(name, value) if value.dim() else value
                if whole is not None and self._tp.rank == 0:
                    gathered.setdefault(name, {})[key] = whole
        return gathered

    def load_optimizer_state(self, read: Callable[[str], Mapping[str, torch.Tensor]]) -> None:
        """Take this rank's part of a whole state. No collective.

        Args:
            read: gives what there is for the parameter of a name.
        """
        own = {
            name: {key: self._own_state(shard, value) for key, value in read(name).items()}
            for name, shard in self._shards.items()
        }
        if isinstance(self.module, Fsdp):
            groups = read_groups(self.module.flat_parameters, self.optimizer)
            state: dict[str, Any] = {STATE: own, PARAM_GROUPS: groups}
            load_full_optimizer_state(self.module, optimizer=self.optimizer, state=state)
            return
        for name, parameter in self.module.module.named_parameters():
            self.optimizer.state[parameter] = {
                key: value.to(parameter.device, copy=True) if value.dim() else value.clone()
                for key, value in own[name].items()
            }

    def _own_optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        if isinstance(self.module, Fsdp):
            found = full_optimizer_state(self.module, self.optimizer, only_rank=0)
            named: dict[str, dict[str, torch.Tensor]] = found.get(STATE, {})
            return named
        return {
            name: self.optimizer.state[parameter]
            for name, parameter in self.module.module.named_parameters()
            if parameter in self.optimizer.state
        }

    def _find_shards(self) -> dict[str, TensorShard | None]:
        """How each parameter is cut over tp; the same names in the same order on all its ranks."""
        if isinstance(self.module, Fsdp):
            return {
                member.names[0]: tensor_shard_of(member.parameter)
                for flat in self.module.flat_parameters
                for member in flat.members
            }
        named = self.module.module.named_parameters()
        return {name: tensor_shard_of(parameter) for name, parameter in named}

    def _gather(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        shard = self._shards[name]
        if shard is None:
            return value if self._tp.rank == 0 else None
        return gather_tensor(value, shard=shard, process_group=self._tp, dst=0)

    def _own_state(self, shard: TensorShard | None, value: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a whole tensor of the optimizer; of single numbers itself."""
        if not value.dim():
            return value
        own = value if shard is None else shard.view_on(self._tp.rank, full=value)
        # A run may have gone on in another precision than that of its parameters before.
        return own.to(next(self.module.parameters()).dtype)

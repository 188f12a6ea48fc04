"""Fsdp: data parallelism whose ranks share parameters, gradients and optimizer state.

    model = Fsdp(model, process_group=group, config=FsdpConfig(mixed_precision=False))
    optimizer = torch.optim.AdamW(model.parameters())    # after wrapping: these are the shards
    for batch in batches:                                # other ones on each rank
        model(batch).mean().backward()
        model.clip_grad_norm_(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

With P parameters of b bytes, K bytes of optimizer state per parameter and R ranks, a rank holds
(Rajbhandari et al., arXiv:1910.02054; U is the largest unit, two of which are whole at a time)

                     parameters            gradients    optimizer
    NO_SHARD         b P                   b P          K P
    SHARD_GRAD_OP    b P / R, b P whole    b P / R      K P / R
                     in forward, backward
    FULL_SHARD       b P / R, and the      b P / R      K P / R
                     root's and 2 U whole

All ranks must run the same units in the same order (FULL_SHARD, SHARD_GRAD_OP) and call backward
equally often. A trained parameter without a gradient on any rank gets zeros, if its unit ran.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.clipping import clip_grad_norm_
from stagemesh.parallel.data.agreement import broadcast_tensors, check_same_module
from stagemesh.parallel.fsdp.build import build_units
from stagemesh.parallel.fsdp.config import FsdpConfig, ShardingStrategy
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter
from stagemesh.parallel.fsdp.memory import FsdpMemoryStats, MemoryMeter
from stagemesh.parallel.fsdp.runtime import FsdpRuntime
from stagemesh.parallel.fsdp.shards import ShardedParameter, ShardMetadata
from stagemesh.parallel.fsdp.wrap import plan_units

_BROADCAST_BYTES = 32 * 2**20


class Fsdp(nn.Module):
    """A module with its parameters cut into shards. Satisfies GradientSync.

    `parameters()` gives this rank's shards: [elements], in the module's dtypes, some of them empty
    where a parameter has fewer elements than there are ranks. The attributes of the inner modules
    are the whole parameters while those are gathered, and meta tensors while they are not; see
    `whole_parameters`.
    """

    def __init__(
        self, module: nn.Module, *, process_group: ProcessGroup, config: FsdpConfig | None = None
    ) -> None:
        """Check that the ranks agree, take the values of rank 0, and cut. A collective.

        Args:
            module: the same on all ranks but for its values; changed in place.
            process_group: of the data-parallel ranks.
            config: the same on all ranks; `FsdpConfig()` without.

        Raises:
            ConfigError: on all ranks, if their modules or configs differ; on this one, if the
                config does not fit the module.
        """
        super().__init__()
        config = config or FsdpConfig()
        if any(isinstance(inner, Fsdp) for inner in module.modules()):
            raise ConfigError("module holds an Fsdp already; wrap the whole once, the units follow")
        check_same_module(module, settings=str(config), process_group=process_group)
        plans = plan_units(module, policy=config.wrap_policy, min_param_size=config.min_param_size)
        if process_group.size > 1:
            broadcast_tensors(
                [*module.parameters(), *module.buffers()],
                chunk_bytes=_BROADCAST_BYTES,
                process_group=process_group,
            )
        _cast_buffers(module, config.precision.buffer_dtype)
        self.module = module
        self.config = config
        self.process_group = process_group
        self._meter = MemoryMeter()
        self._units = build_units(
            plans, config=config, process_group=process_group, meter=self._meter
        )
        self._runtime = FsdpRuntime(
            self._units,
            strategy=config.sharding_strategy,
            input_dtype=config.precision.param_dtype,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block backwards only add up; the next one outside of it reduces the sum.

        Holds the gradients whole meanwhile, and with SHARD_GRAD_OP the parameters, too.
        """
        return self._runtime.no_sync()

    def sync_gradients(self) -> None:
        """Average over the ranks what backwards within `no_sync` have added up. A collective."""
        self._runtime.sync_gradients()

    def clip_grad_norm_(
        self,
        *,
        max_norm: float,
        groups: Sequence[ProcessGroup] = (),
        tensor_group: ProcessGroup | None = None,
    ) -> torch.Tensor:
        """`clipping.clip_grad_norm_` of all parameters, over the ranks of this group and others.

        Args:
            max_norm: largest norm that is left as it is.
            groups: others over which parameters are spread, as pipeline stages are.
            tensor_group: of tensor-parallel layers within the module.
        """
        is_sharded = self.config.sharding_strategy is not ShardingStrategy.NO_SHARD
        own = (self.process_group,) if is_sharded else ()
        return clip_grad_norm_(
            self.parameters(),
            max_norm=max_norm,
            groups=(*own, *groups),
            tensor_group=tensor_group,
        )

    @contextmanager
    def whole_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """All parameters whole, by name, to be read within the block. A collective.

        What is written to them is lost.
        """
        self._runtime.unshard_all()
        try:
            yield {
                name: member.parameter.detach()
                for flat in self.flat_parameters
                for member in flat.members
                for name in member.names
            }
        finally:
            self._runtime.reshard_all()

    @property
    def flat_parameters(self) -> list[FlatParameter]:
        """Of all units, in the order of their modules."""
        return [flat for unit in self._units for flat in unit.flats]

    @property
    def unit_names(self) -> list[str]:
        """Names of the modules that are gathered by themselves; the root's is empty."""
        return [unit.name for unit in self._units]

    def sharded_parameters(self) -> list[ShardedParameter]:
        """What this rank holds of each parameter."""
        return [
            ShardedParameter(
                name=member.names[0],
                local_shard=flat.local_piece(slot),
                full_shape=flat.layout.shapes[slot],
                metadata=_metadata(flat, slot, flat.rank, owner=self.process_group.rank),
            )
            for flat in self.flat_parameters
            for slot, member in enumerate(flat.members)
        ]

    def shard_table(self) -> dict[str, tuple[ShardMetadata, ...]]:
        """For each parameter the pieces of all ranks, in rank order; of NO_SHARD this rank's."""
        return {
            member.names[0]: tuple(
                _metadata(
                    flat,
                    slot,
                    rank,
                    owner=rank if flat.layout.num_shards > 1 else self.process_group.rank,
                )
                for rank in range(flat.layout.num_shards)
            )
            for flat in self.flat_parameters
            for slot, member in enumerate(flat.members)
        }

    def memory_stats(self) -> FsdpMemoryStats:
        """Bytes of parameters on this rank."""
        return FsdpMemoryStats(
            total_parameter_bytes=sum(
                flat.layout.numel * flat.stored_dtype.itemsize for flat in self.flat_parameters
            ),
            local_shard_bytes=sum(
                flat.local.untyped_storage().nbytes() for flat in self.flat_parameters
            ),
            gathered_bytes=self._meter.held_bytes,
            peak_gathered_bytes=self._meter.peak_bytes,
        )

    def reset_peak_memory(self) -> None:
        """Measure `peak_gathered_bytes` anew from now on."""
        self._meter.reset_peak()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Where `to`, `half`, `cuda` and their kin end up: refused, they would part the shards."""
        raise ConfigError("cast or move the module before it is wrapped, not the Fsdp")


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for inner in module.modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if buffer.is_floating_point():
                inner._buffers[name] = buffer.to(dtype)


def _metadata(flat: FlatParameter, slot: int, rank: int, *, owner: int) -> ShardMetadata:
    piece = flat.layout.pieces[rank][slot]
    start = flat.layout.flat_starts[slot] + piece.offset
    return ShardMetadata(
        owner_rank=owner, start=start, end=start + piece.numel, offset=piece.offset
    )

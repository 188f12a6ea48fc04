"""FlatParameter: parameters of one unit that are gathered together and cut together.

    module.weight ---+          original Parameters: autograd's leaves; memory only when whole
    module.bias -----+--> gathered [R * L], compute dtype
                                 ^
                                 | all_gather
    shards  [<= L], stored dtype, what the optimizer updates: views of `local` [L]

The original Parameters stay what they are, objects that any code may hold. Their memory is resized
to nothing and back, never replaced, so that what autograd saved of them is whole again when the
parameter is gathered for the backward. While they are whole they are attributes of their modules;
while they are not, a meta tensor of their shape stands there, because to read them would be to read
freed memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagemesh.comm.work import Work
from stagemesh.parallel.fsdp.collectives import FlatCollectives
from stagemesh.parallel.fsdp.layout import ShardLayout
from stagemesh.parallel.fsdp.memory import MemoryMeter
from stagemesh.parallel.fsdp.shards import FsdpShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An original parameter and all places where it is registered; several if it is tied."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """In the wrapped module, the first one first."""
    places: tuple[tuple[nn.Module, str], ...]
    """Modules and attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSlice:
    """One parameter that the optimizer sees, and which part of the local shard it is."""

    parameter: nn.Parameter
    start: int
    numel: int


class FlatParameter:
    """Members of one dtype that are all trained or all frozen."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        layout: ShardLayout,
        rank: int,
        is_flattened: bool,
        compute_dtype: torch.dtype,
        storage_device: torch.device,
        collectives: FlatCollectives,
        meter: MemoryMeter,
    ) -> None:
        """Cut the members, free them, and take them out of their modules.

        Args:
            members: in the order of the layout.
            layout: of all ranks' shards.
            rank: whose shard is kept here, in the layout.
            is_flattened: one parameter for the optimizer, or one for each member.
            compute_dtype: of the gathered parameters.
            storage_device: where the shard is kept.
            collectives: of this flat parameter.
            meter: told of gathered memory.
        """
        first = members[0].parameter
        self.members = tuple(members)
        self.layout = layout
        self.rank = rank
        self.collectives = collectives
        self.requires_grad = first.requires_grad
        self.stored_dtype = first.dtype
        self.compute_dtype = compute_dtype
        self.device = first.device
        self._meter = meter
        self._gather: tuple[torch.Tensor, Work[Any] | None] | None = None
        self._gathered_version = -1
        self._is_whole = False
        self.local = self._cut(storage_device)
        self.shards = self._make_shards(is_flattened=is_flattened)
        self.is_aliased = (
            layout.num_shards == 1
            and self.compute_dtype == self.stored_dtype
            and storage_device == self.device
        )
        """The shard is whole, and is what the modules compute with."""
        self._placeholders = [
            torch.empty(shape, dtype=compute_dtype, device="meta") for shape in layout.shapes
        ]
        self._full, self._storages = self._rebase_members()
        self._uninstall()
        if self.is_aliased:
            self._install()

    @property
    def is_whole(self) -> bool:
        """Whether the members can be used."""
        return self._is_whole or self.is_aliased

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was started and not waited for."""
        return self._gather is not None

    def start_unshard(self) -> None:
        """Begin to gather, unless that is under way or done."""
        version = self._shard_version()
        is_current = self.is_whole and version == self._gathered_version
        if self.is_aliased or self._gather is not None or is_current:
            return
        self._gathered_version = version
        shard = self.local.detach().to(self.compute_dtype)
        if self.layout.num_shards == 1:
            self._gather = (shard, None)
            return
        buffer = self._gather_buffer()
        self._gather = (buffer, self.collectives.all_gather(buffer, shard))

    def finish_unshard(self) -> None:
        """Wait for the gather, if there is one, and make the members whole."""
        if self._gather is None:
            return
        buffer, work = self._gather
        self._gather = None
        if work is not None:
            work.wait()
        self._allocate()
        if buffer is not self._full:
            self._copy_out(buffer)
        self._is_whole = True
        self._install()

    def unshard(self) -> None:
        """Make the members whole."""
        self.start_unshard()
        self.finish_unshard()

    def reshard(self) -> None:
        """Free what was gathered."""
        self.finish_unshard()
        if self.is_aliased or not self._is_whole:
            return
        self._is_whole = False
        self._uninstall()
        for storage, num_bytes in self._storages:
            storage.resize_(0)
            self._meter.remove(num_bytes)

    def write_local(self, slot: int, values: torch.Tensor) -> None:
        """Replace this rank's piece of a member. Shapes: values [elements of the piece]."""
        piece = self.layout.pieces[self.rank][slot]
        with torch.no_grad():
            self.local[piece.start : piece.start + piece.numel].copy_(values)
        # Gathered parameters are older than this, on all ranks.
        self._gathered_version = -1

    def local_piece(self, slot: int) -> torch.Tensor:
        """This rank's elements of a member, as a view."""
        piece = self.layout.pieces[self.rank][slot]
        return self.local.detach()[piece.start : piece.start + piece.numel]

    def _cut(self, storage_device: torch.device) -> torch.Tensor:
        local = torch.zeros(
            self.layout.shard_length, dtype=self.stored_dtype, device=storage_device
        )
        for member, piece in zip(self.members, self.layout.pieces[self.rank], strict=True):
            whole = member.parameter.detach().reshape(-1)
            local[piece.start : piece.start + piece.numel].copy_(
                whole[piece.offset : piece.offset + piece.numel]
            )
        return local

    def _make_shards(self, *, is_flattened: bool) -> tuple[ShardSlice, ...]:
        if is_flattened:
            spans = [(0, self.layout.local_numel(self.rank))]
        else:
            spans = [(piece.start, piece.numel) for piece in self.layout.pieces[self.rank]]
        shards = []
        for index, (start, numel) in enumerate(spans):
            parameter = nn.Parameter(
                self.local[start : start + numel], requires_grad=self.requires_grad
            )
            parameter.fsdp_shard = FsdpShard(  # type: ignore[attr-defined]
                is_sharded=self.layout.num_shards > 1,
                is_tensor_sharded=is_tensor_sharded(self.members[index].parameter),
            )
            shards.append(ShardSlice(parameter=parameter, start=start, numel=numel))
        return tuple(shards)

    def _rebase_members(
        self,
    ) -> tuple[torch.Tensor | None, list[tuple[torch.UntypedStorage, int]]]:
        """Give the members memory that can be freed; where it is one block, that block, too."""
        starts = self.layout.gathered_starts
        if starts is None:
            wholes = [self._empty(member.parameter.numel()) for member in self.members]
            for member, whole in zip(self.members, wholes, strict=True):
                member.parameter.data = whole.view(member.parameter.shape)
            return None, [_freed(whole) for whole in wholes]
        full = self.local
        if not self.is_aliased:
            full = self._empty(self.layout.num_shards * self.layout.shard_length)
        for member, start in zip(self.members, starts, strict=True):
            parameter = member.parameter
            # .data has a version counter of its own: a gather is no change that autograd should
            # hold against what it saved.
            parameter.data = full.data[start : start + parameter.numel()].view(parameter.shape)
        return full, [] if self.is_aliased else [_freed(full)]

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.compute_dtype, device=self.device)

    def _gather_buffer(self) -> torch.Tensor:
        if self._full is not None and self.local.device == self.device:
            self._allocate()
            return self._full
        numel = self.layout.num_shards * self.layout.shard_length
        return torch.empty(numel, dtype=self.compute_dtype, device=self.local.device)

    def _allocate(self) -> None:
        for storage, num_bytes in self._storages:
            if num_bytes and not storage.size():
                storage.resize_(num_bytes)
                self._meter.add(num_bytes)

    def _copy_out(self, buffer: torch.Tensor) -> None:
        with torch.no_grad():
            if self._full is not None:
                self._full.copy_(buffer)
                return
            rows = buffer.view(self.layout.num_shards, self.layout.shard_length)
            for row, pieces in zip(rows, self.layout.pieces, strict=True):
                for piece in pieces:
                    whole = self.members[piece.slot].parameter.data.view(-1)
                    whole[piece.offset : piece.offset + piece.numel].copy_(
                        row[piece.start : piece.start + piece.numel]
                    )

    def _shard_version(self) -> int:
        """Changes whenever an optimizer or anyone else writes to a shard."""
        return sum(shard.parameter._version for shard in self.shards)

    def _install(self) -> None:
        for member in self.members:
            for module, attribute in member.places:
                # In front of nn.Module's own look-up, so that `parameters()` gives the shards.
                module.__dict__[attribute] = member.parameter

    def _uninstall(self) -> None:
        for member, placeholder in zip(self.members, self._placeholders, strict=True):
            for module, attribute in member.places:
                module.__dict__[attribute] = placeholder


def is_tensor_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter is this rank's shard of a tensor-parallel layer's."""
    return getattr(parameter, "tensor_shard", None) is not None


def _freed(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int]:
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    return storage, num_bytes

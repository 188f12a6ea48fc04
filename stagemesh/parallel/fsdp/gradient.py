"""FlatGradient: from the gradients of a flat parameter's members to those of its shards."""

from typing import Any

import torch

from stagemesh.comm.work import Work
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter


class FlatGradient:
    """Adds up, averages over the ranks, and hands each shard its part.

    collect  leaf gradients, freed --> buffer [R * L], reduce dtype; adds to what is there
    launch   buffer, freed --> average of this rank's part [L]
    finish   average --> `.grad` of the shards, stored dtype; adds to what is there
    """

    def __init__(self, flat: FlatParameter, *, reduce_dtype: torch.dtype | None) -> None:
        """Serve one flat parameter.

        Args:
            flat: whose gradients these are.
            reduce_dtype: of all sums; None: that of the gathered parameters.
        """
        self._flat = flat
        self._dtype = reduce_dtype or flat.compute_dtype
        self._buffer: torch.Tensor | None = None
        self._reduction: tuple[Work[Any] | None, torch.Tensor] | None = None

    def collect(self) -> bool:
        """Move the gradients of the members into the buffer; whether there were any."""
        members = self._flat.members
        grads = [member.parameter.grad for member in members]
        if all(grad is None for grad in grads):
            return False
        is_first = self._buffer is None
        buffer = self._empty_buffer() if self._buffer is None else self._buffer
        for slot, grad in enumerate(grads):
            if grad is not None or is_first:
                self._place(buffer, slot, grad, is_first=is_first)
        if is_first:
            self._clear_padding(buffer)
        self._buffer = buffer
        for member in members:
            member.parameter.grad = None
        return True

    def launch(self) -> None:
        """Begin to average over the ranks; without gradients here, zeros take part."""
        assert self._reduction is None
        flat, buffer = self._flat, self._buffer
        self._buffer = None
        if buffer is None:
            buffer = self._empty_buffer().zero_()
        buffer = buffer.to(flat.local.device)
        if flat.collectives.size == 1:
            self._reduction = (None, buffer)
        elif flat.layout.num_shards == 1:
            self._reduction = (flat.collectives.all_reduce(buffer), buffer)
        else:
            average = buffer.new_empty(flat.layout.shard_length)
            self._reduction = (flat.collectives.reduce_scatter(average, buffer), average)

    def finish(self) -> None:
        """Wait for the average and give it to the shards."""
        assert self._reduction is not None
        work, average = self._reduction
        self._reduction = None
        if work is not None:
            work.wait()
        average = average.to(self._flat.stored_dtype)
        for shard in self._flat.shards:
            part = average[shard.start : shard.start + shard.numel]
            if shard.parameter.grad is None:
                shard.parameter.grad = part
            else:
                with torch.no_grad():
                    shard.parameter.grad.add_(part)

    def discard(self) -> None:
        """Forget what a backward that failed has left."""
        self._buffer = None
        self._reduction = None

    def _empty_buffer(self) -> torch.Tensor:
        layout = self._flat.layout
        numel = layout.num_shards * layout.shard_length
        return torch.empty(numel, dtype=self._dtype, device=self._flat.device)

    def _place(
        self, buffer: torch.Tensor, slot: int, grad: torch.Tensor | None, *, is_first: bool
    ) -> None:
        """Put or add one member's gradient; zeros for one that has none."""
        source = None
        if grad is not None:
            source = (grad if grad.layout is torch.strided else grad.to_dense()).reshape(-1)
        for target, offset in self._spans(buffer, slot):
            if source is None:
                target.zero_()
            elif is_first:
                target.copy_(source[offset : offset + target.numel()])
            else:
                target.add_(source[offset : offset + target.numel()])

    def _spans(self, buffer: torch.Tensor, slot: int) -> list[tuple[torch.Tensor, int]]:
        """Where a member's elements are in the buffer, and which of them each span begins with."""
        layout = self._flat.layout
        if layout.gathered_starts is not None:
            start = layout.gathered_starts[slot]
            numel = self._flat.members[slot].parameter.numel()
            return [(buffer[start : start + numel], 0)]
        rows = buffer.view(layout.num_shards, layout.shard_length)
        return [
            (row[pieces[slot].start : pieces[slot].start + pieces[slot].numel], pieces[slot].offset)
            for row, pieces in zip(rows, layout.pieces, strict=True)
        ]

    def _clear_padding(self, buffer: torch.Tensor) -> None:
        """What is nobody's gradient must be no NaN: some who reads the whole buffer would see it.

        Per parameter, padding lies between pieces; they are short only at the last ranks.
        """
        layout = self._flat.layout
        if layout.gathered_starts is not None:
            buffer[layout.numel :].zero_()
            return
        rows = buffer.view(layout.num_shards, layout.shard_length)
        for row, pieces in zip(rows, layout.pieces, strict=True):
            ends = [*(piece.start for piece in pieces[1:]), layout.shard_length]
            for piece, end in zip(pieces, ends, strict=True):
                row[piece.start + piece.numel : end].zero_()

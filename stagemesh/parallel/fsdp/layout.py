"""ShardLayout: which elements of which parameters lie where in the ranks' shards. Pure.

    flat           the parameters end to end, cut in R pieces of ceil(N / R) elements:

                       | w w w w w w | b b | v v v v |     N = 12, R = 5
                       | 0 0 0 | 1 1 1 | 2 2 2 | 3 3 3 | - - - |

    per parameter  each one cut by itself, in R pieces of ceil(n / R); a rank's shard is its pieces
                   end to end:

                       w w w | w w w    b | b    v v | v v        R = 2
                       rank 0: w w w b v v    rank 1: w w w b v v

The last pieces may be short or empty. All ranks' shards have room for the same number of elements
(collectives want that); what is left over is padding and belongs to no parameter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of one parameter in one rank's shard."""

    slot: int
    """Which parameter."""
    start: int
    """Where in the rank's shard."""
    offset: int
    """Which element of the parameter is the first."""
    numel: int
    """How many; perhaps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where everything is; the same on all ranks."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the parameters."""
    shard_length: int
    """Elements of a rank's shard, padding included."""
    pieces: tuple[tuple[Piece, ...], ...]
    """By rank: one piece of each parameter, in the order of the parameters."""
    flat_starts: tuple[int, ...]
    """Where each parameter begins in what is cut: the flat parameter, or itself."""
    gathered_starts: tuple[int, ...] | None
    """Where each parameter begins in the shards end to end; None where they cut it in pieces."""

    @property
    def num_shards(self) -> int:
        """R, or 1 where nothing is split."""
        return len(self.pieces)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def local_numel(self, rank: int) -> int:
        """Elements of a rank's shard without padding."""
        return sum(piece.numel for piece in self.pieces[rank])


def flat_layout(shapes: Sequence[tuple[int, ...]], *, num_shards: int) -> ShardLayout:
    """Cut the parameters as one."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = [sum(sizes[:slot]) for slot in range(len(sizes))]
    length = math.ceil(sum(sizes) / num_shards)
    return ShardLayout(
        shapes=tuple(shapes),
        shard_length=length,
        pieces=tuple(
            tuple(
                _overlap(slot, start, size, rank * length, length)
                for slot, (start, size) in enumerate(zip(starts, sizes, strict=True))
            )
            for rank in range(num_shards)
        ),
        flat_starts=tuple(starts),
        gathered_starts=tuple(starts),
    )


def per_parameter_layout(shapes: Sequence[tuple[int, ...]], *, num_shards: int) -> ShardLayout:
    """Cut each parameter by itself."""
    sizes = [math.prod(shape) for shape in shapes]
    lengths = [math.ceil(size / num_shards) for size in sizes]
    places = [sum(lengths[:slot]) for slot in range(len(sizes))]
    return ShardLayout(
        shapes=tuple(shapes),
        shard_length=sum(lengths),
        pieces=tuple(
            tuple(
                Piece(
                    slot=slot,
                    start=places[slot],
                    offset=min(rank * length, size),
                    numel=max(0, min(length, size - rank * length)),
                )
                for slot, (size, length) in enumerate(zip(sizes, lengths, strict=True))
            )
            for rank in range(num_shards)
        ),
        flat_starts=(0,) * len(sizes),
        gathered_starts=tuple(places) if num_shards == 1 else None,
    )


def _overlap(slot: int, start: int, size: int, shard_start: int, length: int) -> Piece:
    """What of [start, start + size) lies in [shard_start, shard_start + length)."""
    first = min(max(start, shard_start), start + size)
    last = max(first, min(start + size, shard_start + length))
    return Piece(
        slot=slot,
        start=max(0, min(first - shard_start, length)),
        offset=first - start,
        numel=last - first,
    )

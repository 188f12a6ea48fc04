"""The shapes of an all_to_all as bytes in front of a payload: what every rank tells every other.

number of words | for each tensor: number of dims, dims | payload
(int64)           (int64)                                 (bytes)
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.collectives import CollectiveCall, mismatch
from stagemesh.comm.transport import TensorSpec
from stagemesh.errors import ProtocolError

Shape = tuple[int, ...]

_WORD_BYTES = 8
_MAX_NAMED = 8


def pack(shapes: Sequence[Shape], raw: torch.Tensor) -> torch.Tensor:
    """Shapes and flat bytes as flat bytes."""
    words = [word for shape in shapes for word in (len(shape), *shape)]
    head = torch.tensor([len(words), *words], dtype=torch.int64).view(torch.uint8)
    return torch.cat([head, raw.view(torch.uint8)])


def unpack(packed: torch.Tensor) -> tuple[list[Shape], torch.Tensor]:
    """What `pack` was given.

    Raises:
        ProtocolError: the bytes are not what it makes.
    """
    num_words = _words(packed, 0, 1)[0]
    if num_words < 0:
        raise ProtocolError(f"a peer's layout has {num_words} words")
    words = _words(packed, 1, num_words)
    shapes = []
    at = 0
    while at < num_words:
        end = at + 1 + words[at]
        if not at < end <= num_words:
            raise ProtocolError(f"a peer's layout has a tensor of {words[at]} dims")
        shapes.append(tuple(words[at + 1 : end]))
        at = end
    return shapes, packed[(1 + num_words) * _WORD_BYTES :]


def check_layouts(
    call: CollectiveCall, layouts: Sequence[Sequence[Shape]], *, dtype: torch.dtype
) -> None:
    """Compare what each rank sends with what the other expects.

    Args:
        call: for the error.
        layouts: per rank the shapes of its R inputs, then those of its R outputs.
        dtype: of all tensors.

    Raises:
        CollectiveMismatch: naming the pairs; the same on each rank, as all know all layouts.
    """
    size = call.size
    for rank, layout in enumerate(layouts):
        if len(layout) != 2 * size:
            raise ProtocolError(f"rank {rank} sent a layout of {len(layout)} tensors")
    wrong = [
        f"{call.names.of(src)} sends {TensorSpec(dtype=dtype, shape=layouts[src][dst])} to "
        f"{call.names.of(dst)}, "
        f"which expects {TensorSpec(dtype=dtype, shape=layouts[dst][size + src])}"
        for src in range(size)
        for dst in range(size)
        if layouts[src][dst] != layouts[dst][size + src]
    ]
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise mismatch(
            call, f"in {call.envelope.operation} " + "; ".join(wrong[:_MAX_NAMED]) + more
        )


def _words(packed: torch.Tensor, start: int, num_words: int) -> list[int]:
    raw = packed[start * _WORD_BYTES : (start + num_words) * _WORD_BYTES]
    if raw.dtype != torch.uint8 or raw.numel() != num_words * _WORD_BYTES:
        raise ProtocolError("a peer's layout ends early")
    # A copy: the view needs aligned memory.
    return [int(word) for word in raw.clone().view(torch.int64).tolist()]

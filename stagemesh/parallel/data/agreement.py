"""What ranks make sure of when they wrap a module: that it is the same, with the same values."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.raw import flat_bytes, write
from stagemesh.errors import ConfigError

_SOURCE = 0
"""The rank whose values all get."""


def check_same_module(module: nn.Module, *, settings: str, process_group: ProcessGroup) -> None:
    """Compare the ranks' parameters, buffers and settings by name, dtype and shape. A collective.

    Args:
        module: this rank's.
        settings: in words; must be equal, too.
        process_group: the ranks.

    Raises:
        ConfigError: on all ranks, if any two differ; says how.
    """
    text = "\n".join([settings, *_describe(module)])
    told = process_group.all_gather_variable(
        torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    )
    texts = [bytes(flat.tolist()).decode(errors="replace") for flat in told]
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(_difference(texts[0], other, rank=rank))


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], *, chunk_bytes: int, process_group: ProcessGroup
) -> None:
    """Give all ranks the values of rank 0, bit for bit, many tensors in one collective.

    Args:
        tensors: the same dtypes and shapes on all ranks; changed in place on ranks other than 0.
        chunk_bytes: about the size of a collective.
        process_group: the ranks.
    """
    for chunk in _chunks(tensors, chunk_bytes):
        parts = [flat_bytes(tensor).view(torch.uint8) for tensor in chunk]
        flat = torch.cat(parts)
        process_group.broadcast(flat, src=_SOURCE)
        if process_group.rank == _SOURCE:
            continue
        sizes = [part.numel() for part in parts]
        for tensor, part in zip(chunk, torch.split(flat, sizes), strict=True):
            write(tensor, [part])


def _describe(module: nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        yield f"parameter {name}: {kind} {_layout(parameter)}"
    for name, buffer in module.named_buffers():
        yield f"buffer {name}: {_layout(buffer)}"


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _difference(first: str, other: str, *, rank: int) -> str:
    pairs = zip_longest(first.split("\n"), other.split("\n"), fillvalue="nothing")
    ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return (
        f"the ranks wrap different modules: rank 0 has {_counts(first)}, rank {rank} has "
        f"{_counts(other)}; the first difference: rank 0 has {ours}, rank {rank} has {theirs}"
    )


def _counts(text: str) -> str:
    lines = text.split("\n")
    num_parameters = sum(line.startswith("parameter ") for line in lines)
    num_buffers = sum(line.startswith("buffer ") for line in lines)
    return f"{num_parameters} parameters and {num_buffers} buffers"


def _chunks(tensors: Sequence[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= chunk_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk

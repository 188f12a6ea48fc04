"""Tensors as flat bytes and back. What only moves is moved so: not each dtype has all kernels.

The bytes of bool tensors keep the dtype bool, so that the codec goes on refusing any but 0 and 1.
"""

import math
from collections.abc import Sequence

import torch

from stagemesh.errors import ConfigError


def raw_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the bytes of a tensor."""
    return torch.bool if dtype == torch.bool else torch.uint8


def flat_bytes(tensor: torch.Tensor, *, keep_device: bool = False) -> torch.Tensor:
    """The elements of a tensor in row-major order; a view of its memory where that is possible.

    Shapes:
        tensor: any.
        result: [bytes], of `raw_dtype`; on the CPU, or with `keep_device` where the tensor is.
    """
    dense = tensor.detach()
    is_plain = dense.is_cpu and not dense.is_complex() and not dense.is_neg()
    if is_plain and dense.is_contiguous() and dense.numel() > 1:
        # The usual one, in half the time of the way that suits all.
        return dense.view(-1).view(raw_dtype(dense.dtype))
    if not dense.is_cpu or dense.is_complex() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
        dense = dense if keep_device else dense.cpu()
    raw = raw_dtype(tensor.dtype)
    if dense.element_size() == 1:
        dense = dense.view(raw)
    elif dense.is_complex():
        # Same bytes; torch warns whenever it allocates complex32.
        dense = torch.view_as_real(dense)
    dense = dense.contiguous()
    # Not reshape: with one element or none any stride counts as contiguous, and then no byte view
    # exists.
    return dense.as_strided((dense.numel(),), (1,)).view(raw)


def own_copy(tensor: torch.Tensor, *, keep_device: bool = False) -> torch.Tensor:
    """A contiguous copy with memory of its own; on the CPU, or where the tensor is."""
    flat = flat_bytes(tensor, keep_device=keep_device)
    return flat.clone().view(tensor.dtype).reshape(tensor.shape)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of that dtype and shape, on the CPU, with whatever it holds."""
    return empty_tensor(tensor.dtype, tuple(tensor.shape))


def empty_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor on the CPU, with whatever it holds. Not each dtype has torch.empty."""
    raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=raw_dtype(dtype))
    return raw.view(dtype).reshape(shape)


def shaped(
    chunks: Sequence[torch.Tensor], *, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor out of the chunks of its bytes; a single chunk lends it its memory."""
    whole = chunks[0] if len(chunks) == 1 else _join(chunks, dtype)
    # A bool of another byte than 0 and 1 would be neither true nor false.
    whole = whole if dtype != torch.bool else whole.to(torch.bool)
    if whole.storage_offset() % dtype.itemsize:
        # Cut out of a larger message, at a place where no such element may begin.
        whole = whole.clone()
    return whole.view(dtype).reshape(shape)


def write(target: torch.Tensor, chunks: Sequence[torch.Tensor]) -> None:
    """Put the chunks of a tensor's bytes into its elements; nothing between them is touched."""
    target = target.detach()
    if target.is_cpu and target.is_contiguous() and not (target.is_conj() or target.is_neg()):
        flat = flat_bytes(target)
        start = 0
        for chunk in chunks:
            flat[start : start + chunk.numel()].copy_(chunk)
            start += chunk.numel()
        return
    target.copy_(shaped(chunks, dtype=target.dtype, shape=tuple(target.shape)))


def write_elements(target: torch.Tensor, flat: torch.Tensor) -> None:
    """Put elements of the target's dtype into it, in row-major order. Shapes: flat [elements]."""
    if target.is_inference():
        # torch lets nobody write to it, but by its bytes.
        write(target, [flat_bytes(flat)])
        return
    target = target.detach()
    if target.is_contiguous():
        target.view(-1).copy_(flat)
    else:
        target.copy_(flat.reshape(target.shape))


def check_writable(tensor: torch.Tensor, *, name: str) -> None:
    """Refuse a tensor some elements of which share memory, as `expand` makes them.

    Raises:
        ConfigError: naming the argument.
    """
    if not tensor.is_contiguous() and any(
        stride == 0 and dim > 1 for stride, dim in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(
            f"{name} has elements that share memory (strides {list(tensor.stride())}), so a result "
            "cannot be written into it; pass a clone"
        )


def _join(chunks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(list(chunks)) if chunks else torch.empty(0, dtype=raw_dtype(dtype))

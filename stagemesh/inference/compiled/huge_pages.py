"""Weights in large pages: a loop that reads gigabytes in order waits less for page tables.

On the CPU measured (docs/compile.md) a step of one token became a tenth faster. Linux gives such
pages when asked; where it does not, all stays as it was.
"""

import ctypes
import logging
import sys

import torch
from torch import nn

logger = logging.getLogger(__name__)

_PAGE_BYTES = 2**21
_ALIGN_BYTES = 64
_MADV_COLLAPSE = 25  # of linux/mman.h, since Linux 6.1


@torch.no_grad()
def use_huge_pages(module: nn.Module) -> None:
    """Move a module's parameters next to each other and ask for huge pages there.

    Parameters that other modules share keep their memory. Holds the module's parameters twice
    while it moves them.
    """
    if sys.platform != "linux":
        return
    parameters = [p for p in module.parameters() if p.device.type == "cpu" and p.is_contiguous()]
    sizes = [-(-p.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for p in parameters]
    if sum(sizes) < _PAGE_BYTES:
        return
    block = torch.empty(sum(sizes) + _PAGE_BYTES, dtype=torch.uint8)
    offset = -block.data_ptr() % _PAGE_BYTES
    for parameter, size in zip(parameters, sizes, strict=True):
        place = block[offset : offset + parameter.nbytes]
        moved = place.view(parameter.dtype).view(parameter.shape)
        moved.copy_(parameter)
        parameter.data = moved
        offset += size
    _collapse(block)


def collapse_in_place(tensor: torch.Tensor) -> None:
    """Ask for huge pages where a large tensor lies."""
    if sys.platform == "linux" and tensor.device.type == "cpu":
        _collapse(tensor)


def _collapse(tensor: torch.Tensor) -> None:
    """Ask for huge pages for the whole ones within a tensor."""
    begin = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    if end <= begin:
        return
    library = ctypes.CDLL(None, use_errno=True)
    answer = library.madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_COLLAPSE)
    )
    if answer != 0:
        logger.debug("no huge pages", extra={"errno": ctypes.get_errno()})

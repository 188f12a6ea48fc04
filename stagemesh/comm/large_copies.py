"""Copies of whole tensors, which must not hold up the event loop: large ones run on a thread.

A daemon answers for its health and sends its heartbeats from the loop that serves the collectives.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from stagemesh.comm.raw import flat_bytes, write

# Below it a copy takes a few milliseconds, and a change of threads a good part of that.
_OFF_LOOP_BYTES = 8 * 2**20

_ResultT = TypeVar("_ResultT")


async def run_copy(copy: Callable[[], _ResultT], *, num_bytes: int) -> _ResultT:
    """Run a copy of so many bytes.

    It has ended when this returns or raises, cancelled or not: nobody writes to a caller's tensor
    after its operation.
    """
    if num_bytes < _OFF_LOOP_BYTES:
        return copy()
    running = asyncio.get_running_loop().run_in_executor(None, copy)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


async def flatten_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The `flat_bytes` of tensors, which copy what is strided."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [flat_bytes(tensor) for tensor in tensors]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return await run_copy(lambda: [flat_bytes(each) for each in tensors], num_bytes=num_bytes)


async def copy_first(
    tensor: torch.Tensor, out: torch.Tensor, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Make `out` equal a tensor, and then work in it."""
    await write_result(out, await flatten_all([tensor]))
    await work()


async def write_result(target: torch.Tensor, chunks: Sequence[torch.Tensor]) -> None:
    """As `write`."""
    num_bytes = target.numel() * target.element_size()
    await run_copy(partial(write, target, chunks), num_bytes=num_bytes)

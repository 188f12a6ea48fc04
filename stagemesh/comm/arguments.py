"""Checks of the arguments of one rank, before anything is sent.

A call that is refused here was not made: the rank may call again, and the others wait for it. What
only the ranks together can know is compared in the agreement (see `collectives`).
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.raw import check_writable
from stagemesh.comm.transport import TensorSpec
from stagemesh.errors import ConfigError
from stagemesh.rpc.codec import check_sendable


def check_root(rank: int, *, name: str, size: int) -> None:
    """Refuse a root that is no rank of the group."""
    if not 0 <= rank < size:
        raise ConfigError(f"{name} must be in [0, {size}), got {rank}")


def check_tensor(tensor: torch.Tensor, *, name: str = "tensor", is_written: bool = False) -> None:
    """Refuse what cannot travel, or cannot be written to."""
    check_sendable(tensor)
    if is_written:
        check_writable(tensor, name=name)


def check_out(tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    """Refuse a place for the result, `out` or else the tensor, that cannot take it."""
    check_tensor(tensor, is_written=out is None)
    if out is None:
        return
    if TensorSpec.of(out) != TensorSpec.of(tensor):
        raise ConfigError(f"out must be {TensorSpec.of(tensor)}, got {TensorSpec.of(out)}")
    check_tensor(out, name="out", is_written=True)


def check_list(
    tensors: Sequence[torch.Tensor],
    *,
    name: str,
    like: torch.Tensor,
    size: int,
    is_written: bool = False,
) -> None:
    """Refuse a list that is not one tensor per rank, each of the dtype and shape of `like`."""
    check_count(tensors, name=name, size=size)
    expected = TensorSpec.of(like)
    for rank, tensor in enumerate(tensors):
        if TensorSpec.of(tensor) != expected:
            raise ConfigError(
                f"{name}[{rank}] must be {expected} as the rank's own tensor, got "
                f"{TensorSpec.of(tensor)}; for sizes that differ use the variable gathers or "
                "all_to_all"
            )
        check_tensor(tensor, name=f"{name}[{rank}]", is_written=is_written)


def check_absent(tensors: Sequence[torch.Tensor] | None, *, name: str, root: int) -> None:
    """Refuse a list on a rank that is not the root."""
    if tensors:
        raise ConfigError(f"{name} belongs to rank {root} only; leave it out on the other ranks")


def check_count(tensors: Sequence[torch.Tensor], *, name: str, size: int) -> None:
    """Refuse a list that is not one tensor per rank."""
    if len(tensors) != size:
        raise ConfigError(f"{name} must have one tensor per rank, {size}, got {len(tensors)}")


def check_one_dtype(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, size: int
) -> None:
    """Refuse lists for an all_to_all that are not one tensor per rank, all of one dtype."""
    check_count(outputs, name="outputs", size=size)
    check_count(inputs, name="inputs", size=size)
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(f"outputs and inputs must have one dtype, got {names}")
    for tensor in inputs:
        check_tensor(tensor)
    for rank, tensor in enumerate(outputs):
        check_tensor(tensor, name=f"outputs[{rank}]", is_written=True)


def rows_per_rank(
    whole: torch.Tensor, piece: torch.Tensor, *, size: int, names: tuple[str, str]
) -> list[torch.Tensor]:
    """Views of the pieces of `whole`, each of the shape of `piece`.

    Shapes:
        piece: [d, ...], or any.
        whole: [R * d, ...], or [R, *piece].
    """
    whole = whole.detach()
    shape = tuple(piece.shape)
    stacked = (size, *shape)
    joined = (size * shape[0], *shape[1:]) if shape else stacked
    if whole.dtype == piece.dtype and whole.shape == joined and shape:
        return [whole.narrow(0, rank * shape[0], shape[0]) for rank in range(size)]
    if whole.dtype == piece.dtype and whole.shape == stacked:
        return list(whole)
    allowed = {str(TensorSpec(dtype=piece.dtype, shape=form)) for form in (joined, stacked)}
    raise ConfigError(
        f"{names[0]} must be {' or '.join(sorted(allowed))} for {names[1]} {TensorSpec.of(piece)} "
        f"and {size} ranks, got {TensorSpec.of(whole)}"
    )


def split_rows(
    tensor: torch.Tensor, sizes: Sequence[int] | None, *, name: str, size: int
) -> list[torch.Tensor]:
    """Views of the rows for (or of) each rank; even ones without `sizes`."""
    if not tensor.dim():
        raise ConfigError(f"{name} must have at least one dim to split, got 0")
    num_rows = tensor.shape[0]
    if sizes is None:
        if num_rows % size:
            raise ConfigError(
                f"{name} has {num_rows} rows, which {size} ranks do not divide; give split sizes"
            )
        sizes = [num_rows // size] * size
    if len(sizes) != size or min(sizes) < 0 or sum(sizes) != num_rows:
        raise ConfigError(
            f"the split sizes of {name} must be {size} numbers >= 0 with sum {num_rows}, "
            f"got {list(sizes)}"
        )
    return list(torch.split(tensor.detach(), list(sizes)))

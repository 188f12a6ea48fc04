"""Calls of torch.distributed, each with the tensors that it leaves on this rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

Tensors = dict[str, torch.Tensor]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of a rank that no other rank has."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.randn(shape, generator=generator) * 8).to(dtype)


def all_reduce(rank: int, size: int) -> Tensors:
    found = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int32):
            tensor = values(rank, 3, 5, dtype=dtype)
            dist.all_reduce(tensor, op=op)
            found[f"{op}-{dtype}"] = tensor
    large = values(rank, 300_001)
    dist.all_reduce(large)
    return {**found, "large": large}


def all_reduce_asynchronous(rank: int, size: int) -> Tensors:
    first, second = values(rank, 70_000), values(rank, 4)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    doubled = works[0].get_future().then(lambda future: future.value()[0] * 2)
    works[1].wait()
    return {"second": second, "doubled": doubled.wait(), "first": first}


def broadcast_and_reduce(rank: int, size: int) -> Tensors:
    broadcast, reduced = values(rank, 9), values(rank, 2, 2)
    dist.broadcast(broadcast, src=1)
    dist.reduce(reduced, dst=1)
    return {"broadcast": broadcast} | ({"reduced": reduced} if rank == 1 else {})


def gathers(rank: int, size: int) -> Tensors:
    mine = values(rank, 4, 3)
    parts = [torch.zeros(4, 3) for _ in range(size)]
    dist.all_gather(parts, mine)
    whole = torch.zeros(4 * size, 3)
    dist.all_gather_into_tensor(whole, mine)
    gathered = [torch.zeros(4, 3) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    return {
        "list": torch.stack(parts),
        "tensor": whole,
        **({"gathered": torch.stack(gathered)} if gathered else {}),
    }


def scatters(rank: int, size: int) -> Tensors:
    scattered, reduced, piece = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    parts = [values(rank, 3) + index for index in range(size)]
    dist.scatter(scattered, parts if rank == 1 else None, src=1)
    dist.reduce_scatter(reduced, parts)
    dist.reduce_scatter_tensor(piece, values(rank, 3 * size))
    return {"scattered": scattered, "reduced": reduced, "piece": piece}


def all_to_all(rank: int, size: int) -> Tensors:
    equal, uneven = torch.zeros(2 * size), torch.zeros(size * (rank + 1), 2)
    dist.all_to_all_single(equal, values(rank, 2 * size))
    # Rank r gets r + 1 rows from each.
    dist.all_to_all_single(
        uneven,
        values(rank, sum(range(1, size + 1)), 2),
        output_split_sizes=[rank + 1] * size,
        input_split_sizes=list(range(1, size + 1)),
    )
    # Gloo has no all_to_all of lists: the same from all_to_all_single.
    inputs, outputs = list(values(rank, size, 4)), [torch.zeros(4) for _ in range(size)]
    if dist.get_backend() == "gloo":
        whole = torch.zeros(size, 4)
        dist.all_to_all_single(whole, torch.stack(inputs))
        outputs = list(whole)
    else:
        dist.all_to_all(outputs, inputs)
    return {"equal": equal, "uneven": uneven, "lists": torch.stack(outputs)}


def point_to_point(rank: int, size: int) -> Tensors:
    before, after = (rank - 1) % size, (rank + 1) % size
    sent, got, both = values(rank, 5), torch.zeros(5), torch.zeros(5)
    if rank == 0:
        dist.send(sent, dst=after, tag=3)
        dist.recv(got, src=before, tag=3)
    else:
        dist.recv(got, src=before, tag=3)
        dist.send(sent, dst=after, tag=3)
    calls = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, both, before)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    dist.barrier()
    anyone, sources = torch.zeros(size - 1, 5), []
    if rank == 0:
        sources = [dist.recv(row) for row in anyone]
        # Whoever came first; what counts is that row and source belong together.
        anyone = anyone[torch.tensor(sources).argsort()]
    else:
        dist.send(sent, dst=0)
    dist.barrier()
    told = torch.tensor(sorted(sources))
    return {"got": got, "both": both, "anyone": anyone, "sources": told}


def objects(rank: int, size: int) -> Tensors:
    everywhere: list[object] = [None] * size
    dist.all_gather_object(everywhere, {"rank": rank, "text": "x" * (rank + 1)})
    shared = [{"from": rank}]
    dist.broadcast_object_list(shared, src=1)
    at_root: list[object] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, at_root, dst=0)
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [7, 8] if rank == 0 else None, src=0)
    text = repr((everywhere, shared, at_root, mine))
    return {"text": torch.tensor(list(text.encode()))}


def coalesced(rank: int, size: int) -> Tensors:
    sums = [values(rank, 6), values(rank, 2, 2)]
    with dist._coalescing_manager():
        for tensor in sums:
            dist.all_reduce(tensor)
    wholes = [torch.zeros(2 * size), torch.zeros(3 * size)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(wholes[0], values(rank, 2))
        dist.all_gather_into_tensor(wholes[1], values(rank, 3))
    manager.wait()
    return {"sum": sums[0], "sum 2": sums[1], "whole": wholes[0], "whole 2": wholes[1]}


def functional(rank: int, size: int) -> Tensors:
    world = dist.group.WORLD
    a, b = values(rank, 4), values(rank, 2 * size, 3)
    both = funcol.all_reduce_coalesced([a, b], "sum", world)
    wholes = funcol.all_gather_into_tensor_coalesced([a, b], world)
    pieces = funcol.reduce_scatter_tensor_coalesced([a, b], "sum", [0, 0], world)
    found = {
        "all_reduce": funcol.all_reduce(a, "sum", world),
        "all_gather": funcol.all_gather_tensor(b, 1, world),
        "reduce_scatter": funcol.reduce_scatter_tensor(b, "sum", 0, world),
        "all_to_all": funcol.all_to_all_single(b, None, None, world),
        "broadcast": funcol.broadcast(a, 1, world),
        **{f"both {index}": tensor for index, tensor in enumerate(both)},
        **{f"wholes {index}": tensor for index, tensor in enumerate(wholes)},
        **{f"pieces {index}": tensor for index, tensor in enumerate(pieces)},
    }
    return {name: tensor + 0 for name, tensor in found.items()}


def subgroups(rank: int, size: int) -> Tensors:
    alone = [dist.new_group([member]) for member in range(size)]
    reverse = dist.new_group(list(reversed(range(size))))
    own, common, parts = values(rank, 3), values(rank, 3), [torch.zeros(1) for _ in range(size)]
    dist.all_reduce(own, group=alone[rank])
    dist.all_reduce(common, group=reverse)
    dist.all_gather(parts, torch.tensor([float(rank)]), group=reverse)
    for group in (alone[rank], reverse):
        dist.destroy_process_group(group)
    return {"own": own, "common": common, "order": torch.cat(parts)}


def views(rank: int, size: int) -> Tensors:
    with torch.inference_mode():
        inference = values(rank, 6)
        dist.all_reduce(inference)
        inference = inference.clone()
    scalar, needs_grad = values(rank, 1)[0], values(rank, 5).requires_grad_()
    dist.all_reduce(scalar)
    with torch.no_grad():
        dist.all_reduce(needs_grad)
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    bits = torch.tensor([rank == 0, True, False])
    dist.broadcast(bits, src=0)
    return {
        "inference": inference.clone(),
        "scalar": scalar,
        "grad": needs_grad.detach(),
        "empty": empty,
        "bits": bits,
    }


CASES: dict[str, Callable[[int, int], Tensors]] = {
    case.__name__: case
    for case in (
        all_reduce,
        all_reduce_asynchronous,
        broadcast_and_reduce,
        gathers,
        scatters,
        all_to_all,
        point_to_point,
        objects,
        coalesced,
        functional,
        subgroups,
        views,
    )
}

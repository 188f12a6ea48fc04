"""Dtypes in the collectives of AsyncGroup: known answers, and bits that survive."""

import pytest
import torch

from stagemesh.comm.reduce import ReduceOp
from stagemesh.rpc.codec import DTYPES
from tests.comm.groups import groups, on_ranks
from tests.comm.tables import each_algorithm, each_transport, lists

COMMON_DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@each_algorithm
async def test_bool_stays_bool(sizes):
    first, second = torch.tensor([True, False, True]), torch.tensor([True, False, False])
    async with groups("local", 2, **sizes) as ranks:

        async def run(group):
            mine = (first, second)[group.rank]
            outputs = [torch.zeros(3, dtype=torch.bool) for _ in range(2)]
            return [
                await group.broadcast(mine.clone(), src=0),
                *await group.all_gather(outputs, mine),
                *[
                    await group.all_reduce(mine.clone(), op=op)
                    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN)
                ],
            ]

        results = await on_ranks(ranks, run)
    one, two = first.tolist(), second.tolist()
    for result in results:
        assert lists(result) == [one, one, two, one, one, two]
        assert {tensor.dtype for tensor in result} == {torch.bool}
        assert {byte for t in result for byte in t.view(torch.uint8).tolist()} <= {0, 1}


@each_algorithm
@pytest.mark.parametrize("dtype", COMMON_DTYPES, ids=str)
async def test_each_dtype_works_in_each_operation(dtype, sizes):
    async with groups("local", 2, **sizes) as ranks:

        async def run(group):
            def mine():
                return torch.tensor([group.rank + 1, 10 * (group.rank + 1)], dtype=dtype)

            outputs = [torch.zeros(2, dtype=dtype) for _ in range(2)]
            received = torch.zeros(2, dtype=dtype)
            if group.rank == 0:
                await group.send(mine(), dst=1)
            else:
                await group.recv(received, src=0)
            return [
                received,
                await group.broadcast(mine(), src=0),
                *await group.all_gather(outputs, mine()),
                *[
                    await group.all_reduce(mine(), op=op)
                    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN)
                ],
                await group.reduce_scatter(torch.zeros(2, dtype=dtype), [mine(), mine()]),
            ]

        results = await on_ranks(ranks, run)
    for rank, result in enumerate(results):
        assert {tensor.dtype for tensor in result} == {dtype}
        low, high, total = [1, 10], [2, 20], [3, 30]
        assert lists(result) == [
            low if rank else [0, 0],
            *(low, low, high),
            *(total, high, low),
            total,
        ]


@each_algorithm
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
async def test_each_dtype_of_the_wire_moves_bit_for_bit(dtype, sizes):
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    async with groups("local", 2, **sizes) as ranks:

        async def run(group):
            mine = raw.view(dtype)
            blank = [torch.zeros_like(raw).view(dtype) for _ in range(4)]
            await group.broadcast(mine if group.rank else blank[0], src=1)
            await group.all_gather(blank[1:3], mine)
            strided = torch.zeros_like(raw.repeat(2)).view(dtype).reshape(6, 2)[:, 1]
            await group.scatter(strided, src=0, inputs=[mine, mine] * (1 - group.rank))
            await group.all_to_all_single(blank[3], mine)
            whole = await group.all_gather_variable(mine[: 3 * group.rank])
            if not group.rank:
                await group.send(mine[1:], dst=1)
                received = mine[1:]
            else:
                received = await group.recv_tensor(src=0)
            return [blank[0], *blank[1:3], strided, *whole, received, blank[3]]

        results = await on_ranks(ranks, run)
    for rank, result in enumerate(results):
        assert {tensor.dtype for tensor in result} == {dtype}
        seen = [_bits(tensor) for tensor in result]
        expected = bytes(raw.tolist())
        half = expected[: len(expected) // 2]
        other = expected[len(expected) // 2 :]
        assert seen[0] == (expected if not rank else bytes(len(expected)))
        assert seen[1:4] == [expected] * 3
        assert seen[4:6] == [b"", half]
        assert seen[6] == expected[dtype.itemsize :]
        assert seen[7] == (other if rank else half) * 2


def _bits(tensor):
    # Element by element through a byte view: not each dtype has a copy kernel.
    size = tensor.element_size()
    rows = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start, stride = tensor.storage_offset(), tensor.stride(0) if tensor.dim() else 1
    return b"".join(
        bytes(rows[(start + i * stride) * size : (start + i * stride + 1) * size].tolist())
        for i in range(tensor.numel())
    )


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, torch.complex128])
async def test_the_bits_do_not_depend_on_the_chunks(dtype, op):
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(101, dtype=dtype, generator=generator) for _ in range(3)]
    seen = set()
    for chunk_bytes in (16, 80, 2**20):
        async with groups("local", 3, direct_bytes=0, chunk_bytes=chunk_bytes) as ranks:
            run = [tensor.clone() for tensor in inputs]
            results = await on_ranks(ranks, lambda g, run=run: g.all_reduce(run[g.rank], op=op))
            seen |= {_bits(result) for result in results}
    async with groups("local", 3) as ranks:
        results = await on_ranks(ranks, lambda g: g.all_reduce(inputs[g.rank], op=op))
        seen |= {_bits(result) for result in results}
    assert len(seen) == 1


async def test_bytes_that_pass_255_wrap():
    async with groups("local", 2) as ranks:
        results = await on_ranks(
            ranks, lambda g: g.all_reduce(torch.tensor([(200, 100)[g.rank]], dtype=torch.uint8))
        )
    assert [(r.tolist(), r.dtype) for r in results] == [([44], torch.uint8)] * 2


@each_algorithm
@each_transport
async def test_average_divides_by_the_number_of_ranks(transport, sizes):
    async with groups(transport, 2, **sizes) as ranks:
        results = await on_ranks(
            ranks, lambda g: g.all_reduce(torch.full((5,), 1.0 + 2 * g.rank), op=ReduceOp.AVG)
        )
        assert lists(results) == [[2.0] * 5] * 2
        pieces = await on_ranks(
            ranks,
            lambda g: g.reduce_scatter(
                torch.zeros(5), [torch.full((5,), 1.0 + 2 * g.rank)] * 2, op=ReduceOp.AVG
            ),
        )
        assert lists(pieces) == [[2.0] * 5] * 2
        for run in (
            lambda g: g.all_reduce(torch.tensor([g.rank]), op=ReduceOp.AVG),
            lambda g: g.reduce(torch.tensor([g.rank]), dst=1, op=ReduceOp.AVG),
            lambda g: g.reduce_scatter(torch.tensor([0]), [torch.tensor([1])] * 2, op=ReduceOp.AVG),
        ):
            errors = await on_ranks(ranks, run)
            assert all(isinstance(error, ValueError) for error in errors)
            assert all("avg of int64" in str(error) for error in errors)
        # A refusal is no failure: the group goes on.
        assert lists(await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(1)))) == [[2.0]] * 2


@each_algorithm
@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_wide_elements_behind_the_layout_of_an_all_to_all(size, sizes):
    """The shapes take a number of bytes that need not be a multiple of an element's."""
    async with groups("local", size, **sizes) as ranks:

        async def run(group):
            inputs = [
                torch.full((2,), complex(group.rank, r)).to(torch.complex128) for r in range(size)
            ]
            outputs = [torch.zeros(4, dtype=torch.complex128)[::2] for _ in range(size)]
            return await group.all_to_all(outputs, inputs)

        results = await on_ranks(ranks, run)
    for rank, result in enumerate(results):
        assert lists(result) == [[complex(source, rank)] * 2 for source in range(size)]


async def test_conjugate_and_negative_views_keep_their_values():
    value = torch.tensor([1 + 2j, 3 - 4j])
    async with groups("local", 2) as ranks:

        async def run(group):
            seen = torch.zeros(2, dtype=torch.complex64)
            await group.broadcast(value.conj() if group.rank == 0 else seen, src=0)
            under = torch.zeros(2, dtype=torch.complex64)
            await group.broadcast(value if group.rank == 0 else under.conj(), src=0)
            return seen, under

        _, (seen, under) = await on_ranks(ranks, run)
    assert seen.tolist() == under.tolist() == value.conj().tolist()

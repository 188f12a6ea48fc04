"""The collectives of AsyncGroup on inputs with known answers."""

import time
from itertools import chain

import pytest
import torch

from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import CollectiveMismatch, ConfigError
from tests.comm.groups import groups, on_ranks
from tests.comm.tables import each_algorithm, each_transport, lists


def _columns():
    """Per rank a 3 x 2 tensor; the operations work on its first column, of stride 2."""
    return [torch.arange(6.0).reshape(3, 2) + 10 * rank for rank in range(2)]


@each_algorithm
@each_transport
@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda g, x: g.broadcast(x, src=0), [[0.0, 2.0, 4.0]] * 2),
        (lambda g, x: g.broadcast(x, src=1), [[10.0, 12.0, 14.0]] * 2),
        (lambda g, x: g.all_reduce(x), [[10.0, 14.0, 18.0]] * 2),
        (lambda g, x: g.reduce(x, dst=0), [[10.0, 14.0, 18.0], [10.0, 12.0, 14.0]]),
        (lambda g, x: g.reduce(x, dst=1), [[0.0, 2.0, 4.0], [10.0, 14.0, 18.0]]),
    ],
    ids=["broadcast 0", "broadcast 1", "all_reduce", "reduce 0", "reduce 1"],
)
async def test_a_strided_view_is_read_and_written_by_its_elements(transport, sizes, run, expected):
    bases = _columns()
    async with groups(transport, 2, **sizes) as ranks:
        views = [base[:, 0] for base in bases]
        results = await on_ranks(ranks, lambda g: run(g, views[g.rank]))
    assert all(result is view for result, view in zip(results, views, strict=True))
    assert [base[:, 0].tolist() for base in bases] == expected
    assert [base[:, 1].tolist() for base in bases] == [[1.0, 3.0, 5.0], [11.0, 13.0, 15.0]]


@each_algorithm
@each_transport
async def test_a_list_of_strided_views_is_scattered(transport, sizes):
    inputs = [torch.linspace(0, 5, 6)[::2]] * 2
    # Control: what reading the storage instead of the elements would give.
    assert inputs[0].as_strided((3,), (1,)).tolist() == [0.0, 1.0, 2.0]
    async with groups(transport, 2, **sizes) as ranks:
        results = await on_ranks(
            ranks,
            lambda g: g.scatter(torch.zeros(3), src=0, inputs=None if g.rank else inputs),
        )
    assert lists(results) == [[0.0, 2.0, 4.0]] * 2


@each_algorithm
async def test_every_operation_writes_into_strided_outputs(sizes):
    """Each output is a column; the column beside it keeps its -1."""

    def column(rows):
        return torch.full((rows, 2), -1.0)[:, 0]

    async with groups("local", 3, **sizes) as ranks:

        async def run(group):
            rank = float(group.rank)
            mine = torch.stack([torch.full((2,), rank), torch.full((2,), 99.0)], dim=1)[:, 0]
            outs = {
                "gathered": [column(2) for _ in range(3)],
                "joined": [column(6)],
                "reduced": [column(2)],
                "reduced_from": [column(2)],
                "scattered": [column(2)],
                "exchanged": [column(2) for _ in range(3)],
                "rows": [column(6)],
                "collected": [column(2) for _ in range(3)] if group.rank == 1 else [],
                "received": [column(2)],
            }
            await group.all_gather(outs["gathered"], mine)
            await group.all_gather_tensor(outs["joined"][0], mine)
            await group.reduce_scatter(outs["reduced"][0], [mine, mine + 1, mine + 2])
            await group.reduce_scatter_tensor(
                outs["reduced_from"][0], torch.cat([mine, mine + 1, mine + 2])
            )
            await group.scatter(
                outs["scattered"][0], src=2, inputs=[mine + r for r in range(3)] * (rank == 2)
            )
            await group.all_to_all(outs["exchanged"], [mine + 10 * r for r in range(3)])
            await group.all_to_all_single(
                outs["rows"][0], torch.cat([mine + 10 * r for r in range(3)])
            )
            await group.gather(mine, dst=1, outputs=outs["collected"])
            if group.rank == 0:
                await group.send(mine + 5, dst=1)
            if group.rank == 1:
                await group.recv(outs["received"][0], src=0)
            return outs

        results = await on_ranks(ranks, run)
    for rank, outs in enumerate(results):
        values = {name: lists(tensors) for name, tensors in outs.items()}
        assert values["gathered"] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
        assert values["joined"] == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]]
        assert values["reduced"] == values["reduced_from"] == [[3.0 + 3 * rank] * 2]
        assert values["scattered"] == [[2.0 + rank] * 2]
        assert values["exchanged"] == [[10.0 * rank + source] * 2 for source in range(3)]
        assert values["rows"] == [list(chain(*values["exchanged"]))]
        assert values["collected"] == ([[0.0] * 2, [1.0] * 2, [2.0] * 2] if rank == 1 else [])
        assert values["received"] == [[5.0] * 2 if rank == 1 else [-1.0] * 2]
        for tensor in chain(*outs.values()):
            neighbour = tensor.as_strided(tensor.shape, (2,), 1)
            assert neighbour.eq(-1).all()


@each_algorithm
@pytest.mark.parametrize("shape", [(1, 0, 2), (0,), (3, 0)])
async def test_empty_tensors_stay_empty(shape, sizes):
    async with groups("local", 4, **sizes) as ranks:

        async def run(group):
            def empty():
                return torch.ones(shape)

            outputs = [empty() for _ in range(4)]
            return [
                *await group.all_gather(outputs, empty()),
                await group.all_reduce(empty()),
                await group.broadcast(empty(), src=3),
                await group.reduce(empty(), dst=2),
                await group.reduce_scatter(empty(), [empty() for _ in range(4)]),
                await group.scatter(
                    empty(), src=0, inputs=[empty() for _ in range(4)] * (group.rank == 0)
                ),
                *await group.all_to_all(outputs, [empty() for _ in range(4)]),
                *await group.all_gather_variable(empty()),
            ]

        results = await on_ranks(ranks, run)
    assert [[t.shape for t in result] for result in results] == [[shape] * 17] * 4


@each_algorithm
@each_transport
async def test_variable_gathers_take_any_number_of_rows(transport, sizes):
    async with groups(transport, 3, **sizes) as ranks:
        results = await on_ranks(ranks, lambda g: g.all_gather_variable(torch.arange(g.rank)))
        assert [lists(result) for result in results] == [[[], [0], [0, 1]]] * 3
        assert all(t.dtype == torch.int64 for result in results for t in result)
        results = await on_ranks(
            ranks, lambda g: g.gather_variable(torch.ones(2 - g.rank, 3), dst=2)
        )
        assert results[:2] == [None, None]
        assert [t.shape for t in results[2]] == [(2, 3), (1, 3), (0, 3)]
        # One rank rides in the agreement while another one does not.
        mixed = await on_ranks(
            ranks, lambda g: g.all_gather_variable(torch.full((300 * g.rank,), g.rank))
        )
        for result in mixed:
            assert [t.tolist() for t in result] == [[r] * 300 * r for r in range(3)]


@each_algorithm
async def test_what_a_variable_gather_returns_is_not_the_input(sizes):
    mine = [torch.ones(2) for _ in range(2)]
    async with groups("local", 2, **sizes) as ranks:
        results = await on_ranks(ranks, lambda g: g.all_gather_variable(mine[g.rank]))
    for result in results:
        for tensor in result:
            tensor.fill_(7.0)
    assert lists(mine) == [[1.0, 1.0]] * 2


async def test_rows_on_both_sides_of_the_direct_limit():
    async with groups("local", 3, direct_bytes=100, chunk_bytes=64) as ranks:
        results = await on_ranks(
            ranks, lambda g: g.all_gather_variable(torch.full((20 * g.rank,), float(g.rank)))
        )
    for result in results:
        assert lists(result) == [[], [1.0] * 20, [2.0] * 40]


@pytest.mark.parametrize(
    ("shapes", "dtypes"),
    [
        ([(3, 0), (5, 0)], [torch.float32] * 2),
        ([(3,), (5,)], [torch.float32] * 2),
        ([(2, 3), (3, 2)], [torch.float32] * 2),
        ([(3,), (3,)], [torch.float32, torch.int32]),
    ],
)
async def test_a_same_size_gather_refuses_unequal_shapes_on_every_rank(shapes, dtypes):
    async with groups("local", 2, direct_bytes=8) as ranks:

        async def run(group):
            tensor = torch.zeros(shapes[group.rank], dtype=dtypes[group.rank])
            return await group.all_gather([tensor.clone(), tensor.clone()], tensor)

        for error in await on_ranks(ranks, run):
            assert isinstance(error, CollectiveMismatch)
            for rank in range(2):
                name = str(dtypes[rank]).removeprefix("torch.")
                assert f"rank {rank} called all_gather on {name}{list(shapes[rank])}" in str(error)
        assert lists(await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(1)))) == [[2.0]] * 2


async def test_a_variable_gather_compares_all_but_the_rows():
    async with groups("local", 2) as ranks:
        for tensors in (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            [torch.zeros(2), torch.zeros(2, 1)],
            [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        ):
            errors = await on_ranks(ranks, lambda g, t=tensors: g.all_gather_variable(t[g.rank]))
            assert all(isinstance(error, CollectiveMismatch) for error in errors)
        with pytest.raises(ConfigError, match="0-d"):
            await ranks[0].all_gather_variable(torch.tensor(1.0))
        results = await on_ranks(ranks, lambda g: g.all_gather_variable(torch.ones(g.rank, 2)))
    assert [[t.shape for t in result] for result in results] == [[(0, 2), (1, 2)]] * 2


@each_algorithm
@pytest.mark.parametrize("size", [2, 4])
async def test_reduce_leaves_the_other_ranks_alone(size, sizes):
    async with groups("local", size, **sizes) as ranks:
        results = await on_ranks(ranks, lambda g: g.reduce(torch.ones(2, 2), dst=0))
    assert results[0].tolist() == [[float(size)] * 2] * 2
    assert lists(results[1:]) == [[[1.0] * 2] * 2] * (size - 1)


async def test_a_group_of_one_needs_nobody():
    async with groups("local", 1) as (group,):

        def x():
            return torch.tensor([1.0, 2.0])

        start = time.monotonic()
        results = [
            *[await group.all_reduce(x(), op=op) for op in ReduceOp],
            *await group.all_gather([torch.zeros(2)], x()),
            await group.all_gather_tensor(torch.zeros(2), x()),
            await group.broadcast(x(), src=0),
            *[await group.reduce(x(), dst=0, op=op) for op in ReduceOp],
            await group.scatter(torch.zeros(2), src=0, inputs=[x()]),
            *await group.gather(x(), dst=0),
            await group.reduce_scatter(torch.zeros(2), [x()], op=ReduceOp.AVG),
            await group.reduce_scatter_tensor(torch.zeros(2), x()),
            *await group.all_to_all([torch.zeros(2)], [x()]),
            await group.all_to_all_single(torch.zeros(2), x()),
            *await group.all_gather_variable(x()),
            *await group.gather_variable(x(), dst=0),
        ]
        await group.barrier()
        assert time.monotonic() - start < 0.1 * len(results)
    assert lists(results) == [[1.0, 2.0]] * 21


@each_algorithm
async def test_a_single_number_is_a_tensor_too(sizes):
    async with groups("local", 3, **sizes) as ranks:

        async def run(group):
            number = torch.tensor(float(group.rank + 1))
            outputs = [torch.tensor(0.0) for _ in range(3)]
            await group.all_gather(outputs, number)
            joined = await group.all_gather_tensor(torch.zeros(3), number)
            piece = await group.reduce_scatter_tensor(torch.tensor(0.0), torch.arange(3.0))
            return [
                *outputs,
                joined,
                piece,
                await group.broadcast(number.clone(), src=1),
                await group.all_reduce(number.clone()),
            ]

        results = await on_ranks(ranks, run)
    for rank, result in enumerate(results):
        assert lists(result) == [1.0, 2.0, 3.0, [1.0, 2.0, 3.0], 3.0 * rank, 2.0, 6.0]
        assert [t.shape for t in result] == [(), (), (), (3,), (), (), ()]


@each_algorithm
async def test_an_all_to_all_of_other_sizes_for_each_pair(sizes):
    """Rank q has q + r numbers for rank r."""
    async with groups("local", 3, **sizes) as ranks:

        async def run(group):
            mine = group.rank
            inputs = [torch.full((mine + r,), 10.0 * mine + r) for r in range(3)]
            listed = [torch.zeros(mine + r) for r in range(3)]
            await group.all_to_all(listed, inputs)
            split = [mine + r for r in range(3)]
            single = await group.all_to_all_single(
                torch.zeros(sum(split)),
                torch.cat(inputs),
                output_split_sizes=split,
                input_split_sizes=split,
            )
            return torch.cat(listed), single

        results = await on_ranks(ranks, run)
    for rank, (listed, single) in enumerate(results):
        expected = [10.0 * source + rank for source in range(3) for _ in range(source + rank)]
        assert listed.tolist() == single.tolist() == expected


async def test_an_all_to_all_whose_sides_differ_is_an_error_on_every_rank():
    async with groups("local", 3) as ranks:

        async def run(group):
            inputs = [torch.zeros(2) for _ in range(3)]
            outputs = [torch.zeros(2) for _ in range(3)]
            if group.rank == 1:
                outputs[0] = torch.zeros(3)
            return await group.all_to_all(outputs, inputs)

        errors = await on_ranks(ranks, run)
        assert all(isinstance(error, CollectiveMismatch) for error in errors)
        text = "rank 0 sends float32[2] to rank 1, which expects float32[3]"
        assert all(text in str(error) for error in errors)
        assert len({str(error) for error in errors}) == 1
        await on_ranks(ranks, lambda g: g.barrier())
        assert lists(await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(1)))) == [[3.0]] * 3


@each_algorithm
async def test_an_input_may_be_a_part_of_the_output(sizes):
    """As a gathered parameter is laid out; also where it is another rank's part."""
    async with groups("local", 3, **sizes) as ranks:

        async def run(group):
            own = torch.full((6,), float(group.rank))
            await group.all_gather_tensor(own, own[2 * group.rank : 2 * group.rank + 2])
            other = torch.full((6,), float(group.rank))
            await group.all_gather_tensor(other, other[:2])
            swapped = torch.arange(3.0) + 10 * group.rank
            await group.all_to_all_single(swapped, swapped)
            return [own, other, swapped]

        results = await on_ranks(ranks, run)
    for rank, result in enumerate(results):
        gathered = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert lists(result) == [gathered, gathered, [rank, 10.0 + rank, 20.0 + rank]]


async def test_stacked_and_joined_layouts_of_a_whole_tensor():
    async with groups("local", 2) as ranks:
        for shape in ((4, 3), (2, 2, 3)):
            whole = torch.arange(12.0).reshape(shape)

            async def run(group, whole=whole, shape=shape):
                piece = await group.reduce_scatter_tensor(torch.zeros(2, 3), whole)
                return piece, await group.all_gather_tensor(torch.zeros(shape), piece)

            results = await on_ranks(ranks, run)
            for rank, (piece, gathered) in enumerate(results):
                assert torch.equal(piece, 2 * whole.reshape(2, 2, 3)[rank])
                assert torch.equal(gathered, 2 * whole)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda g: g.broadcast(torch.ones(1), src=2), r"src must be in \[0, 2\), got 2"),
        (lambda g: g.reduce(torch.ones(1), dst=-1), "dst"),
        (lambda g: g.gather(torch.ones(1), dst=5), "dst"),
        (lambda g: g.scatter(torch.ones(1), src=5), "src"),
        (lambda g: g.scatter(torch.ones(1), src=0), "inputs must have one tensor per rank, 2"),
        (lambda g: g.scatter(torch.ones(1), src=1, inputs=[torch.ones(1)] * 2), "rank 1 only"),
        (lambda g: g.gather(torch.ones(1), dst=1, outputs=[torch.ones(1)] * 2), "rank 1 only"),
        (lambda g: g.all_gather([torch.ones(1)], torch.ones(1)), "got 1"),
        (lambda g: g.all_gather([torch.ones(1)] * 2, torch.ones(2)), r"float32\[2\].*float32\[1\]"),
        (lambda g: g.all_gather_tensor(torch.ones(3), torch.ones(2)), r"float32\[4\]"),
        (lambda g: g.all_gather_tensor(torch.ones(4).int(), torch.ones(2)), "int32"),
        (lambda g: g.reduce_scatter_tensor(torch.ones(2), torch.ones(3)), r"input must be"),
        (lambda g: g.reduce_scatter(torch.ones(2), [torch.ones(2)]), "inputs"),
        (lambda g: g.all_to_all([torch.ones(1)] * 2, [torch.ones(1)]), "inputs"),
        (lambda g: g.all_to_all([torch.ones(1)] * 2, [torch.ones(1).int()] * 2), "one dtype"),
        (lambda g: g.all_to_all_single(torch.ones(3), torch.ones(3)), "do not divide"),
        (
            lambda g: g.all_to_all_single(
                torch.ones(3), torch.ones(3), output_split_sizes=[1, 1], input_split_sizes=[1, 2]
            ),
            "split sizes of output",
        ),
        (lambda g: g.all_reduce(torch.ones(1).expand(3)), "share memory"),
        (lambda g: g.recv(torch.ones(1).expand(3), src=1), "share memory"),
        (lambda g: g.broadcast(torch.ones(1).to_sparse(), src=0), "make it dense"),
    ],
)
async def test_a_wrong_argument_is_named_and_counts_as_no_call(run, text):
    async with groups("local", 2) as ranks:
        with pytest.raises(ConfigError, match=text):
            await run(ranks[0])
        # Rank 1 has called nothing, and both are in step.
        assert lists(await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(1)))) == [[2.0]] * 2


async def test_an_expanded_tensor_may_be_sent():
    async with groups("local", 2, direct_bytes=0, chunk_bytes=8) as ranks:

        async def run(group):
            tensor = torch.ones(1).expand(4) if group.rank == 0 else torch.zeros(4)
            await group.broadcast(tensor, src=0)
            return await group.gather(tensor, dst=1)

        results = await on_ranks(ranks, run)
    assert results[0] is None
    assert lists(results[1]) == [[1.0] * 4] * 2

"""All operations, dtypes and layouts against a reference that knows of no ranks, by drawn examples.

The reference works on the bytes of lists of elements; where numbers are reduced it is torch on one
process, in the accumulation type of the documentation.
"""

import asyncio
import math
import random
import warnings
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.reduce import ReduceOp
from stagemesh.rpc.codec import DTYPES

REDUCIBLE = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex32, torch.complex64, torch.complex128),
]
LAYOUTS = ("contiguous", "stepped", "transposed", "offset")
COMBINE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_PAD = 1


@dataclass(frozen=True)
class Setting:
    """A group, and what its tensors look like."""

    size: int
    shape: tuple[int, ...]
    layout: str
    seed: int
    direct_bytes: int
    chunk_bytes: int


settings_of_groups = st.builds(
    Setting,
    size=st.integers(1, 5),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**16),
    direct_bytes=st.sampled_from([0, 24, 2**20]),
    chunk_bytes=st.sampled_from([1, 7, 64, 2**20]),
)


def _laid_out(raw: torch.Tensor, dtype, shape, layout):
    """A tensor with these bytes, and the storage around it, which is all ones."""
    numel, item = math.prod(shape), dtype.itemsize
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    step, start = 1, 0
    if layout == "stepped":
        step, start = 3, 2
    elif layout == "offset":
        start = 5
    elif layout == "transposed":
        strides = [math.prod(shape[:i]) for i in range(len(shape))]
    strides = [max(1, stride) * step for stride in strides]
    storage = torch.full(((start + numel * step + 1) * item,), _PAD, dtype=torch.uint8)
    view = storage.view(dtype).as_strided(shape, strides, start)
    for position, index in enumerate(_places(shape, strides, start)):
        storage[index * item : (index + 1) * item] = raw[position * item : (position + 1) * item]
    return view, storage


def _places(shape, strides, start):
    """Index in the storage of each element, in row-major order."""
    places = [start]
    for dim, stride in zip(shape, strides, strict=True):
        places = [place + stride * i for place in places for i in range(dim)]
    return places


def _elements(view: torch.Tensor) -> bytes:
    item = view.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())
    places = _places(view.shape, view.stride(), view.storage_offset())
    return b"".join(bytes(storage[p * item : (p + 1) * item].tolist()) for p in places)


def _others_are_untouched(view: torch.Tensor, storage: torch.Tensor) -> bool:
    item = view.element_size()
    mask = torch.ones(storage.numel(), dtype=torch.bool)
    for p in _places(view.shape, view.stride(), view.storage_offset()):
        mask[p * item : (p + 1) * item] = False
    return bool((storage[mask] == _PAD).all())


def _raw(generator: torch.Generator, dtype, shape) -> torch.Tensor:
    """Any bits; NaNs of all kinds among them."""
    high = 2 if dtype == torch.bool else 256
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)


def _numbers(generator: torch.Generator, dtype, shape) -> torch.Tensor:
    """Bits of small numbers, so that no sum overflows."""
    count = math.prod(shape)
    if dtype.is_complex:
        part = {4: torch.float16, 8: torch.float32, 16: torch.float64}[dtype.itemsize]
        values = torch.randn(2 * count, generator=generator).to(part)
    elif dtype.is_floating_point:
        values = torch.randn(count, generator=generator).to(dtype)
    else:
        values = torch.randint(0, 5, (count,), generator=generator).to(dtype)
    return values.reshape(-1).view(torch.uint8)


def _run(setting: Setting, run) -> list:
    """What `run(group)` gives on each rank, with seeded interleavings."""

    async def main():
        network = LocalNetwork(size=setting.size, order=random.Random(setting.seed))
        ranks = [
            AsyncGroup(
                network.join(rank),
                group_id="g",
                timeout_seconds=10,
                direct_bytes=setting.direct_bytes,
                chunk_bytes=setting.chunk_bytes,
            )
            for rank in range(setting.size)
        ]
        async with asyncio.timeout(20):
            return await asyncio.gather(*(run(group) for group in ranks))

    return asyncio.run(main())


class Tensors:
    """Drawn tensors of a setting, each written one watched for writes beside its elements."""

    def __init__(self, setting: Setting, dtype) -> None:
        self._setting = setting
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(setting.seed)
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, shape=None, *, numbers=False):
        """A tensor, and its bytes."""
        shape = self._setting.shape if shape is None else shape
        make = _numbers if numbers else _raw
        raw = make(self._generator, self._dtype, shape)
        view, storage = _laid_out(raw, self._dtype, shape, self._setting.layout)
        self._written.append((view, storage))
        return view, bytes(raw.tolist())

    def blank(self, shape=None):
        """A tensor to write into."""
        return self.draw(shape)[0]

    def are_untouched_elsewhere(self) -> bool:
        return all(_others_are_untouched(view, storage) for view, storage in self._written)


@pytest.mark.parametrize("operation", ["broadcast", "all_gather", "gather", "scatter"])
@settings(max_examples=60, deadline=None)
@given(setting=settings_of_groups, dtype=st.sampled_from(list(DTYPES.values())), root=st.integers())
def test_what_only_moves_arrives_bit_for_bit(operation, setting, dtype, root):
    size, root = setting.size, root % setting.size
    tensors = Tensors(setting, dtype)
    mine = [tensors.draw() for _ in range(size)]
    lists = [[tensors.draw() for _ in range(size)] for _ in range(size)]

    async def run(group):
        own = mine[group.rank][0]
        several = [tensor for tensor, _ in lists[group.rank]]
        if operation == "broadcast":
            return [await group.broadcast(own, src=root)]
        if operation == "all_gather":
            return await group.all_gather(several, own)
        if operation == "gather":
            return await group.gather(
                own, dst=root, outputs=several if group.rank == root else None
            )
        return [await group.scatter(own, src=root, inputs=several if group.rank == root else None)]

    results = _run(setting, run)
    everything = [raw for _, raw in mine]
    expected = {
        "broadcast": [[everything[root]]] * size,
        "all_gather": [everything] * size,
        "gather": [everything if rank == root else None for rank in range(size)],
        "scatter": [[raw] for _, raw in lists[root]],
    }[operation]
    seen = [result and [_elements(tensor) for tensor in result] for result in results]
    assert seen == expected
    assert tensors.are_untouched_elsewhere()


@settings(max_examples=80, deadline=None)
@given(setting=settings_of_groups, dtype=st.sampled_from(list(DTYPES.values())), data=st.data())
def test_an_all_to_all_is_a_transposition(setting, dtype, data):
    size, tail = setting.size, setting.shape[1:]
    rows = data.draw(st.lists(st.integers(0, 3), min_size=size**2, max_size=size**2))
    counts = [rows[rank * size : (rank + 1) * size] for rank in range(size)]
    back = [list(column) for column in zip(*counts, strict=True)]
    tensors = Tensors(setting, dtype)
    inputs = [[tensors.draw((n, *tail)) for n in counts[rank]] for rank in range(size)]
    outputs = [[tensors.blank((n, *tail)) for n in back[rank]] for rank in range(size)]
    joined = [tensors.draw((sum(counts[rank]), *tail)) for rank in range(size)]
    rows_out = [tensors.blank((sum(back[rank]), *tail)) for rank in range(size)]

    async def run(group):
        rank = group.rank
        await group.all_to_all(outputs[rank], [tensor for tensor, _ in inputs[rank]])
        await group.all_to_all_single(
            rows_out[rank],
            joined[rank][0],
            output_split_sizes=back[rank],
            input_split_sizes=counts[rank],
        )

    _run(setting, run)
    row_bytes = math.prod(tail) * dtype.itemsize
    pieces = []
    for rank in range(size):
        edges = [sum(counts[rank][:index]) * row_bytes for index in range(size + 1)]
        raw = joined[rank][1]
        pieces.append([raw[start:end] for start, end in pairwise(edges)])
    for rank in range(size):
        assert [_elements(t) for t in outputs[rank]] == [inputs[q][rank][1] for q in range(size)]
        assert _elements(rows_out[rank]) == b"".join(pieces[q][rank] for q in range(size))
    assert tensors.are_untouched_elsewhere()


@settings(max_examples=60, deadline=None)
@given(setting=settings_of_groups, dtype=st.sampled_from(list(DTYPES.values())), data=st.data())
def test_variable_gathers_keep_each_ranks_rows(setting, dtype, data):
    size = setting.size
    rows = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    dst = data.draw(st.integers(0, size - 1))
    tensors = Tensors(setting, dtype)
    mine = [tensors.draw((n, *setting.shape[1:])) for n in rows]

    async def run(group):
        own = mine[group.rank][0]
        return await group.all_gather_variable(own), await group.gather_variable(own, dst=dst)

    results = _run(setting, run)
    expected = [raw for _, raw in mine]
    for rank, (everywhere, on_one) in enumerate(results):
        assert [_elements(tensor) for tensor in everywhere] == expected
        assert [tensor.shape for tensor in everywhere] == [tensor.shape for tensor, _ in mine]
        assert (on_one is None) == (rank != dst)
        assert on_one is None or [_elements(tensor) for tensor in on_one] == expected


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
@settings(max_examples=80, deadline=None)
@given(
    setting=settings_of_groups,
    dtype=st.sampled_from(REDUCIBLE),
    op=st.sampled_from(list(ReduceOp)),
    root=st.integers(),
)
def test_a_reduction_is_the_one_of_a_single_process(operation, setting, dtype, op, root):
    is_ordered = not dtype.is_complex
    assume(is_ordered or op not in (ReduceOp.MIN, ReduceOp.MAX))
    assume(dtype.is_floating_point or dtype.is_complex or op is not ReduceOp.AVG)
    size, root = setting.size, root % setting.size
    tensors = Tensors(setting, dtype)
    mine = [tensors.draw(numbers=True) for _ in range(size)]
    lists = [[tensors.draw(numbers=True) for _ in range(size)] for _ in range(size)]

    async def run(group):
        own = mine[group.rank][0]
        if operation == "all_reduce":
            return await group.all_reduce(own, op=op)
        if operation == "reduce":
            return await group.reduce(own, dst=root, op=op)
        return await group.reduce_scatter(own, [tensor for tensor, _ in lists[group.rank]], op=op)

    results = _run(setting, run)
    before = [raw for _, raw in mine]
    total = _reference(before, dtype=dtype, op=op)
    expected = {
        "all_reduce": [total] * size,
        "reduce": [total if rank == root else before[rank] for rank in range(size)],
        "reduce_scatter": [
            _reference([lists[q][rank][1] for q in range(size)], dtype=dtype, op=op)
            for rank in range(size)
        ],
    }[operation]
    assert [_elements(result) for result in results] == expected
    assert tensors.are_untouched_elsewhere()


def _reference(parts: list[bytes], *, dtype, op: ReduceOp) -> bytes:
    """In the wide type, first to last, rounded once."""
    wide = dtype
    if dtype.is_floating_point and dtype.itemsize < 4:
        wide = torch.float32
    elif dtype == torch.complex32:
        wide = torch.complex64
    elif dtype == torch.bool:
        # "or" is the largest, "and" the smallest of 0 and 1.
        wide = torch.uint8
        op = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}.get(op, op)
    numbers = [torch.tensor(list(part), dtype=torch.uint8).view(dtype).to(wide) for part in parts]
    is_complex_product = dtype.is_complex and op is ReduceOp.PRODUCT
    total = reduce(_complex_product if is_complex_product else COMBINE[op], numbers)
    if op is ReduceOp.AVG and len(parts) > 1:
        is_complex = dtype.is_complex
        total = torch.view_as_real(total) if is_complex else total
        total = total / len(parts)
        total = torch.view_as_complex(total) if is_complex else total
    if dtype == torch.complex32:
        # torch warns whenever it allocates complex32.
        total, dtype = torch.view_as_real(total).reshape(-1), torch.float16
    return bytes(total.to(dtype).view(torch.uint8).tolist())


def _complex_product(left, right):
    """Element by element: torch's own product rounds otherwise at the end of a tensor."""
    products = [
        (
            x.real * y.real - x.imag * y.imag,
            x.real * y.imag + x.imag * y.real,
        )
        for x, y in zip(left, right, strict=True)
    ]
    if not products:
        return left
    return torch.view_as_complex(torch.stack([torch.stack(pair) for pair in products]))


def test_the_reference_notices_a_wrong_order_and_a_narrow_sum():
    """Control: bits as compared above do depend on what the tests are to show."""
    parts = [
        bytes(_numbers(torch.Generator().manual_seed(seed), torch.float32, (50,)).tolist())
        for seed in range(3)
    ]
    forward = _reference(parts, dtype=torch.float32, op=ReduceOp.SUM)
    assert forward != _reference(parts[::-1], dtype=torch.float32, op=ReduceOp.SUM)
    halves = [torch.tensor(list(p), dtype=torch.uint8).view(torch.float16) for p in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        naive = (halves[0] + halves[1]) + halves[2]
    exact = _reference(parts, dtype=torch.float16, op=ReduceOp.SUM)
    assert bytes(naive.view(torch.uint8).tolist()) != exact


def test_the_watch_notices_a_write_beside_the_elements():
    """Control: the layouts leave room around and between the elements."""
    for layout in ("stepped", "offset"):
        raw = torch.zeros(6 * 4, dtype=torch.uint8)
        view, storage = _laid_out(raw, torch.float32, (2, 3), layout)
        assert _elements(view) == bytes(24)
        assert _others_are_untouched(view, storage)
        view.as_strided((1,), (1,), view.storage_offset() - 1).fill_(5.0)
        assert not _others_are_untouched(view, storage)

"""Hand-made tensor messages against a running daemon: refused by name, and the daemon lives on."""

import pickle
import time
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
import torch

from stagemesh.rpc.v1 import comm_pb2, tensor_pb2
from tests.comm.daemons import all_reduce, daemons, join

FLOAT32 = tensor_pb2.DTYPE_FLOAT32
CALL = comm_pb2.CommCall(group_id="g", reduce_op=comm_pb2.REDUCE_OP_SUM)


class TouchesFile:
    """What a pickle of it does when it is loaded shows that somebody loaded it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _message(shape, data, *, dtype=FLOAT32, num_bytes=None, call=CALL) -> comm_pb2.CommTensor:
    num_bytes = len(data) if num_bytes is None else num_bytes
    header = tensor_pb2.TensorHeader(dtype=dtype, shape=shape, num_bytes=num_bytes)
    return comm_pb2.CommTensor(call=call, part=tensor_pb2.TensorPart(header=header, data=data))


async def _refusal(daemon, messages) -> str:
    async def read() -> None:
        async for _ in daemon.stub.AllReduce(iter(messages), timeout=10):
            pass

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return caught.value.details()


HOSTILE = {
    "unknown dtype": ([_message([2, 2], bytes(16), dtype=999)], ["dtype 999"]),
    "no dtype": ([_message([2, 2], bytes(16), dtype=0)], ["dtype 0"]),
    "short": ([_message([4, 4], bytes(60))], ["expected 64", "60"]),
    "odd": ([_message([4, 4], bytes(63))], ["expected 64", "63"]),
    "none": ([_message([4, 4], b"")], ["expected 64", "0"]),
    "long": ([_message([4, 4], bytes(68))], ["expected 64", "68"]),
    "short, lying": ([_message([4, 4], bytes(60), num_bytes=64)], ["expected 64", "got 60"]),
    "long, lying": ([_message([4, 4], bytes(68), num_bytes=64)], ["expected 64", "got 68"]),
    "wraps to 0": ([_message([2**32, 2**32], b"")], ["too large"]),
    "wraps to 16": ([_message([2**62 + 1, 4], bytes(16))], ["too large"]),
    "rank 65": ([_message([1] * 65, bytes(4))], ["65 dims"]),
    "no call": ([comm_pb2.CommTensor()], ["name the call"]),
    "nothing": ([], ["name the call"]),
    "no tensor": ([comm_pb2.CommTensor(call=CALL)], ["without a tensor"]),
    "two tensors": ([_message([1], bytes(4)), _message([1], bytes(4))], ["more data"]),
    "no reduce op": (
        [_message([1], bytes(4), call=comm_pb2.CommCall(group_id="g"))],
        ["reduce op 0"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_tensor_is_refused_and_the_next_one_is_served(name):
    messages, words = HOSTILE[name]
    async with daemons(1) as (daemon,):
        await join([daemon])
        await all_reduce(daemon, torch.ones(2))
        before = psutil.Process().memory_info().rss
        start = time.monotonic()
        text = await _refusal(daemon, messages)
        assert time.monotonic() - start < 0.5
        assert psutil.Process().memory_info().rss - before < 16 * 2**20
        for word in words:
            assert word in text
        assert (await all_reduce(daemon, torch.ones(2))).tolist() == [1.0, 1.0]


async def test_a_pickle_is_bytes_and_nothing_else(tmp_path):
    target = tmp_path / "loaded"
    data = pickle.dumps(TouchesFile(target))
    async with daemons(1) as (daemon,):
        await join([daemon])
        await _refusal(daemon, [_message([4], data)])
        as_numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        echoed = await all_reduce(daemon, as_numbers.clone())
        assert bytes(echoed.tolist()) == data
    assert not target.exists()
    # Control: loading it would have left the file.
    pickle.loads(data)
    assert target.exists()


async def test_a_message_over_the_grpc_limit_names_it():
    async with daemons(1) as (daemon,):
        await join([daemon])
        data = bytes(17 * 2**20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await daemon.stub.Send(iter([_message([len(data) // 4], data)]), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(16 * 2**20) in caught.value.details()
        assert (await all_reduce(daemon, torch.ones(2))).tolist() == [1.0, 1.0]

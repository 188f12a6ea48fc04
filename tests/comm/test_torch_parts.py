"""What the engine over torch.distributed is made of, one by one."""

import pytest
import torch

from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.scratch import Scratch
from stagemesh.comm.torch_calls import (
    BLOCK_BYTES,
    MAX_PAYLOAD_BYTES,
    encode_call,
    read_block,
    write_block,
)
from stagemesh.comm.torch_rounds import joined
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import ConfigError, ProtocolError


def call_on(*shape: int) -> Envelope:
    spec = TensorSpec(dtype=torch.bfloat16, shape=shape)
    return Envelope(
        tag=0,
        operation="reduce[dst=12]",
        sequence=2**40,
        reduce_op=ReduceOp.PRODUCT,
        called_with=spec,
    )


@pytest.mark.parametrize("num_bytes", [0, 1, MAX_PAYLOAD_BYTES])
@pytest.mark.parametrize("num_dims", [0, 2, 64])
def test_a_block_holds_any_call_and_a_payload(num_bytes: int, num_dims: int) -> None:
    call = call_on(*[0, 2**61, *[1] * 62][:num_dims])
    payload = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    write_block(block, encode_call(call), payload if num_bytes else None)
    told = read_block(block)
    assert told.envelope == call
    assert torch.equal(told.payload, payload)


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="so many dims"):
        encode_call(call_on(0, *[2**62] * 200))


@pytest.mark.parametrize("head", [[255, 255, 0, 0], [0, 0, 255, 255], [7, 0, 0, 0]])
def test_a_block_that_nobody_wrote_is_refused(head: list[int]) -> None:
    block = torch.full((BLOCK_BYTES,), 255, dtype=torch.uint8)
    block[:4] = torch.tensor(head, dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        read_block(block)


def test_scratch_is_used_again_and_bounded() -> None:
    scratch = Scratch(device=torch.device("cpu"), kept_bytes=100)
    first, second = scratch.take(60), scratch.take(60)
    assert first.data_ptr() != second.data_ptr()
    scratch.give_back(first)
    assert scratch.take(50).data_ptr() == first.data_ptr()
    for memory in (first, second, scratch.take(30), scratch.take(1000)):
        scratch.give_back(memory)
        assert sum(each.numel() for each in scratch._kept) <= 100


def test_pieces_that_follow_each_other_are_joined_without_a_copy() -> None:
    whole = torch.arange(10, dtype=torch.uint8)
    pieces = [whole[2:5], whole[5:5], whole[5:9]]
    assert joined(pieces).data_ptr() == whole[2:].data_ptr()
    assert joined(pieces).tolist() == [2, 3, 4, 5, 6, 7, 8]
    apart = joined([whole[5:9], whole[2:5]])
    assert apart.tolist() == [5, 6, 7, 8, 2, 3, 4]
    assert joined([whole[:0], whole[:0]]).numel() == 0

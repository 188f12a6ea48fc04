"""Parts of tensors as messages."""

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.checkpoint.weight_part import WeightBlock, WeightPart
from stagemesh.errors import CheckpointError, ProtocolError
from stagemesh.rpc.v1 import weights_pb2


def part_to_proto(part: WeightPart) -> weights_pb2.WeightPart:
    """A part as a message."""
    return weights_pb2.WeightPart(
        row_bytes=part.row_bytes,
        blocks=[
            weights_pb2.WeightBlock(
                first_row=block.first_row,
                end_row=block.end_row,
                first_byte=block.first_byte,
                end_byte=block.end_byte,
            )
            for block in part.blocks
        ],
    )


def part_from_proto(message: weights_pb2.WeightPart, *, info: TensorInfo) -> WeightPart:
    """A part of a tensor from a message.

    Raises:
        ProtocolError: the tensor has no such part.
    """
    blocks = tuple(
        WeightBlock(block.first_row, block.end_row, block.first_byte, block.end_byte)
        for block in message.blocks
    )
    try:
        part = WeightPart(message.row_bytes, blocks)
    except CheckpointError as error:
        raise ProtocolError(f"a part of {info.name}: {error}") from error
    if part.end > info.num_bytes:
        raise ProtocolError(
            f"a part of {info.name} ends at byte {part.end}, the tensor has {info.num_bytes} bytes"
        )
    return part

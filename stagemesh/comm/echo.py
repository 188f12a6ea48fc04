"""Messages that begin as the one that this rank sent last: the usual case of a small collective.

In the agreement of a collective both ranks of a pair send the same call and as many bytes. Up to
its data such a message equals, byte for byte, the one that this rank has sent itself, so it need
not be parsed to be understood, and is known to be of the same call.
"""

from dataclasses import dataclass

import torch

from stagemesh.comm.transport import Envelope


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A small message of plain bytes, as it was sent."""

    head: bytes
    """The frame up to its data."""
    num_bytes: int
    """Of the data."""
    envelope: Envelope

    def data_of(self, message: bytes) -> torch.Tensor | None:
        """The data of a frame with the same head, copied; None if it is another frame.

        Shapes:
            result: [num_bytes], uint8.
        """
        start = len(self.head)
        if len(message) != start + self.num_bytes or not message.startswith(self.head):
            return None
        return torch.frombuffer(bytearray(memoryview(message)[start:]), dtype=torch.uint8)

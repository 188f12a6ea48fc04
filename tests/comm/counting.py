"""A transport that counts what it sends."""

from typing import Any

import torch

from stagemesh.comm.transport import Envelope, Transport


class CountingTransport:
    """Another transport, with the messages and bytes that it sent."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.num_messages = 0
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, peer_rank: int, *, envelope: Envelope, tensor: torch.Tensor) -> None:
        self.num_messages += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        await self._inner.send(peer_rank, envelope=envelope, tensor=tensor)

"""The transport between hosts: a long-lived Exchange stream per peer and direction.

The daemon's comm service hands incoming streams to `serve_peer`; outgoing ones are opened when this
rank first sends to a peer, so ranks that never talk hold no connection.

    rank 0  -- frames -->  serve_peer of rank 1  --> mailbox of rank 1
            <-- credit --                         <-- taken

How often a byte is copied from a contiguous tensor on one rank to the tensor of another:

    1   tensor -> frame                 encode_frame
    2   frame -> slice                  gRPC, which takes no memory of others
    3   slice -> socket                 the kernel
    4   socket -> slices                the kernel
    5   slices -> pieces                gRPC's Python layer
    6   pieces -> message               gRPC's Python layer
    7   message -> received tensor      TensorAssembler or SentMessage
    8   received -> caller's tensor     once the operation has succeeded

decode_frame copies nothing, but of a frame below 32 KiB that is not like the own one: there the
generated parser copies twice more. A unix socket saves none of them. By a profile of an all-reduce
of 64 MB over TCP (2 ranks, CPU time of the loop's thread, the profiler's own cost included) 14 % of
the time pass in gRPC's write, which holds 2, 13 % in its read, which holds 5 and 6, 5 % in 1 and
8 % in 7; gRPC's own threads take a fifth of the process's CPU time. More bandwidth: see
docs/collectives.md.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import torch

from stagemesh.comm.echo import SentMessage
from stagemesh.comm.frames import messages_of
from stagemesh.comm.mailbox import DEFAULT_CAPACITY_BYTES, Mailbox
from stagemesh.comm.peer_link import LinkConfig, PeerAddress, PeerLink, open_link
from stagemesh.comm.tasks import cancel_and_wait, run_together
from stagemesh.comm.transport import Envelope, Message
from stagemesh.errors import (
    CapacityExceeded,
    CommError,
    GroupAborted,
    ProtocolError,
    StagemeshError,
)
from stagemesh.rpc.codec import DEFAULT_CHUNK_BYTES, DEFAULT_MAX_TENSOR_BYTES
from stagemesh.rpc.v1 import comm_pb2

# A message of its own for each credit would cost as much as the message it is for. Credit goes back
# when it is this part of the window, or has waited so long: the sender may need all of it.
_CREDIT_PARTS = 4
_CREDIT_SECONDS = 0.01


class GrpcTransport:
    """One rank's links to the other ranks' daemons."""

    def __init__(
        self,
        rank: int,
        *,
        peers: Sequence[PeerAddress],
        group_id: str,
        incarnation: int,
        token: str | None,
        timeout_seconds: float,
        max_tensor_bytes: int = DEFAULT_MAX_TENSOR_BYTES,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Make a transport without links.

        Args:
            rank: this rank.
            peers: all ranks of the group in rank order, this one included.
            group_id: name of the group.
            incarnation: version of the group.
            token: the cluster's token.
            timeout_seconds: limit of connecting to a peer.
            max_tensor_bytes: larger tensors are neither sent nor accepted.
            capacity_bytes: what one peer may have waiting here; equal on all ranks.
            chunk_bytes: bytes of one frame.
        """
        self._rank = rank
        self._peers = tuple(peers)
        self._max_tensor_bytes = max_tensor_bytes
        self._config = LinkConfig(
            group_id=group_id,
            incarnation=incarnation,
            source_rank=rank,
            token=token,
            capacity_bytes=capacity_bytes,
            chunk_bytes=chunk_bytes,
            connect_seconds=timeout_seconds,
        )
        self._mailbox: Mailbox[Message] = Mailbox(
            incarnation=incarnation, capacity_bytes=capacity_bytes, on_taken=self._on_taken
        )
        self._links: dict[int, PeerLink] = {}
        self._opening: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_closing = False
        self._incoming: set[int] = set()
        self._served: set[int] = set()
        self._credit: Counter[int] = Counter()
        self._late_credit: dict[int, asyncio.TimerHandle] = {}
        self._wake: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._peers)

    @property
    def mailbox(self) -> Mailbox[Message]:
        """Where messages to this rank wait."""
        return self._mailbox

    async def send(self, peer_rank: int, *, envelope: Envelope, tensor: torch.Tensor) -> None:
        """Send a tensor; connects to the peer first, if this is the first one to it.

        Raises:
            CapacityExceeded: the tensor is larger than the limit; nothing was sent.
            PeerLost: the peer cannot be reached, or is gone.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._max_tensor_bytes:
            raise CapacityExceeded(
                f"tensor has {num_bytes} bytes; the limit of the group is {self._max_tensor_bytes}"
            )
        link = self._links.get(peer_rank) or await self._link(peer_rank)
        await link.send(envelope, tensor)

    def can_send_now(self, peer_rank: int, *, num_bytes: int) -> bool:
        """Whether the link is open and idle, and has credit for so many bytes."""
        link = self._links.get(peer_rank)
        return link is not None and link.can_send_now(num_bytes)

    async def notify_abort(self, cause: str) -> None:
        """Tell each peer that can be reached."""

        async def tell(peer: PeerAddress) -> None:
            # A peer that cannot be told finds out by its deadline, or as our stream ends.
            with contextlib.suppress(StagemeshError):
                await (await self._link(peer.rank)).notify_abort(cause)

        await run_together(tell(peer) for peer in self._peers if peer.rank != self._rank)

    async def close(self) -> None:
        """End all links, in both directions."""
        self._is_closing = True
        self._mailbox.abort(f"rank {self._rank} has left the group")
        links, self._links = list(self._links.values()), {}
        await run_together(link.close() for link in links)

    async def serve_peer(
        self, source_rank: int, frames: AsyncIterator[bytes]
    ) -> AsyncGenerator[comm_pb2.ExchangeAck, None]:
        """Accept a peer, take its messages until its stream ends, and give it credit.

        Raises:
            ProtocolError: the peer breaks the contract, or has connected before.
            CapacityExceeded: the peer sends a larger tensor, or more than its credit.
            GroupAborted: the group was aborted, here or by the peer.
        """
        peer = self._peers[source_rank]
        if source_rank in self._served:
            raise ProtocolError(
                f"{peer} has connected to this incarnation before; "
                "a rank that lost its stream must join with a higher one"
            )
        self._served.add(source_rank)
        self._incoming.add(source_rank)
        # One event wakes the loop below: credit to give, the stream's end, or an abort.
        wake = self._wake[source_rank]
        reading = asyncio.ensure_future(self._take(source_rank, frames))
        aborting = asyncio.ensure_future(self._mailbox.aborted.wait())
        for task in (reading, aborting):
            task.add_done_callback(lambda _: wake.set())
        reason = "its stream ended"
        try:
            yield comm_pb2.ExchangeAck(accepted=True)
            while not reading.done():
                await wake.wait()
                wake.clear()
                late = self._late_credit.pop(source_rank, None)
                if late is not None:
                    late.cancel()
                if self._is_closing:
                    return
                self._mailbox.raise_if_aborted()
                credit = self._credit.pop(source_rank, 0)
                if credit:
                    yield comm_pb2.ExchangeAck(credit_bytes=credit)
            reading.result()
        except StagemeshError as error:
            reason = str(error)
            raise
        finally:
            self._incoming.discard(source_rank)
            late = self._late_credit.pop(source_rank, None)
            if late is not None:
                late.cancel()
            self._lose(source_rank, f"{peer} is lost: {reason}")
            await cancel_and_wait([reading, aborting])

    async def _take(self, source_rank: int, frames: AsyncIterator[bytes]) -> None:
        def sent() -> SentMessage | None:
            link = self._links.get(source_rank)
            return None if link is None else link.last_sent

        messages = messages_of(frames, max_bytes=self._max_tensor_bytes, sent=sent)
        try:
            async for envelope, tensor in messages:
                self._mailbox.put(
                    Message(
                        source_rank=source_rank,
                        incarnation=self._config.incarnation,
                        envelope=envelope,
                        tensor=tensor,
                    )
                )
        except GroupAborted as error:
            self._mailbox.abort(f"{self._peers[source_rank]} aborted the group: {error}")
            raise

    def _on_taken(self, source_rank: int, cost: int) -> None:
        self._credit[source_rank] += cost
        if self._credit[source_rank] >= self._config.capacity_bytes // _CREDIT_PARTS:
            self._wake[source_rank].set()
        elif source_rank not in self._late_credit:
            self._late_credit[source_rank] = asyncio.get_running_loop().call_later(
                _CREDIT_SECONDS, self._wake[source_rank].set
            )

    async def _link(self, peer_rank: int) -> PeerLink:
        async with self._opening[peer_rank]:
            if peer_rank not in self._links:
                self._links[peer_rank] = await open_link(
                    self._peers[peer_rank],
                    config=self._config,
                    on_broken=lambda error: self._on_broken(peer_rank, error),
                )
            return self._links[peer_rank]

    def _on_broken(self, peer_rank: int, error: CommError) -> None:
        if isinstance(error, GroupAborted):
            self._mailbox.abort(f"{self._peers[peer_rank]} aborted the group: {error}")
        # While the peer's own stream is open, what it sent is still on its way: that stream's end
        # is what tells that nothing more comes.
        if peer_rank not in self._incoming:
            self._lose(peer_rank, str(error))

    def _lose(self, peer_rank: int, reason: str) -> None:
        self._mailbox.fail_source(peer_rank, reason, node_id=self._peers[peer_rank].node_id)

"""Has nodes measured: the links among those that are new, and everything when someone asks.

Probes of pairs that share a node, or a machine, never run at once: they would share what each is to
have alone. For the same reason links of a machine wait while one of its nodes measures itself.
"""

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc.aio

from coordinator.load_order import group_member
from coordinator.measurements import Measurements
from coordinator.membership import NodeInfo
from coordinator.planner.profiles import LinkProfile
from coordinator.profile_messages import link_profile, measured_node
from stagemesh.errors import ProtocolError, StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.probe import probe_link
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import profile_pb2, profile_pb2_grpc

logger = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 30.0
_CACHED_SECONDS = 600.0
_NODE_SECONDS = 20.0
"""How long links of a machine wait for the profile of a node on it, from when it came."""

Pair = tuple[NodeInfo | None, NodeInfo]


class Measurer:
    """Asks nodes to measure and keeps what they find.

    Args:
        measurements: where results go.
        nodes: the nodes that can be asked, now.
        token: the cluster's token.
        on_change: called after new results.
    """

    def __init__(
        self,
        measurements: Measurements,
        *,
        nodes: Callable[[], Sequence[NodeInfo]],
        token: str | None,
        on_change: Callable[[], None],
    ) -> None:
        self._measurements = measurements
        self._nodes = nodes
        self._token = token
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._failed_at: dict[tuple[str, str], float] = {}
        self._seen_at: dict[str, float] = {}

    def notify(self) -> None:
        """Nodes or profiles have changed: links may be missing."""
        self._wake.set()

    def pending(self) -> str:
        """Profiles and links that are still to come, for a person; empty when all are there."""
        parts = [node.node_id for node in self._unmeasured()]
        if links := len(self._missing()):
            parts.append(f"{links} link{'s' * (links > 1)}")
        return ", ".join(parts)

    async def run(self) -> None:
        """Measure missing links whenever there are any, until cancelled."""
        while True:
            self._wake.clear()
            async with self._lock:
                await self._probe_missing(max_age_seconds=_CACHED_SECONDS)
            # Without nodes that measure themselves there is no deadline: only a change of the
            # nodes, which notifies, makes links missing.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds_to_wait()):
                    await self._wake.wait()

    async def measure_again(self, node_ids: Sequence[str], *, timeout_seconds: float) -> None:
        """Measure nodes and their links anew; what does not work keeps its old figures.

        Args:
            node_ids: all nodes when empty.
            timeout_seconds: for all of it; what is not done by then keeps its old figures.
        """
        nodes = [n for n in self._nodes() if not node_ids or n.node_id in node_ids]
        try:
            async with asyncio.timeout(timeout_seconds), self._lock:
                await asyncio.gather(
                    *(self._measure(node, timeout_seconds=0.6 * timeout_seconds) for node in nodes)
                )
                self._measurements.forget_links(nodes)
                self._failed_at.clear()
                await self._probe_missing(max_age_seconds=0.0)
        except TimeoutError:
            logger.warning("measuring was not through after %.0f s", timeout_seconds)

    async def _measure(self, node: NodeInfo, *, timeout_seconds: float) -> None:
        request = profile_pb2.MeasureRequest(
            version=our_version(), timeout_seconds=max(0.1, timeout_seconds - 0.5)
        )
        channel = open_channel(node.address, token=self._token, kind="control")
        try:
            profile = await _stub(channel).Measure(request, timeout=timeout_seconds)
            self._measurements.put_node(
                node.node_id, start_id=node.start_id, measured=measured_node(profile)
            )
            self._on_change()
        except grpc.aio.AioRpcError as error:
            reason = from_rpc_error(error, operation="measure", peer=f"node {node.node_id}")
            logger.warning("not measured: %s", reason, extra={"peer": node.node_id})
        except ProtocolError as error:
            logger.warning("not measured: %s", error, extra={"peer": node.node_id})
        finally:
            await channel.close()

    def _is_measured(self, node: NodeInfo) -> bool:
        return self._measurements.node(node) is not None

    def _missing(self) -> list[Pair]:
        """Links to measure; one that failed is left alone for a while."""
        measured = [n for n in self._nodes() if self._is_measured(n)]
        busy = {_place(node) for node in self._seconds_left()}
        now = time.monotonic()
        return [
            pair
            for pair in self._measurements.missing_links(measured)
            if now - self._failed_at.get(_key(pair), -_RETRY_SECONDS) >= _RETRY_SECONDS
            and not busy & _places(pair)
        ]

    def _unmeasured(self) -> list[NodeInfo]:
        """Nodes whose profiles are still to come."""
        return [n for n in self._nodes() if n.will_measure and not self._is_measured(n)]

    def _seconds_left(self) -> dict[NodeInfo, float]:
        """How long the links of their machines still wait for nodes that measure themselves."""
        nodes, now = self._unmeasured(), time.monotonic()
        self._seen_at = {n.start_id: self._seen_at.get(n.start_id, now) for n in nodes}
        left = {n: self._seen_at[n.start_id] + _NODE_SECONDS - now for n in nodes}
        return {node: seconds for node, seconds in left.items() if seconds > 0}

    def _seconds_to_wait(self) -> float | None:
        """Until links are missing though nothing changes; None when that cannot be."""
        return min(self._seconds_left().values(), default=None)

    async def _probe_missing(self, *, max_age_seconds: float) -> None:
        while missing := self._missing():
            round_of_pairs = disjoint(missing)
            await asyncio.gather(
                *(self._probe(pair, max_age_seconds=max_age_seconds) for pair in round_of_pairs)
            )
            self._on_change()

    async def _probe(self, pair: Pair, *, max_age_seconds: float) -> None:
        source, target = pair
        try:
            if source is None:
                link = await self._probe_from_here(target)
            else:
                link = await self._probe_from(source, target, max_age_seconds=max_age_seconds)
        except StagemeshError as error:
            logger.warning("link not measured: %s", error, extra={"peer": target.node_id})
            self._failed_at[_key(pair)] = time.monotonic()
            return
        if source is not None:
            link = await self._with_sums(source, target, link)
        self._measurements.put_link(source, target, link)

    async def _probe_from_here(self, target: NodeInfo) -> LinkProfile:
        found = await probe_link(
            target.address,
            node_id=target.node_id,
            token=self._token,
            timeout_seconds=_PROBE_SECONDS,
        )
        return LinkProfile(
            latency_seconds=found.latency_seconds, bytes_per_second=found.bytes_per_second
        )

    async def _probe_from(
        self, source: NodeInfo, target: NodeInfo, *, max_age_seconds: float
    ) -> LinkProfile:
        request = profile_pb2.ProbePeersRequest(
            version=our_version(),
            peers=[profile_pb2.ProbePeer(node_id=target.node_id, address=target.address)],
            timeout_seconds=_PROBE_SECONDS,
            max_age_seconds=max_age_seconds,
        )
        channel = open_channel(source.address, token=self._token, kind="control")
        try:
            reply = await _stub(channel).ProbePeers(request, timeout=2 * _PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(
                error, operation=f"probe {target.node_id}", peer=f"node {source.node_id}"
            ) from error
        finally:
            await channel.close()
        if len(reply.links) != 1 or reply.links[0].error:
            raise ProtocolError(
                f"node {source.node_id} could not probe node {target.node_id}: "
                + (reply.links[0].error if reply.links else "no answer")
            )
        return link_profile(reply.links[0])

    async def _with_sums(
        self, source: NodeInfo, target: NodeInfo, link: LinkProfile
    ) -> LinkProfile:
        """The link, with what sums take over it; without where the two cannot add up."""
        nodes = (source, target)
        request = profile_pb2.ProbeSumsRequest(
            version=our_version(),
            group_id=uuid.uuid4().hex,
            members=[group_member(node) for node in nodes],
            timeout_seconds=_PROBE_SECONDS,
        )
        replies: list[profile_pb2.ProbeSumsReply] = []
        try:
            async with asyncio.TaskGroup() as group:
                told = [
                    group.create_task(self._add_up(node, request, rank=rank))
                    for rank, node in enumerate(nodes)
                ]
            replies = [task.result() for task in told]
        except* StagemeshError as errors:
            logger.warning("sums not measured: %s", errors.exceptions[0])
        if not replies:
            return link
        return replace(
            link,
            sum_seconds=max(reply.sum_seconds for reply in replies),
            sum_bytes_per_second=min(reply.bytes_per_second for reply in replies),
            sum_slowdown=max(reply.slowdown for reply in replies),
        )

    async def _add_up(
        self, node: NodeInfo, request: profile_pb2.ProbeSumsRequest, *, rank: int
    ) -> profile_pb2.ProbeSumsReply:
        """What one of two ranks measures."""
        own = profile_pb2.ProbeSumsRequest()
        own.CopyFrom(request)
        own.rank = rank
        channel = open_channel(node.address, token=self._token, kind="control")
        try:
            reply = await _stub(channel).ProbeSums(own, timeout=2 * _PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(
                error, operation="probe sums", peer=f"node {node.node_id}"
            ) from error
        finally:
            await channel.close()
        is_finite = 0 < reply.sum_seconds < math.inf and 1 <= reply.slowdown < math.inf
        if not (is_finite and reply.bytes_per_second > 0):
            raise ProtocolError(f"node {node.node_id} measured sums that are none: {reply}")
        return reply


def disjoint(pairs: Sequence[Pair]) -> list[Pair]:
    """As many of the pairs, first come, as have no node and no machine in common."""
    taken: set[str] = set()
    chosen = []
    for source, target in pairs:
        names = _places((source, target))
        if not names & taken:
            taken |= names
            chosen.append((source, target))
    return chosen


def _place(node: NodeInfo) -> str:
    """Where it computes."""
    return f"machine {node.machine_id}" if node.machine_id else f"node {node.node_id}"


def _places(pair: Pair) -> set[str]:
    source, target = pair
    return {_place(target), "" if source is None else _place(source)}


def _key(pair: Pair) -> tuple[str, str]:
    source, target = pair
    return ("" if source is None else source.start_id, target.start_id)


def _stub(channel: grpc.aio.Channel) -> "profile_pb2_grpc.ProfileServiceAsyncStub":
    # Not called "async": protobuf's stub is typed for both, the channel decides.
    stub: profile_pb2_grpc.ProfileServiceAsyncStub = profile_pb2_grpc.ProfileServiceStub(channel)
    return stub

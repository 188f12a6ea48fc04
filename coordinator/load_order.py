"""What a node is told to load, and what it tells of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.membership import NodeInfo
from stagemesh.layout import StageAssignment
from stagemesh.rpc.convert import our_version, tensor_shares_to_proto
from stagemesh.rpc.v1 import comm_pb2, node_pb2, weights_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What a node shall load."""

    deployment_id: str
    incarnation: int
    model_name: str
    model_path: str
    model_reference: str
    fingerprint: str
    num_stages: int
    dtype: str
    max_context_tokens: int
    tensor_backend: str = "grpc"
    """What carries the tensors of ranks that share a stage."""
    group_seconds: float = 60.0
    """How long such a rank waits for the others within a step."""
    quantize: str = "none"
    compile: bool = False
    weight_peers: tuple[tuple[str, str], ...] = ()
    """(id, address) of nodes that may have weights in their caches, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """How far a node without files is with fetching the weights of its stage, in bytes."""

    total_bytes: int
    """Of the stage; 0 while its tensors are still hashed."""
    present_bytes: int
    """In the node's cache."""
    hashed_bytes: int
    """Hashed by this coordinator since its start."""
    received: Mapping[str, int]
    """What came over the network, by who sent it."""

    @property
    def text(self) -> str:
        """Where the weights come from, for a person."""
        if not self.total_bytes:
            return "hashing weights"
        return f"weights from {', '.join(self.received) or 'its cache'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a node is."""

    loaded_bytes: int
    total_bytes: int
    is_ready: bool = False
    load_seconds: float = 0.0
    weight_bytes: int = 0
    fetch: FetchState | None = None
    """Where the node has no files of the model."""

    @property
    def is_fetching(self) -> bool:
        """Whether weights are still on their way to the node's disk."""
        fetch = self.fetch
        return fetch is not None and not self.loaded_bytes


class LoadClock:
    """When a stage's load last moved on, on any of its ranks: who is through waits for the rest."""

    def __init__(self) -> None:
        self._moved_at = time.monotonic()

    def move(self) -> None:
        """A byte was loaded."""
        self._moved_at = time.monotonic()

    def left(self, stall_seconds: float) -> float:
        """Seconds until the load has stood still for so long; 0 when it has."""
        return max(0.0, stall_seconds - (time.monotonic() - self._moved_at))


def fetch_state(message: node_pb2.LoadStageProgress) -> FetchState | None:
    """How far a node is with fetching weights; None for one that has files."""
    if not message.HasField("fetch"):
        return None
    fetch = message.fetch
    return FetchState(
        total_bytes=fetch.total_bytes,
        present_bytes=fetch.present_bytes,
        hashed_bytes=fetch.hashed_bytes,
        received={origin.source: origin.num_bytes for origin in fetch.origins},
    )


def load_request(
    order: LoadOrder, assignment: StageAssignment, rank: int, members: Sequence[NodeInfo]
) -> node_pb2.LoadStageRequest:
    """The message to one rank of a stage.

    Args:
        order: what all stages load.
        assignment: the stage.
        rank: which of its ranks.
        members: the nodes of its ranks.
    """
    request = node_pb2.LoadStageRequest(
        version=our_version(),
        deployment_id=order.deployment_id,
        incarnation=order.incarnation,
        model=node_pb2.ModelSource(
            name=order.model_name,
            path=order.model_path,
            reference=order.model_reference,
            fingerprint=order.fingerprint,
            weight_peers=[
                weights_pb2.WeightPeer(node_id=node_id, address=address)
                for node_id, address in order.weight_peers
            ],
        ),
        stage=assignment.stage,
        num_stages=order.num_stages,
        start_layer=assignment.start_layer,
        end_layer=assignment.end_layer,
        dtype=order.dtype,
        kv_cache_bytes=assignment.ranks[rank].kv_cache_bytes,
        max_context_tokens=order.max_context_tokens,
        quantize=order.quantize,
        compile=order.compile,
    )
    if assignment.shares is not None:
        request.tensor_rank = rank
        request.tensor_backend = order.tensor_backend
        request.tensor_shares.CopyFrom(tensor_shares_to_proto(assignment.shares))
        request.tensor_group.CopyFrom(
            node_pb2.TensorGroup(
                group_id=f"{order.deployment_id}/stage-{assignment.stage}",
                incarnation=order.incarnation,
                members=[group_member(node) for node in members],
                timeout_seconds=order.group_seconds,
            )
        )
    return request


def group_member(node: NodeInfo) -> comm_pb2.GroupMember:
    """A node as a rank of a group."""
    return comm_pb2.GroupMember(
        node_id=node.node_id,
        address=node.address,
        unix_path=node.unix_path,
        host_id=node.host_id,
    )

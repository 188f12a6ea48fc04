"""What was measured of the nodes and of the links between them; kept by start of a daemon. Pure.

A measurement belongs to one start of a node: what comes back after a restart is measured anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from coordinator.like_nodes import level_like_nodes
from coordinator.membership import NodeInfo
from coordinator.planner.profiles import COORDINATOR, ClusterProfile, LinkProfile, NodeProfile

UNKNOWN_LINK = LinkProfile(latency_seconds=5e-4, bytes_per_second=1e8)
"""Where not a single link was measured: about a gigabit network."""

SERVING_BYTES = 48 * 2**20
"""What serving adds to a process beside the model: headers, connections, and blocks that the
allocator keeps. By `python -m benchmarks.prediction --part memory`."""

MAX_PEERS = 8
"""A node is probed by so many of those that joined after it; further links count as the median of
the known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNode:
    """What a node measured of itself."""

    stream_bytes_per_second: Mapping[str, float]
    """Weights that a matrix-vector product reads, by dtype."""
    flops_per_second: Mapping[str, float]
    """Of a matrix product with many rows, by dtype."""
    layer_overhead_seconds: float
    """Added per layer and step."""
    step_overhead_seconds: float
    """Added per stage and step."""
    memory_total_bytes: int
    """Of the device."""
    memory_free_bytes: int
    """When it was measured."""
    memory_limit_bytes: int
    """What a container allows; 0 for no limit."""
    process_bytes: int
    """The process without a stage."""
    measure_seconds: float
    """How long measuring took."""
    measured_at: float
    """Seconds since 1970, by the node's clock."""


def planner_node(info: NodeInfo, measured: MeasuredNode) -> NodeProfile:
    """The node as the planner takes it.

    What a node offers is for weights, KV cache and activations; its process comes on top of that,
    in the limit as in what is taken.
    """
    process_bytes = measured.process_bytes + SERVING_BYTES
    return NodeProfile(
        node_id=info.node_id,
        memory_bytes=info.memory_bytes + process_bytes,
        process_overhead_bytes=process_bytes,
        stream_bytes_per_second=measured.stream_bytes_per_second,
        flops_per_second=measured.flops_per_second,
        layer_overhead_seconds=measured.layer_overhead_seconds,
        step_overhead_seconds=measured.step_overhead_seconds,
        num_threads=info.num_threads,
        device=info.device,
        machine_id=info.machine_id,
        num_cores=info.num_cores,
    )


def slowest_of(nodes: Sequence[MeasuredNode]) -> MeasuredNode:
    """What to expect of a node that is not measured yet: the worst of the others in each figure."""
    dtypes = set.intersection(*(set(node.stream_bytes_per_second) for node in nodes))
    return MeasuredNode(
        stream_bytes_per_second={
            d: min(n.stream_bytes_per_second[d] for n in nodes) for d in dtypes
        },
        flops_per_second={d: min(n.flops_per_second.get(d, 0.0) for n in nodes) for d in dtypes},
        layer_overhead_seconds=max(n.layer_overhead_seconds for n in nodes),
        step_overhead_seconds=max(n.step_overhead_seconds for n in nodes),
        memory_total_bytes=0,
        memory_free_bytes=0,
        memory_limit_bytes=0,
        process_bytes=max(n.process_bytes for n in nodes),
        measure_seconds=0.0,
        measured_at=0.0,
    )


class Measurements:
    """Profiles of nodes and links."""

    def __init__(self) -> None:
        self._nodes: dict[str, tuple[str, MeasuredNode]] = {}
        self._links: dict[tuple[str, str], tuple[tuple[str, str], LinkProfile]] = {}

    def put_node(self, node_id: str, *, start_id: str, measured: MeasuredNode) -> bool:
        """Remember a node's profile; returns whether it is news."""
        if self._nodes.get(node_id) == (start_id, measured):
            return False
        self._nodes[node_id] = (start_id, measured)
        return True

    def put_link(self, source: NodeInfo | None, target: NodeInfo, link: LinkProfile) -> None:
        """Remember a link; None is the coordinator."""
        key = (_name(source), target.node_id)
        self._links[key] = (_starts(source, target), link)

    def node(self, info: NodeInfo) -> MeasuredNode | None:
        """The profile of this start of a node."""
        start_id, measured = self._nodes.get(info.node_id, ("", None))
        return measured if start_id == info.start_id else None

    def link(self, source: NodeInfo | None, target: NodeInfo) -> LinkProfile | None:
        """The link between these starts of two nodes, measured from either end."""
        for a, b in ((source, target), (target, source)):
            if b is None:
                continue
            starts, link = self._links.get((_name(a), b.node_id), (("", ""), None))
            if link is not None and starts == _starts(a, b):
                return link
        return None

    def missing_links(self, nodes: Sequence[NodeInfo]) -> list[tuple[NodeInfo | None, NodeInfo]]:
        """Links that are worth measuring and are not known: the coordinator's, then neighbours'."""
        wanted: list[tuple[NodeInfo | None, NodeInfo]] = [(None, node) for node in nodes]
        wanted += [
            (source, target)
            for i, source in enumerate(nodes)
            for target in nodes[i + 1 : i + 1 + MAX_PEERS]
        ]
        return [(source, target) for source, target in wanted if self.link(source, target) is None]

    def forget_links(self, nodes: Iterable[NodeInfo]) -> None:
        """Drop all links of some nodes, so that they count as missing."""
        names = {node.node_id for node in nodes}
        for key in [key for key in self._links if names & set(key)]:
            del self._links[key]

    def cluster_profile(self, nodes: Sequence[NodeInfo]) -> ClusterProfile | None:
        """The cluster as the planner takes it; None when no node was measured.

        A node that was not measured counts as slow as the slowest of the others.
        """
        known = [self.node(info) for info in nodes]
        measured = [each for each in known if each is not None]
        if not measured:
            return None
        guess = slowest_of(measured)
        links: dict[tuple[str, str], LinkProfile] = {}
        sources: tuple[NodeInfo | None, ...] = (None, *nodes)
        for i, source in enumerate(sources):
            for target in nodes[i:]:
                link = self.link(source, target)
                if link is not None:
                    links[_name(source), target.node_id] = link
        return ClusterProfile(
            nodes=level_like_nodes(
                [planner_node(info, each or guess) for info, each in zip(nodes, known, strict=True)]
            ),
            links=links,
            default_link=typical_link(links.values()),
        )


def typical_link(links: Iterable[LinkProfile]) -> LinkProfile:
    """What to expect of a link that was not measured: the median of those that were."""
    known = list(links)
    if not known:
        return UNKNOWN_LINK
    return LinkProfile(
        latency_seconds=median(link.latency_seconds for link in known),
        bytes_per_second=median(link.bytes_per_second for link in known),
        sum_seconds=_median(link.sum_seconds for link in known),
        sum_bytes_per_second=_median(link.sum_bytes_per_second for link in known),
        sum_slowdown=_median(link.sum_slowdown for link in known),
    )


def _median(figures: Iterable[float | None]) -> float | None:
    """Of those that were measured; None of none."""
    known = [figure for figure in figures if figure is not None]
    return median(known) if known else None


def _name(node: NodeInfo | None) -> str:
    return COORDINATOR if node is None else node.node_id


def _starts(source: NodeInfo | None, target: NodeInfo) -> tuple[str, str]:
    return ("" if source is None else source.start_id, target.start_id)

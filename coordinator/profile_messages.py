"""Measured nodes and links as messages, and back."""

from collections.abc import Sequence

from coordinator.like_nodes import level_like_nodes
from coordinator.measurements import MeasuredNode, planner_node, slowest_of, typical_link
from coordinator.membership import NodeInfo
from coordinator.planner.profiles import ClusterProfile, LinkProfile
from stagemesh.errors import ConfigError, ProtocolError
from stagemesh.rpc.v1 import coordinator_pb2, node_pb2, profile_pb2


def node_info(node: node_pb2.NodeDescription, *, software: str = "") -> NodeInfo:
    """Who a node is."""
    return NodeInfo(
        node_id=node.node_id,
        address=node.address,
        device=node.device,
        num_threads=node.num_threads,
        memory_bytes=node.memory_bytes,
        memory_total_bytes=node.memory_total_bytes,
        hostname=node.hostname,
        platform=node.platform,
        start_id=node.start_id,
        software=software,
        will_measure=node.will_measure,
        unix_path=node.unix_path,
        host_id=node.host_id,
        machine_id=node.machine_id,
        num_cores=node.num_cores,
    )


def measured_node(profile: profile_pb2.NodeProfile) -> MeasuredNode:
    """A node's profile.

    Raises:
        ProtocolError: a figure is not finite or negative.
    """
    measured = MeasuredNode(
        stream_bytes_per_second={r.dtype: r.stream_bytes_per_second for r in profile.rates},
        flops_per_second={r.dtype: r.flops_per_second for r in profile.rates},
        layer_overhead_seconds=profile.layer_overhead_seconds,
        step_overhead_seconds=profile.step_overhead_seconds,
        memory_total_bytes=profile.memory_total_bytes,
        memory_free_bytes=profile.memory_free_bytes,
        memory_limit_bytes=profile.memory_limit_bytes,
        process_bytes=profile.process_bytes,
        measure_seconds=profile.measure_seconds,
        measured_at=profile.measured_at,
    )
    figures = (
        *measured.stream_bytes_per_second.values(),
        *measured.flops_per_second.values(),
        measured.layer_overhead_seconds,
        measured.step_overhead_seconds,
    )
    if any(not 0 <= figure < float("inf") for figure in figures):
        raise ProtocolError(f"a node's profile has figures that are no measurements: {figures}")
    return measured


def node_profile(measured: MeasuredNode) -> profile_pb2.NodeProfile:
    """A node's profile as a message."""
    return profile_pb2.NodeProfile(
        rates=[
            profile_pb2.DtypeRates(
                dtype=dtype,
                stream_bytes_per_second=rate,
                flops_per_second=measured.flops_per_second[dtype],
            )
            for dtype, rate in measured.stream_bytes_per_second.items()
        ],
        layer_overhead_seconds=measured.layer_overhead_seconds,
        step_overhead_seconds=measured.step_overhead_seconds,
        memory_total_bytes=measured.memory_total_bytes,
        memory_free_bytes=measured.memory_free_bytes,
        memory_limit_bytes=measured.memory_limit_bytes,
        process_bytes=measured.process_bytes,
        measure_seconds=measured.measure_seconds,
        measured_at=measured.measured_at,
    )


def link_profile(link: profile_pb2.LinkProfile) -> LinkProfile:
    """A link.

    Raises:
        ProtocolError: a figure is not finite or negative.
    """
    try:
        return LinkProfile(
            latency_seconds=link.latency_seconds,
            bytes_per_second=link.bytes_per_second,
            sum_seconds=link.sum_seconds or None,
            sum_bytes_per_second=link.sum_bytes_per_second or None,
            sum_slowdown=link.sum_slowdown or None,
        )
    except ConfigError as error:
        raise ProtocolError(f"the link to {link.node_id}: {error}") from error


def cluster_link(source: str, target: str, link: LinkProfile) -> coordinator_pb2.ClusterLink:
    """A link as the cluster's status has it."""
    return coordinator_pb2.ClusterLink(
        source=source,
        link=profile_pb2.LinkProfile(
            node_id=target,
            latency_seconds=link.latency_seconds,
            bytes_per_second=link.bytes_per_second,
            sum_seconds=link.sum_seconds or 0.0,
            sum_bytes_per_second=link.sum_bytes_per_second or 0.0,
            sum_slowdown=link.sum_slowdown or 0.0,
        ),
    )


def cluster_profile(
    nodes: Sequence[node_pb2.NodeStatus], links: Sequence[coordinator_pb2.ClusterLink]
) -> ClusterProfile | None:
    """A running cluster as its status shows it; None when no node was measured.

    As in a coordinator, a node that was not measured counts as slow as the slowest of the others.
    """
    measured = {
        status.description.node_id: measured_node(status.profile)
        for status in nodes
        if status.HasField("profile")
    }
    if not measured:
        return None
    guess = slowest_of(list(measured.values()))
    known = {(each.source, each.link.node_id): link_profile(each.link) for each in links}
    infos = [node_info(status.description) for status in nodes]
    return ClusterProfile(
        nodes=level_like_nodes(
            [planner_node(info, measured.get(info.node_id, guess)) for info in infos]
        ),
        links=known,
        default_link=typical_link(known.values()),
    )

"""What was measured of nodes and links, as tables."""

from rich.table import Table

from coordinator.commands.titled_table import titled_table
from coordinator.commands.units import gib
from stagemesh.rpc.v1 import coordinator_pb2

_MAX_LINKS_SHOWN = 64


def measured_tables(status: coordinator_pb2.ClusterStatus) -> list[Table]:
    """Tables of the nodes' speed and memory and of links, where there are any; 80 columns wide."""
    tables = []
    if any(node.status.HasField("profile") for node in status.nodes):
        tables += [_speed_table(status), _memory_table(status)]
    if status.links:
        tables.append(_link_table(status))
    return tables


def _speed_table(status: coordinator_pb2.ClusterStatus) -> Table:
    table = titled_table(
        "measured", "node", "dtype", "weights read", "products", "per layer", "per step"
    )
    for node in status.nodes:
        profile = node.status.profile
        for index, rates in enumerate(profile.rates):
            common = (
                f"{1e6 * profile.layer_overhead_seconds:.0f} us",
                f"{1e6 * profile.step_overhead_seconds:.0f} us",
            )
            table.add_row(
                node.status.description.node_id if index == 0 else "",
                rates.dtype,
                f"{rates.stream_bytes_per_second / 1e9:.1f} GB/s",
                f"{rates.flops_per_second / 1e9:.0f} GFLOP/s",
                *(common if index == 0 else ()),
            )
    return table


def _memory_table(status: coordinator_pb2.ClusterStatus) -> Table:
    table = titled_table("memory", "node", "all", "free", "limit", "process", "measured in")
    for node in status.nodes:
        profile = node.status.profile
        if node.status.HasField("profile"):
            table.add_row(
                node.status.description.node_id,
                gib(profile.memory_total_bytes),
                gib(profile.memory_free_bytes),
                gib(profile.memory_limit_bytes) if profile.memory_limit_bytes else "none",
                gib(profile.process_bytes),
                f"{profile.measure_seconds:.1f} s",
            )
    return table


def _link_table(status: coordinator_pb2.ClusterStatus) -> Table:
    table = titled_table("links", "from", "to", "one way", "rate", "sum of ranks", "at once")
    shown: set[frozenset[str]] = set()
    for each in status.links:
        ends = frozenset((each.source, each.link.node_id))
        if ends in shown or len(shown) >= _MAX_LINKS_SHOWN:
            continue  # measured from one end, it counts for both
        shown.add(ends)
        table.add_row(
            each.source,
            each.link.node_id,
            f"{1e6 * each.link.latency_seconds:.0f} us",
            f"{each.link.bytes_per_second / 1e6:.0f} MB/s",
            f"{1e6 * each.link.sum_seconds:.0f} us" if each.link.sum_seconds else "",
            f"{each.link.sum_slowdown:.2f} x" if each.link.sum_slowdown else "",
        )
    return table

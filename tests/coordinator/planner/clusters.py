"""Synthetic clusters of the size of real ones, for models on paper."""

import random

from coordinator.planner.profiles import ClusterProfile, LinkProfile, NodeProfile

GIB = 2**30


def paper_cluster(
    num_nodes: int,
    *,
    seed: int,
    memory_gib: tuple[float, float] = (32, 160),
    num_kinds: int | None = None,
    num_racks: int = 1,
    dtypes: tuple[str, ...] = ("bfloat16",),
) -> ClusterProfile:
    """Nodes of 100 GB/s to 3 TB/s; of a few kinds if asked; racks are nearer within."""
    rng = random.Random(seed)
    nodes = []
    for i in range(num_nodes):
        own = random.Random(f"{seed} {rng.randrange(num_kinds)}") if num_kinds else rng
        stream = own.uniform(100e9, 3000e9)
        nodes.append(
            NodeProfile(
                node_id=f"n{i}",
                memory_bytes=int(own.uniform(*memory_gib) * GIB),
                process_overhead_bytes=GIB // 2,
                stream_bytes_per_second=dict.fromkeys(dtypes, stream),
                flops_per_second=dict.fromkeys(dtypes, 150 * stream),
                layer_overhead_seconds=own.uniform(1e-5, 1e-4),
                step_overhead_seconds=own.uniform(1e-4, 1e-3),
            )
        )
    far = LinkProfile(latency_seconds=2e-4, bytes_per_second=1e9)
    near = LinkProfile(latency_seconds=2e-5, bytes_per_second=1e10)
    links = {}
    if num_racks > 1:
        links = {
            (a.node_id, b.node_id): near
            for i, a in enumerate(nodes)
            for j, b in enumerate(nodes)
            if i != j and i % num_racks == j % num_racks
        }
    return ClusterProfile(nodes=tuple(nodes), links=links, default_link=far)

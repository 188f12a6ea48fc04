"""The documented formulas once more, number by number, and every plan there is: the references.

Written without the planner's code on purpose: no prefix sums, no arrays, no searches.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product
from math import ceil, inf

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import PlacementPlan
from coordinator.planner.profiles import (
    ClusterProfile,
    Constraints,
    LinkProfile,
    NodeProfile,
    Workload,
)

DTYPE = "float32"

# A stage: its layers and, by rank, (node, KV groups, MLP columns). A replica: stages and streams.
Stage = tuple[int, int, tuple[tuple[NodeProfile, int, int], ...]]
Replica = tuple[tuple[Stage, ...], int]


def stage_memory(model: ModelCost, stage: Stage, rank: int, work: Workload, streams: int) -> int:
    start, end, ranks = stage
    node, groups, columns = ranks[rank]
    attention = sum(model.attention_bytes[i] for i in range(start, end))
    mlp = sum(model.mlp_bytes[i] for i in range(start, end))
    rest = sum(model.layer_bytes[i] for i in range(start, end)) - attention - mlp
    is_first, is_last = start == 0, end == model.num_layers
    ends = model.embedding_bytes if is_first else 0
    if is_last:
        rest += model.norm_bytes
        ends += 0 if model.tied and is_first else model.head_bytes
    kv = (end - start) * model.kv_bytes_per_token_layer * work.max_context_tokens * streams
    tokens = min(work.max_step_tokens, work.max_context_tokens * work.concurrency)
    heads = 4 * (model.num_heads + 2 * model.kv_groups) * model.head_dim
    row = 6 * model.hidden_size + ceil_div(heads * groups, model.kv_groups) + 4 * columns
    total = rest + ceil_div(attention * groups, model.kv_groups)
    total += ceil_div(mlp * columns, model.mlp_columns) + ceil_div(ends, len(ranks))
    total += ceil_div(kv * groups, model.kv_groups) + node.process_overhead_bytes
    total += tokens * row * 4 + (4 * model.vocab_size * streams if is_last else 0)
    return total


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def stage_time(
    model: ModelCost, stage: Stage, cluster: ClusterProfile, work: Workload, rows: int
) -> float:
    start, end, ranks = stage
    layers, count = range(start, end), end - start
    context = (work.prompt_tokens + work.max_context_tokens) / 2
    is_last = end == model.num_layers
    whole = sum(
        model.layer_bytes[i] - model.mlp_bytes[i] - model.attention_bytes[i] for i in layers
    )
    whole += model.norm_bytes if is_last else 0
    attention = sum(model.attention_bytes[i] for i in layers)
    attention += count * model.kv_bytes_per_token_layer * context * rows
    scores = 4 * model.num_heads * model.head_dim * context
    attention_flops = rows * sum(2 * model.attention_bytes[i] / 4 + scores for i in layers)
    mlp = sum(model.mlp_bytes[i] for i in layers)
    mlp_flops = rows * 2 * mlp / 4
    head = model.head_bytes if is_last else 0

    names = [n.node_id for n, _, _ in ranks]
    links = [cluster.link(a, b) for a in names for b in names if a != b]
    slowdown = max((link.sum_slowdown or 1.0 for link in links), default=1.0)

    def seconds(node: NodeProfile, num_bytes: float, flops: float) -> float:
        return max(
            num_bytes / (node.stream_bytes_per_second[DTYPE] / slowdown),
            flops / node.flops_per_second[DTYPE],
        )

    total = max(n.step_overhead_seconds for n, _, _ in ranks)
    total += count * max(n.layer_overhead_seconds for n, _, _ in ranks)
    total += max(
        seconds(n, whole + attention * g / model.kv_groups, attention_flops * g / model.kv_groups)
        for n, g, _ in ranks
    )
    total += max(
        seconds(n, mlp * c / model.mlp_columns, mlp_flops * c / model.mlp_columns)
        for n, _, c in ranks
    )
    size = len(ranks)
    total += max(seconds(n, head / size, rows * head / 2 / size) for n, _, _ in ranks)
    if size > 1:
        seconds_of = [(link.sum_seconds, link.sum_bytes_per_second) for link in links]
        pairs = zip(seconds_of, links, strict=True)
        told = [(s or link.latency_seconds, r or link.bytes_per_second) for (s, r), link in pairs]
        latency, rate = max(s for s, _ in told), min(r for _, r in told)
        exchanges = 2 * count + (start == 0) + is_last
        others = (size - 1) * rows * model.hidden_size * 4
        if size == 2 or others <= 256 * 1024:
            total += exchanges * (latency + others / rate)
        else:
            total += exchanges * 2 * (latency + others / size / rate)
    return total


def replica_value(
    model: ModelCost, replica: Replica, cluster: ClusterProfile, work: Workload
) -> float:
    """Seconds per token of one stream, or of all of the replica's streams together."""
    stages, streams = replica
    rows, steps = 1, 1
    if work.objective == "throughput":
        rows = ceil(streams / len(stages))
        steps = ceil(streams / rows)
    times = [stage_time(model, stage, cluster, work, rows) for stage in stages]
    names = [[n.node_id for n, _, _ in ranks] for _, _, ranks in stages]
    way = max(cluster.link("coordinator", name).latency_seconds for name in names[0])
    way += cluster.link(names[-1][0], "coordinator").latency_seconds
    busiest = max(times)
    for a, b in pairwise(names):
        links = [cluster.link(a[0], name) for name in b]
        occupied = sum(rows * model.hidden_size * 4 / link.bytes_per_second for link in links)
        way += occupied + max(link.latency_seconds for link in links)
        busiest = max(busiest, occupied)
    if work.objective == "latency":
        return sum(times) + way
    return max(sum(times) + way, steps * busiest) / streams


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cut in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cut, total)))


def ordered_groups(
    nodes: Sequence[NodeProfile], most_ranks: int
) -> Iterator[tuple[tuple[NodeProfile, ...], ...]]:
    """All sequences of disjoint groups of nodes."""
    for size in range(1, min(most_ranks, len(nodes)) + 1):
        for group in combinations(nodes, size):
            rest = [node for node in nodes if node not in group]
            yield (group,)
            for others in ordered_groups(rest, most_ranks):
                yield (group, *others)


def best_replica(
    model: ModelCost,
    cluster: ClusterProfile,
    nodes: Sequence[NodeProfile],
    work: Workload,
    streams: int,
    constraints: Constraints,
) -> float:
    """The least value of all plans of one replica; infinite when nothing fits."""
    best = inf
    stage_values: dict[object, bool] = {}
    for groups in ordered_groups(nodes, constraints.max_tp_degree):
        count = len(groups)
        if count > model.num_layers or not allows_count(constraints, count):
            continue
        names = [node.node_id for group in groups for node in group]
        if constraints.is_order_fixed and names != [
            n.node_id for n in cluster.nodes if n.node_id in names
        ]:
            continue
        choices = []
        for group in groups:
            if len(group) > min(model.kv_groups, model.mlp_columns):
                break
            shares = product(
                compositions(model.kv_groups, len(group)),
                compositions(model.mlp_columns, len(group)),
            )
            choices.append([tuple(zip(group, g, c, strict=True)) for g, c in shares])
        else:
            for cut in combinations(range(1, model.num_layers), count - 1):
                spans = list(pairwise((0, *cut, model.num_layers)))
                if not allows_spans(constraints, groups, spans):
                    continue
                for ranks in product(*choices):
                    stages = tuple((a, b, r) for (a, b), r in zip(spans, ranks, strict=True))
                    if all(fits(model, s, work, streams, stage_values) for s in stages):
                        value = replica_value(model, (stages, streams), cluster, work)
                        best = min(best, value)
    return best


def allows_count(constraints: Constraints, count: int) -> bool:
    exactly, most = constraints.num_stages, constraints.max_stages
    return (exactly is None or count == exactly) and (most is None or count <= most)


def allows_spans(
    constraints: Constraints,
    groups: Sequence[Sequence[NodeProfile]],
    spans: Sequence[tuple[int, int]],
) -> bool:
    where = {n.node_id: span for group, span in zip(groups, spans, strict=True) for n in group}
    return all(where.get(name) == span for name, span in constraints.pinned.items())


def fits(
    model: ModelCost, stage: Stage, work: Workload, streams: int, known: dict[object, bool]
) -> bool:
    start, end, ranks = stage
    key = (start, end, streams, tuple((n.node_id, g, c) for n, g, c in ranks))
    if key not in known:
        known[key] = all(
            stage_memory(model, stage, r, work, streams) <= ranks[r][0].memory_bytes
            for r in range(len(ranks))
        )
    return known[key]


def best_value(
    model: ModelCost, cluster: ClusterProfile, work: Workload, constraints: Constraints
) -> float:
    """The least objective value of all plans with up to the allowed number of replicas."""
    nodes = [n for n in cluster.nodes if n.node_id not in constraints.excluded]
    best = best_replica(model, cluster, nodes, work, work.concurrency, constraints)
    most = min(constraints.max_replicas, len(nodes), work.concurrency)
    memory: dict[object, float] = {}
    for count in range(2, most + 1):
        each, more = divmod(work.concurrency, count)
        streams = [each + 1] * more + [each] * (count - more)
        for hands in product(range(count + 1), repeat=len(nodes)):
            values = []
            for replica in range(count):
                hand = [n for n, h in zip(nodes, hands, strict=True) if h == replica]
                key = (tuple(n.node_id for n in hand), streams[replica])
                if key not in memory:
                    memory[key] = best_replica(model, cluster, hand, work, key[1], constraints)
                values.append(memory[key])
            if work.objective == "latency":
                best = min(best, max(values))
            elif max(values) < inf:
                best = min(best, 1 / sum(1 / v for v in values))
    return best


def plan_value(
    plan: PlacementPlan, model: ModelCost, cluster: ClusterProfile, work: Workload
) -> float:
    """The objective value of a plan."""
    by_id = {node.node_id: node for node in cluster.nodes}
    values = []
    for replica in plan.replicas:
        stages = tuple(
            (
                s.start_layer,
                s.end_layer,
                tuple((by_id[r.node_id], r.kv_groups, r.mlp_columns) for r in s.ranks),
            )
            for s in replica.stages
        )
        values.append(replica_value(model, (stages, replica.concurrency), cluster, work))
    return max(values) if work.objective == "latency" else 1 / sum(1 / v for v in values)


def random_model(rng: random.Random, *, num_layers: int, columns: int = 4) -> ModelCost:
    """A small model whose layers differ in half of the cases."""
    attention = [rng.randint(2, 9) * 1000] * num_layers
    mlp = [rng.randint(2, 20) * 1000] * num_layers
    if rng.random() < 0.5:
        attention = [rng.randint(2, 9) * 1000 for _ in range(num_layers)]
        mlp = [rng.randint(2, 20) * 1000 for _ in range(num_layers)]
    table = rng.randint(1, 30) * 1000
    return ModelCost(
        num_layers=num_layers,
        layer_bytes=tuple(a + m + 100 for a, m in zip(attention, mlp, strict=True)),
        embedding_bytes=table,
        head_bytes=table,
        norm_bytes=100,
        tied=rng.random() < 0.3,
        kv_bytes_per_token_layer=rng.choice([8, 64]),
        dtype=DTYPE,
        attention_bytes=tuple(attention),
        mlp_bytes=tuple(mlp),
        hidden_size=rng.choice([4, 41]),
        num_heads=6,
        kv_groups=rng.choice([2, 3]),
        head_dim=1,
        mlp_columns=columns,
        vocab_size=50,
    )


def random_cluster(rng: random.Random, *, num_nodes: int, total_bytes: int) -> ClusterProfile:
    """Unlike nodes that hold between a third and twice the model, some links measured."""
    nodes = []
    for i in range(num_nodes):
        stream = rng.uniform(1, 10) * 1e6
        nodes.append(
            NodeProfile(
                node_id=f"n{i}",
                memory_bytes=int(total_bytes * rng.uniform(0.3, 2.0)),
                process_overhead_bytes=rng.choice([0, 500]),
                stream_bytes_per_second={DTYPE: stream},
                flops_per_second={DTYPE: stream * rng.uniform(0.5, 20)},
                layer_overhead_seconds=rng.uniform(0, 2e-3),
                step_overhead_seconds=rng.uniform(0, 5e-3),
            )
        )
    names = [node.node_id for node in nodes] + ["coordinator"]
    sums = random.Random(total_bytes)
    links = {
        (a, b): LinkProfile(
            latency_seconds=rng.uniform(0, 5e-3),
            bytes_per_second=rng.uniform(1e5, 1e7),
            sum_seconds=sums.choice([None, sums.uniform(1e-5, 5e-3)]),
            sum_bytes_per_second=sums.choice([None, sums.uniform(1e5, 1e7)]),
            sum_slowdown=sums.choice([None, sums.uniform(1, 2)]),
        )
        for a, b in permutations(names, 2)
        if rng.random() < 0.3
    }
    default = LinkProfile(latency_seconds=rng.uniform(0, 2e-3), bytes_per_second=1e6)
    return ClusterProfile(nodes=tuple(nodes), links=links, default_link=default)

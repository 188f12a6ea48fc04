"""How fast a plan should be.

With the stage and hop times of `step_times`, for a replica of p stages that serves c streams:

    time per token       one stream: all stages and hops, and the way through the coordinator
    tokens per second    the scheduler puts up to b = ceil(c / p) streams into a step, so that
                         m = ceil(c / b) steps are in flight; each stream yields a token per cycle,
                             cycle = max(one step's way through all stages and hops,
                                         m * the slowest stage or the most occupied link)
                         the first term when there are too few streams to fill the pipeline, the
                         second when its bottleneck is always busy (the two asymptotic bounds of
                         operational analysis, Denning and Buzen 1978)
    time to first token  a prompt of k chunks: one chunk's way through all stages and hops, and
                         k - 1 times the slowest of them (chunks follow each other)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import PlacementPlan, Prediction, ReplicaPlan, StagePlan
from coordinator.planner.profiles import ClusterProfile, NodeProfile, Workload
from coordinator.planner.spans import ModelSpans
from coordinator.planner.step_times import (
    Hop,
    StepShape,
    attention_seconds,
    attention_shares,
    common_seconds,
    decode_shape,
    entry_seconds,
    exit_seconds,
    hop,
    message_bytes,
    mlp_seconds,
    prefill_shape,
    stage_work,
    together,
    worst_link,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTimes:
    """A step's way through a replica."""

    stages: tuple[float, ...]
    """Seconds on each stage."""
    hops: tuple[Hop, ...]
    """Into the second stage, the third, ..."""
    entry: float
    """From the coordinator."""
    exit: float
    """Back to it."""

    @property
    def total(self) -> float:
        """One step that nothing delays."""
        return sum(self.stages) + sum(h.seconds for h in self.hops) + self.entry + self.exit

    @property
    def bottleneck(self) -> float:
        """What a step occupies the busiest stage or link for."""
        return max(*self.stages, *(h.occupied_seconds for h in self.hops), 0.0)


class TimeModel:
    """Predicts replicas of one model on one cluster."""

    def __init__(self, model: ModelCost, *, cluster: ClusterProfile, workload: Workload) -> None:
        self._model = model
        self._cluster = cluster
        self._workload = workload
        self._spans = ModelSpans(model)
        self._nodes: dict[str, NodeProfile] = {node.node_id: node for node in cluster.nodes}

    def step_times(self, replica: ReplicaPlan, shape: StepShape) -> ReplicaTimes:
        """One step's way."""
        cluster, stages = self._cluster, replica.stages
        size = message_bytes(self._model, rows=shape.rows)
        return ReplicaTimes(
            stages=tuple(self._stage(stage, shape) for stage in stages),
            hops=tuple(
                hop(cluster, a.node_ids[0], b.node_ids, num_bytes=size) for a, b in pairwise(stages)
            ),
            entry=entry_seconds(cluster, stages[0].node_ids),
            exit=exit_seconds(cluster, stages[-1].node_ids[0]),
        )

    def decode_times(self, replica: ReplicaPlan, *, rows: int) -> ReplicaTimes:
        """A decode step of so many streams."""
        return self.step_times(replica, decode_shape(self._workload, rows=rows))

    def cycle_seconds(self, replica: ReplicaPlan) -> float:
        """Seconds in which each stream of a busy replica yields a token."""
        rows, steps = step_sizes(replica.concurrency, num_stages=replica.num_stages)
        times = self.decode_times(replica, rows=rows)
        return max(times.total, steps * times.bottleneck)

    def first_token_seconds(self, replica: ReplicaPlan) -> float:
        """Of a typical prompt that is alone."""
        times = self.step_times(replica, prefill_shape(self._workload))
        chunks = -(-self._workload.prompt_tokens // self._workload.max_step_tokens)
        return times.total + (chunks - 1) * times.bottleneck

    def _stage(self, stage: StagePlan, shape: StepShape) -> float:
        model, ranks, dtype = self._model, stage.ranks, self._model.dtype
        work = stage_work(model, self._spans.one(stage.start_layer, stage.end_layer), shape)
        link = worst_link(self._cluster, stage.node_ids)
        nodes = together([self._nodes[rank.node_id] for rank in ranks], link)
        attention = attention_shares(
            model, [rank.kv_groups for rank in ranks], [rank.query_heads for rank in ranks]
        )
        mlp = [np.array([rank.mlp_columns / model.mlp_columns]) for rank in ranks]
        seconds = (
            common_seconds(work, nodes, dtype=dtype, rank_link=link)
            + attention_seconds(work, nodes, attention, dtype=dtype)
            + mlp_seconds(work, nodes, mlp, dtype=dtype)
        )
        return float(seconds[0])


def step_sizes(streams: int, *, num_stages: int) -> tuple[int, int]:
    """Streams in a step and steps in flight, as the scheduler makes them."""
    rows = -(-streams // num_stages)
    return rows, -(-streams // rows)


def predict(
    plan: PlacementPlan, *, model: ModelCost, cluster: ClusterProfile, workload: Workload
) -> Prediction:
    """How fast a plan should be, and what limits it."""
    timer = TimeModel(model, cluster=cluster, workload=workload)
    singles = [timer.decode_times(replica, rows=1) for replica in plan.replicas]
    sizes = [step_sizes(r.concurrency, num_stages=r.num_stages) for r in plan.replicas]
    cycles = [timer.cycle_seconds(replica) for replica in plan.replicas]
    slowest = max(range(len(singles)), key=lambda i: singles[i].total)
    shown = slowest if workload.objective == "latency" else cycles.index(max(cycles))
    replica = plan.replicas[shown]
    if workload.objective == "latency":
        times, steps = singles[shown], 1
    else:
        times = timer.decode_times(replica, rows=sizes[shown][0])
        steps = sizes[shown][1]
    stage, link = _slowest_stage(replica, times), _slowest_link(replica, times)
    is_full = steps * times.bottleneck >= times.total
    is_stage = (
        times.bottleneck in times.stages if is_full else max(times.stages) >= max(_ways(times))
    )
    return Prediction(
        time_per_token_seconds=singles[slowest].total,
        tokens_per_second=sum(
            r.concurrency / cycle for r, cycle in zip(plan.replicas, cycles, strict=True)
        ),
        time_to_first_token_seconds=max(timer.first_token_seconds(r) for r in plan.replicas),
        stage_seconds=tuple(t.stages for t in singles),
        link_seconds=tuple(_ways(t) for t in singles),
        micro_steps=tuple(steps for _, steps in sizes),
        limiting=stage if is_stage else link,
        limiting_stage=stage,
        limiting_link=link,
    )


def objective_value(
    replicas: Sequence[ReplicaPlan], *, timer: TimeModel, workload: Workload
) -> float:
    """What the planner minimises: seconds per token of the slowest stream, or of all together."""
    if workload.objective == "latency":
        return max(timer.decode_times(replica, rows=1).total for replica in replicas)
    return 1.0 / sum(r.concurrency / timer.cycle_seconds(r) for r in replicas)


def _ways(times: ReplicaTimes) -> tuple[float, ...]:
    return (times.entry, *(h.seconds for h in times.hops), times.exit)


def _slowest_stage(replica: ReplicaPlan, times: ReplicaTimes) -> str:
    index = times.stages.index(max(times.stages))
    return f"stage {index} on {'+'.join(replica.stages[index].node_ids)}"


def _slowest_link(replica: ReplicaPlan, times: ReplicaTimes) -> str:
    names = ["coordinator", *(stage.node_ids[0] for stage in replica.stages), "coordinator"]
    ways = _ways(times)
    index = ways.index(max(ways))
    return f"link {names[index]} -> {names[index + 1]}"

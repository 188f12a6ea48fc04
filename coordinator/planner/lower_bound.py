"""What no plan can beat: bounds from relaxed problems, whatever found the plan.

Relaxed is: a node may be any stage, its layers need not follow each other, and every hop is the
best there is. Let w be the bytes that a step reads of the layers' weights and keys, W their sum,
and q_u = seconds per byte of node u, overheads per layer included. Tensor-parallel ranks read at
most as fast as all of them together.

    latency     Without TP a node takes at most the bytes that its memory holds, and costs its step
                overhead and a hop before the first one. Spreading that over all it can hold is
                the linear relaxation of a fixed charge; filling up from the cheapest per byte
                solves it.
                With TP up to degree R the k fastest stages together read at most as fast as the
                k * R fastest nodes, so the k-th one at most at a k-th of that; a stage of r ranks
                also exchanges twice a layer.
    throughput  For b streams per step and m steps in flight the cycle is at least the latency bound
                at b, and at least m * t for the least t in which the nodes read W bytes. R replicas
                yield together at most concurrency / the latency bound, and at most b tokens for
                each W bytes that all nodes read.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.chain import StageCounts
from coordinator.planner.profiles import (
    ClusterProfile,
    Constraints,
    LinkProfile,
    NodeProfile,
    Workload,
)
from coordinator.planner.spans import Floats, expert_share
from coordinator.planner.step_ranges import StepRange, step_ranges
from coordinator.planner.step_times import (
    StepShape,
    all_reduce_seconds,
    decode_shape,
    message_bytes,
)


class LowerBound:
    """Bounds for one model on some nodes.

    Args:
        model: the model.
        cluster: nodes that may take part, at least one.
        workload: what is asked.
        constraints: degrees that are allowed.
    """

    def __init__(
        self,
        model: ModelCost,
        *,
        cluster: ClusterProfile,
        workload: Workload,
        constraints: Constraints,
    ) -> None:
        self._model = model
        self._workload = workload
        self._constraints = constraints
        self._nodes: Sequence[NodeProfile] = cluster.nodes
        links = [cluster.default_link, *cluster.links.values()]
        self._latency = min(link.latency_seconds for link in links)
        self._byte_seconds = min(1.0 / link.bytes_per_second for link in links)
        self._best_sums = LinkProfile(
            latency_seconds=min(link.sum_latency for link in links),
            bytes_per_second=max(link.sum_rate for link in links),
        )

    def value(self, *, allowed: StageCounts) -> float:
        """The least objective value that is thinkable."""
        workload = self._workload
        if workload.objective == "latency":
            return self.step_seconds(decode_shape(workload, rows=1))
        replicas = range(2, min(self._constraints.max_replicas, len(self._nodes)) + 1)
        cycles = [self._cycle(allowed), *(self._shared_cycle(r, allowed) for r in replicas)]
        return min(cycles) / workload.concurrency

    def step_seconds(self, shape: StepShape) -> float:
        """The least time of a step through all layers."""
        reads, per_byte = self._reads(shape), self._byte_rates(shape)
        total = float(reads.sum())
        hop = self._latency + message_bytes(self._model, rows=shape.rows) * self._byte_seconds
        ends = 2 * self._latency + self._head_seconds(shape)
        steps = np.array([node.step_overhead_seconds for node in self._nodes])
        if self._constraints.max_tp_degree > 1:
            shared = self._shared_seconds(reads, per_byte, shape)
            return ends + float(steps.min()) + shared
        caps = self._most_bytes(reads)
        usable = caps > 0
        if caps.sum() < total:
            return float("inf")
        rates = per_byte[usable] + (steps[usable] + hop) / caps[usable]
        order = np.argsort(rates)
        left, seconds = total, 0.0
        for rate, cap in zip(rates[order], caps[usable][order], strict=True):
            taken = min(left, float(cap))
            seconds += taken * float(rate)
            left -= taken
            if left <= 0:
                break
        # The first stage has no hop before it.
        return ends + max(0.0, seconds - hop)

    def _shared_seconds(self, reads: Floats, per_byte: Floats, shape: StepShape) -> float:
        """The least time to read all layers on stages of up to R ranks."""
        most = min(self._constraints.max_tp_degree, len(self._nodes))
        sums = np.cumsum(np.sort(1.0 / per_byte)[::-1])
        caps = np.cumsum(np.sort(self._most_bytes(reads))[::-1])
        size, layer = message_bytes(self._model, rows=shape.rows), float(reads.max())
        exchange = [0.0] + [
            2 * all_reduce_seconds(self._best_sums, size, num_ranks=r) / layer
            for r in range(2, most + 1)
        ]
        left, seconds, number = float(reads.sum()), 0.0, 1
        while left > 0:
            joint = float(sums[min(number * most, len(sums)) - 1]) / number
            rate = min(1 / min(float(sums[r]), joint) + exchange[r] for r in range(most))
            # Beyond all nodes there is no further stage.
            taken = min(left, float(caps[most - 1])) if number <= len(sums) else left
            if taken <= 0:
                return float("inf")
            seconds += taken * rate
            left -= taken
            number += 1
        return seconds

    def of_steps(self, steps: StepRange) -> tuple[float, float]:
        """The least cycle, and the least bottleneck, of a pipeline with such steps."""
        shape = decode_shape(self._workload, rows=steps.rows)
        busy = self._busy_seconds(shape)
        return max(self.step_seconds(shape), steps.steps * busy), busy

    def _cycle(self, allowed: StageCounts) -> float:
        """The least cycle of one replica."""
        ranges = self._ranges(self._workload.concurrency, allowed)
        return min((self.of_steps(steps)[0] for steps in ranges), default=float("inf"))

    def _shared_cycle(self, replicas: int, allowed: StageCounts) -> float:
        """The least cycle of several replicas as if all were alike.

        They may differ in their steps, so each bound takes the best case by itself.
        """
        streams = self._workload.concurrency
        waits, reads = [], []
        for count in {streams // replicas, -(-streams // replicas)} - {0}:
            for steps in self._ranges(count, allowed):
                shape = decode_shape(self._workload, rows=steps.rows)
                waits.append(self.step_seconds(shape))
                rate = float((1.0 / self._byte_rates(shape)).sum())
                reads.append(streams / steps.rows * float(self._reads(shape).sum()) / rate)
        return max(min(waits, default=float("inf")), min(reads, default=float("inf")))

    def _ranges(self, streams: int, allowed: StageCounts) -> Iterator[StepRange]:
        most = min(len(self._nodes), self._model.num_layers)
        return step_ranges(streams, allowed=allowed, most=most)

    def _busy_seconds(self, shape: StepShape) -> float:
        """The least time in which all nodes together do one step."""
        reads, per_byte = self._reads(shape), self._byte_rates(shape)
        steps = np.array([node.step_overhead_seconds for node in self._nodes])
        need = float(reads.sum())
        caps = np.full(len(per_byte), need)
        if self._constraints.max_tp_degree == 1:
            caps = self._most_bytes(reads)
        if caps.sum() < need:
            return float("inf")
        low, high = 0.0, float(steps.max() + need * per_byte.max())
        for _ in range(60):
            middle = (low + high) / 2
            done = (middle - steps) / per_byte
            if self._constraints.max_tp_degree == 1:
                done = np.minimum(done, _whole(done / float(reads.min())) * float(reads.max()))
            is_enough = np.clip(done, 0, caps).sum() >= need
            low, high = (low, middle) if is_enough else (middle, high)
        return low

    def _reads(self, shape: StepShape) -> Floats:
        """Bytes that a step reads of each layer."""
        model = self._model
        mlp = np.array(model.split_mlp_bytes, dtype=np.float64)
        rest = np.array(model.layer_bytes, dtype=np.float64) - mlp
        kv = model.kv_bytes_per_token_layer * shape.context_tokens * shape.sequences
        return rest + mlp * expert_share(model, rows=shape.rows) + kv

    def _byte_rates(self, shape: StepShape) -> Floats:
        """Seconds per byte that a node reads, with what it adds for each layer."""
        dtype, largest = self._model.dtype, float(self._reads(shape).max())
        return np.array(
            [
                1.0 / node.stream_bytes_per_second[dtype] + node.layer_overhead_seconds / largest
                for node in self._nodes
            ]
        )

    def _most_bytes(self, reads: Floats) -> Floats:
        """Bytes that a step may read of what a node's memory holds."""
        tokens = self._workload.max_context_tokens
        kv = self._model.kv_bytes_per_token_layer * tokens
        held = np.array(self._model.layer_bytes, dtype=np.float64) + kv
        room = np.array(
            [node.memory_bytes - node.process_overhead_bytes for node in self._nodes],
            dtype=np.float64,
        )
        most = room * float((reads / held).max())
        if self._constraints.max_tp_degree == 1:
            most = np.minimum(most, _whole(room / float(held.min())) * float(reads.max()))
        return np.clip(most, 0, float(reads.sum()))

    def _head_seconds(self, shape: StepShape) -> float:
        ranks = self._constraints.max_tp_degree
        dtype, size = self._model.dtype, float(self._model.head_bytes)
        return min(size / node.stream_bytes_per_second[dtype] / ranks for node in self._nodes)


def _whole(layers: Floats) -> Floats:
    """Whole layers; a little generous, so that rounding leaves the bound one."""
    return np.floor(layers + 1e-9)

"""How long the planner takes, and how far its plans may be from the best.

    python -m benchmarks.placement --json

Synthetic nodes of 100 GB/s to 3 TB/s and 32 to 160 GiB, models from 7 billion to a trillion
parameters. Seconds are CPU seconds of this process, which has one thread: they do not depend on
what else the machine does. Each plan is run on paper, and must yield what it predicts.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Floor, at_least, at_most, parser, report
from coordinator.planner.paper_models import PAPER_MODELS
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import (
    ClusterProfile,
    Constraints,
    LinkProfile,
    NodeProfile,
    Objective,
    Workload,
)
from coordinator.planner.simulator import simulate

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One cluster, model and wish."""

    model: str
    num_nodes: int
    objective: Objective
    concurrency: int = 8
    max_tp_degree: int = 1
    max_replicas: int = 1
    num_kinds: int | None = None
    """None makes each node one of its kind."""
    num_racks: int = 1
    limit_seconds: float | None = None

    @property
    def name(self) -> str:
        """For the table."""
        layers = PAPER_MODELS[self.model].num_layers
        extra = f", TP <= {self.max_tp_degree}" if self.max_tp_degree > 1 else ""
        extra += f", <= {self.max_replicas} replicas" if self.max_replicas > 1 else ""
        extra += f", {self.num_kinds} kinds" if self.num_kinds else ""
        extra += f", {self.num_racks} racks" if self.num_racks > 1 else ""
        return f"{self.model} ({layers} layers) x {self.num_nodes} nodes, {self.objective}{extra}"


_CASES = (
    _Case(model="7b", num_nodes=2, objective="latency"),
    _Case(model="70b", num_nodes=5, objective="throughput", max_tp_degree=4),
    _Case(model="70b", num_nodes=6, objective="throughput"),
    _Case(model="405b", num_nodes=64, objective="latency", limit_seconds=1.0),
    _Case(model="405b", num_nodes=64, objective="throughput", limit_seconds=1.0),
    _Case(model="405b", num_nodes=64, objective="latency", num_racks=8, limit_seconds=1.0),
    _Case(model="405b", num_nodes=64, objective="throughput", max_tp_degree=8),
    _Case(model="70b", num_nodes=64, objective="throughput", concurrency=64, max_replicas=8),
    _Case(model="1t", num_nodes=256, objective="throughput", concurrency=16),
    _Case(model="405b", num_nodes=1000, objective="latency", limit_seconds=30.0),
    _Case(model="405b", num_nodes=1000, objective="throughput", limit_seconds=30.0),
    _Case(model="1t", num_nodes=1000, objective="throughput", limit_seconds=30.0),
    _Case(model="405b", num_nodes=10_000, objective="throughput", num_kinds=8),
)


def _cluster(case: _Case) -> ClusterProfile:
    rng = random.Random(case.num_nodes)
    nodes = []
    for i in range(case.num_nodes):
        own = random.Random(rng.randrange(case.num_kinds)) if case.num_kinds else rng
        stream = own.uniform(100e9, 3000e9)
        nodes.append(
            NodeProfile(
                node_id=f"n{i}",
                memory_bytes=int(own.uniform(32, 160) * _GIB),
                stream_bytes_per_second={"bfloat16": stream},
                flops_per_second={"bfloat16": 150 * stream},
                layer_overhead_seconds=own.uniform(1e-5, 1e-4),
                step_overhead_seconds=own.uniform(1e-4, 1e-3),
            )
        )
    near = LinkProfile(latency_seconds=2e-5, bytes_per_second=1e10)
    links = {
        (f"n{i}", f"n{j}"): near
        for i in range(case.num_nodes)
        for j in range(i % case.num_racks, case.num_nodes, case.num_racks)
        if i != j and case.num_racks > 1
    }
    far = LinkProfile(latency_seconds=2e-4, bytes_per_second=1e9)
    return ClusterProfile(nodes=tuple(nodes), links=links, default_link=far)


def _measure(case: _Case, *, rounds: int) -> tuple[dict[str, Any], list[Floor]]:
    model = PAPER_MODELS[case.model].cost(dtype="bfloat16")
    cluster = _cluster(case)
    workload = Workload(
        prompt_tokens=512,
        max_context_tokens=8192,
        concurrency=case.concurrency,
        objective=case.objective,
    )
    constraints = Constraints(max_tp_degree=case.max_tp_degree, max_replicas=case.max_replicas)
    seconds = []
    for _ in range(rounds if case.num_nodes <= 64 else 1):
        started = time.process_time()
        result = plan_placement(model, cluster=cluster, workload=workload, constraints=constraints)
        seconds.append(time.process_time() - started)
    run = simulate(result.plan, model=model, cluster=cluster, workload=workload)
    predicted = result.prediction.tokens_per_second
    best = min(seconds)
    row = {
        "what": case.name,
        "seconds": best,
        "stages": sum(replica.num_stages for replica in result.plan.replicas),
        "replicas": len(result.plan.replicas),
        "nodes used": len(result.plan.node_ids),
        "tokens/s": predicted,
        "simulated": run.tokens_per_second,
        "exact": result.is_exact,
        "gap %": 100 * result.gap,
    }
    floors = [
        at_least(f"{case.name}: simulated / predicted", run.tokens_per_second / predicted, 0.95)
    ]
    if case.limit_seconds is not None:
        floors.append(at_most(f"{case.name}: plan", best, case.limit_seconds, unit=" s"))
    return row, floors


def main() -> None:
    """Plan all cases and report."""
    options = parser("Planner: seconds and gap to the lower bound")
    options.set_defaults(rounds=3)
    arguments = options.parse_args()
    measured = [_measure(case, rounds=arguments.rounds) for case in _CASES]
    report(
        "placement",
        [row for row, _ in measured],
        [floor for _, floors in measured for floor in floors],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    main()

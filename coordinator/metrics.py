"""The coordinator's figures in Prometheus' text format, read at each scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.cluster import Cluster
from stagemesh.weight_transfer.service import WeightServicer


class _ClusterCollector(Collector):
    def __init__(self, cluster: Cluster, weights: WeightServicer) -> None:
        self._cluster = cluster
        self._weights = weights

    def collect(self) -> Iterator[Metric]:
        """Yield each family with its present values."""
        nodes = GaugeMetricFamily("stagemesh_nodes", "Nodes by state", labels=["state"])
        states = [member.state for member in self._cluster.registry.members]
        for state in ("ready", "lost", "left"):
            nodes.add_metric([state], states.count(state))
        yield nodes
        sent = CounterMetricFamily(
            "stagemesh_weights_sent_bytes", "Weights sent to nodes without files", labels=["node"]
        )
        for node_id, num_bytes in self._weights.sent_bytes.items():
            sent.add_metric([node_id], num_bytes)
        yield sent
        yield from self._deployments()

    def _deployments(self) -> Iterator[Metric]:
        gauges = {
            "ready": GaugeMetricFamily(
                "stagemesh_model_ready", "1 when requests are answered", labels=["model"]
            ),
            "active": GaugeMetricFamily(
                "stagemesh_sequences_active", "Sequences that callers wait for", labels=["model"]
            ),
            "waiting": GaugeMetricFamily(
                "stagemesh_sequences_waiting", "Of them, those without KV room", labels=["model"]
            ),
            "kv": GaugeMetricFamily(
                "stagemesh_kv_reserved_tokens", "KV room reserved", labels=["model"]
            ),
        }
        tokens = CounterMetricFamily(
            "stagemesh_generated_tokens", "Tokens generated", labels=["model"]
        )
        seconds = CounterMetricFamily(
            "stagemesh_stage_compute_seconds", "Time in forwards", labels=["model", "stage"]
        )
        for name, deployment in self._cluster.deployments.items():
            gauges["ready"].add_metric([name], float(deployment.phase == "ready"))
            runtime = deployment.runtime
            if runtime is None:
                continue
            gauges["active"].add_metric([name], runtime.num_active)
            gauges["waiting"].add_metric([name], runtime.scheduler.num_waiting)
            gauges["kv"].add_metric([name], runtime.scheduler.kv_reserved_tokens)
            tokens.add_metric([name], runtime.stats.num_tokens)
            for stage, nanos in runtime.stats.compute_nanos.items():
                seconds.add_metric([name, str(stage)], nanos / 1e9)
        yield from gauges.values()
        yield tokens
        yield seconds


def metrics_text(cluster: Cluster, weights: WeightServicer) -> str:
    """All families as one text."""
    registry = CollectorRegistry()
    registry.register(_ClusterCollector(cluster, weights))
    return generate_latest(registry).decode()

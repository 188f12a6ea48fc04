"""Runs a plan on paper: steps queue for stages and links as they would, event by event.

The scheduler's rule is followed (`coordinator.scheduler`): with p stages and c streams a step takes
up to ceil(c / p) of the streams that are ready, up to p steps are in flight, and no step waits for
others to be ready. Each stage and each link serves one step at a time, first come, first served; a
link is occupied for a message's bytes, and its latency passes beside that. What `time_model`
predicts by formula, this counts.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import PlacementPlan, ReplicaPlan
from coordinator.planner.profiles import ClusterProfile, Workload
from coordinator.planner.time_model import ReplicaTimes, TimeModel
from stagemesh.errors import ConfigError

_WARM_UP_FRACTION = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReplica:
    """What one replica did once it was warm."""

    tokens_per_second: float
    """Of all its streams."""
    time_per_token_seconds: float
    """Mean time between two tokens of a stream."""
    stage_utilisation: tuple[float, ...]
    """Part of the time that each stage computed."""
    link_utilisation: tuple[float, ...]
    """Part of the time that each link was occupied, into the second stage first."""

    @property
    def bubble(self) -> float:
        """Part of the stages' time in which they had nothing to do."""
        return 1.0 - sum(self.stage_utilisation) / len(self.stage_utilisation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a plan did."""

    replicas: tuple[SimulatedReplica, ...]
    """By replica."""

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas."""
        return sum(replica.tokens_per_second for replica in self.replicas)

    @property
    def time_per_token_seconds(self) -> float:
        """Of the slowest replica's streams."""
        return max(replica.time_per_token_seconds for replica in self.replicas)


def simulate(
    plan: PlacementPlan,
    *,
    model: ModelCost,
    cluster: ClusterProfile,
    workload: Workload,
    tokens_per_stream: int = 64,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Decode with all streams busy.

    Args:
        plan: what to run.
        model: the model.
        cluster: the nodes and links.
        workload: context lengths; the plan says how many streams there are.
        tokens_per_stream: how long to run; the first quarter is not counted.
        jitter: a stage's time varies evenly by up to this fraction, up or down.
        seed: of the jitter.
    """
    if tokens_per_stream < 4 or not 0 <= jitter < 1:
        raise ConfigError(
            f"tokens_per_stream must be at least 4 and jitter in [0, 1), got "
            f"{tokens_per_stream} and {jitter}"
        )
    timer = TimeModel(model, cluster=cluster, workload=workload)
    noise = random.Random(seed)
    return Simulation(
        replicas=tuple(
            _Pipeline(replica, timer, jitter=jitter, noise=noise).run(tokens_per_stream)
            for replica in plan.replicas
        )
    )


class _Server:
    """A stage or a link: one step at a time."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.spans: list[tuple[float, float]] = []

    def serve(self, now: float, seconds: float) -> float:
        """Take a step that came now; returns when it is through."""
        start = max(now, self.free_at)
        self.free_at = start + seconds
        self.spans.append((start, self.free_at))
        return self.free_at

    def utilisation(self, start: float, end: float) -> float:
        """Part of a time in which it served."""
        busy = sum(max(0.0, min(b, end) - max(a, start)) for a, b in self.spans)
        return busy / (end - start)


class _Pipeline:
    """One replica while it runs."""

    def __init__(
        self, replica: ReplicaPlan, timer: TimeModel, *, jitter: float, noise: random.Random
    ) -> None:
        self._replica = replica
        self._timer = timer
        self._jitter = jitter
        self._noise = noise
        self._stages = [_Server() for _ in replica.stages]
        self._links = [_Server() for _ in replica.stages[1:]]
        self._times: dict[int, ReplicaTimes] = {}
        self._ready = deque(range(replica.concurrency))
        self._in_flight = 0
        # (when, order of creation, stage to enter or one past the last, streams)
        self._events: list[tuple[float, int, int, tuple[int, ...]]] = []
        self._num_events = 0

    def run(self, tokens_per_stream: int) -> SimulatedReplica:
        """Until each stream has so many tokens on average."""
        streams = self._replica.concurrency
        total, warm = tokens_per_stream * streams, int(tokens_per_stream * _WARM_UP_FRACTION)
        yielded, done = [0.0], 0
        last: dict[int, float] = {}
        gaps: list[float] = []
        self._start_steps(0.0)
        while done < total:
            now, _, stage, members = heapq.heappop(self._events)
            if stage < len(self._stages):
                self._enter(now, stage, members)
                continue
            for stream in members:
                if done >= warm * streams and stream in last:
                    gaps.append(now - last[stream])
                last[stream] = now
                yielded.append(now)
                done += 1
            self._ready.extend(members)
            self._in_flight -= 1
            self._start_steps(now)
        start, end = yielded[warm * streams], yielded[-1]
        return SimulatedReplica(
            tokens_per_second=(len(yielded) - 1 - warm * streams) / (end - start),
            time_per_token_seconds=sum(gaps) / len(gaps),
            stage_utilisation=_utilisations(self._stages, start, end),
            link_utilisation=_utilisations(self._links, start, end),
        )

    def _start_steps(self, now: float) -> None:
        """What the scheduler sends, given who is ready."""
        num_stages = self._replica.num_stages
        most = -(-self._replica.concurrency // num_stages)
        while self._ready and self._in_flight < num_stages:
            members = tuple(self._ready.popleft() for _ in range(min(most, len(self._ready))))
            self._in_flight += 1
            self._push(now + self._step(members).entry, 0, members)

    def _enter(self, now: float, stage: int, members: tuple[int, ...]) -> None:
        times = self._step(members)
        factor = 1 + self._jitter * (2 * self._noise.random() - 1) if self._jitter else 1.0
        through = self._stages[stage].serve(now, times.stages[stage] * factor)
        if stage + 1 == len(self._stages):
            self._push(through + times.exit, stage + 1, members)
            return
        hop = times.hops[stage]
        sent = self._links[stage].serve(through, hop.occupied_seconds)
        self._push(sent + hop.seconds - hop.occupied_seconds, stage + 1, members)

    def _step(self, members: Sequence[int]) -> ReplicaTimes:
        rows = len(members)
        if rows not in self._times:
            self._times[rows] = self._timer.decode_times(self._replica, rows=rows)
        return self._times[rows]

    def _push(self, when: float, stage: int, members: tuple[int, ...]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, stage, members))


def _utilisations(servers: Sequence[_Server], start: float, end: float) -> tuple[float, ...]:
    return tuple(server.utilisation(start, end) for server in servers)

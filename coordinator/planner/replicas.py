"""One search for one replica, and how nodes divide into several.

Streams divide as evenly as they can over the replicas.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations

from coordinator.model_cost import ModelCost
from coordinator.planner.chain import ChainSearch, StageCounts
from coordinator.planner.lower_bound import LowerBound
from coordinator.planner.optimise import Candidate, Optimiser
from coordinator.planner.ordered import OrderedSearch
from coordinator.planner.orders import Order, node_orders
from coordinator.planner.profiles import ClusterProfile, Constraints, Workload
from coordinator.planner.rank_shares import can_divide
from coordinator.planner.room import chain_fits, furthest_ends
from coordinator.planner.step_times import decode_shape
from coordinator.planner.subsets import SubsetSearch
from coordinator.planner.units import Unit, UnitCosts, Ways, node_kind
from stagemesh.errors import PlacementError

EXACT_NODES = 6
"""Nodes for which all orders are tried."""
EXACT_SHARED_NODES = 5
"""And when ranks may share stages, or replicas the nodes."""

_MAX_REPLICA_COUNTS_TRIED = 8


class ReplicaSearch:
    """Finds pipelines over some of a cluster's nodes; remembers costs and results.

    Args:
        model: the model.
        cluster: nodes that may take part.
        workload: what is asked.
        constraints: what the user wants.
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
        self._cluster = cluster
        self._workload = workload
        self._constraints = constraints
        self._costs: dict[int, UnitCosts] = {}
        ranks = range(constraints.max_tp_degree, 0, -1)
        self.max_ranks = next((r for r in ranks if can_divide(model, r)), 1)
        _check_degrees(model, constraints)

    @cached_property
    def ways(self) -> Ways:
        """Between the nodes."""
        return Ways(self._cluster)

    @property
    def exact_limit(self) -> int:
        """Nodes up to which the search is exact."""
        is_simple = self.max_ranks == 1 and self._constraints.max_replicas == 1
        return EXACT_NODES if is_simple else EXACT_SHARED_NODES

    @property
    def allowed(self) -> StageCounts:
        """Numbers of stages that the user allows."""
        exactly = self._constraints.num_stages
        degrees = self._constraints.tp_degrees
        if exactly is not None:
            each = degrees if len(degrees) > 1 else ()
            return StageCounts(lowest=exactly, highest=exactly, degrees=each)
        return StageCounts(highest=self._constraints.max_stages)

    def kinds(self) -> list[object]:
        """By node: equal for nodes that differ in their name only."""
        return [node_kind(node) for node in self._cluster.nodes]

    def without_surplus(self, members: Sequence[int]) -> list[int]:
        """The nodes, of one kind no more than a pipeline can use.

        Nodes of a kind whose links nobody measured are interchangeable, and no pipeline has more
        stages than the model layers.
        """
        linked = {name for pair in self._cluster.links for name in pair}
        most = self._model.num_layers * self.max_ranks
        seen: Counter[object] = Counter()
        kept = []
        for i in members:
            node = self._cluster.nodes[i]
            kind = node.node_id if node.node_id in linked else node_kind(node)
            seen[kind] += 1
            if seen[kind] <= most or node.node_id in self._constraints.pinned:
                kept.append(i)
        return kept

    def costs(self, streams: int) -> UnitCosts:
        """Costs of units that serve so many streams."""
        if streams not in self._costs:
            self._costs[streams] = UnitCosts(
                self._model,
                cluster=self._cluster,
                workload=self._workload,
                constraints=self._constraints,
                streams=streams,
            )
        return self._costs[streams]

    def groups(self, members: Sequence[int]) -> list[Unit]:
        """All units that nodes can form."""
        degrees = self._constraints.tp_degrees
        sizes = sorted(set(degrees)) if degrees else range(1, self.max_ranks + 1)
        return [group for size in sizes for group in combinations(members, size)]

    def orders(self, members: Sequence[int]) -> list[Order]:
        """Orders that the heuristic tries."""
        return node_orders(
            self._cluster.nodes,
            members,
            dtype=self._model.dtype,
            constraints=self._constraints,
            num_layers=self._model.num_layers,
            max_ranks=self.max_ranks,
        )

    def bound(self, members: Sequence[int]) -> LowerBound:
        """What no plan on these nodes can beat."""
        nodes = tuple(self._cluster.nodes[i] for i in members)
        return LowerBound(
            self._model,
            cluster=replace(self._cluster, nodes=nodes),
            workload=self._workload,
            constraints=self._constraints,
        )

    def exact(
        self, members: Sequence[int], *, streams: int, below: float = float("inf")
    ) -> Candidate | None:
        """The best pipeline over any of a few nodes, in any order."""
        search = SubsetSearch(
            self.costs(streams),
            self.ways,
            self.groups(members),
            is_order_fixed=self._constraints.is_order_fixed,
        )
        return self._optimiser(members, streams).best(search, below=below)

    def heuristic(
        self, members: Sequence[int], *, streams: int, below: float = float("inf")
    ) -> Candidate | None:
        """The best pipeline along any of the orders."""
        best: Candidate | None = None
        if self.max_ranks == 1 and self.fits_alone(members, streams=streams) is False:
            return None
        for order in self.orders(members):
            search: ChainSearch = OrderedSearch(self.costs(streams), self.ways, order)
            found = self._optimiser(members, streams).best(search, below=below)
            if found is not None:
                best, below = found, found.value
        return best

    def fits(self, members: Sequence[int], *, streams: int) -> bool:
        """Whether any pipeline is found, however slow."""
        if len(members) <= self.exact_limit:
            return self.exact(members, streams=streams) is not None
        few = self.without_surplus(members)
        alone = self.fits_alone(few, streams=streams)
        if alone is not None and (alone or self.max_ranks == 1):
            return alone
        shape = decode_shape(self._workload, rows=1)
        return any(
            OrderedSearch(self.costs(streams), self.ways, order).best(
                shape, counts=self.allowed, limit_seconds=float("inf")
            )
            for order in self.orders(few)
        )

    def fits_alone(self, members: Sequence[int], *, streams: int) -> bool | None:
        """Whether a pipeline of stages of one node each is found along any of the orders.

        None where that is not told without a search: layers are pinned, or ranks must share.
        """
        wishes = self._constraints
        if wishes.pinned or max(wishes.tp_degrees, default=1) > 1:
            return None
        ends = furthest_ends(
            self._model, self._cluster.nodes, workload=self._workload, streams=streams
        )
        return any(
            chain_fits(
                [placed.unit[0] for placed in order if len(placed.unit) == 1],
                ends,
                counts=replace(self.allowed, degrees=()),
            )
            for order in self.orders(members)
        )

    def _optimiser(self, members: Sequence[int], streams: int) -> Optimiser:
        return Optimiser(
            self.costs(streams),
            self.ways,
            bound=self.bound(members),
            allowed=self.allowed,
            most_stages=min(len(members), self._model.num_layers),
        )


def _check_degrees(model: ModelCost, constraints: Constraints) -> None:
    """Refuse degrees that the user insists on and the model's layers cannot be divided by."""
    for degree in constraints.tp_degrees:
        if not can_divide(model, degree):
            raise PlacementError(
                f"a stage cannot be shared by {degree} ranks (tp {degree}): the model has "
                f"{model.num_heads} heads, {model.kv_groups} KV heads and {model.mlp_columns} MLP "
                "columns"
            )


def divided_streams(concurrency: int, replicas: int) -> list[int]:
    """Streams of each replica, those with more first."""
    each, more = divmod(concurrency, replicas)
    return [each + 1] * more + [each] * (replicas - more)


def joint_value(values: Sequence[float], *, objective: str) -> float:
    """What several replicas are worth: the slowest stream's time, or time per token of all."""
    if objective == "latency":
        return max(values)
    return 1.0 / sum(1.0 / value for value in values)


def exact_replicas(
    search: ReplicaSearch, members: Sequence[int], *, workload: Workload, replicas: int
) -> tuple[float, list[tuple[Candidate, int]]] | None:
    """The best of all ways to give disjoint sets of nodes to so many replicas.

    Returns:
        The joint value, and each replica with its streams.
    """
    streams = divided_streams(workload.concurrency, replicas)
    found: dict[tuple[tuple[int, ...], int], Candidate | None] = {}

    def single(nodes: tuple[int, ...], count: int) -> Candidate | None:
        if (nodes, count) not in found:
            found[nodes, count] = search.exact(nodes, streams=count)
        return found[nodes, count]

    best: tuple[float, list[tuple[Candidate, int]]] | None = None
    for division in _divisions(tuple(members), replicas):
        parts = [
            (single(nodes, count), count) for nodes, count in zip(division, streams, strict=True)
        ]
        whole = [(part, count) for part, count in parts if part is not None]
        if len(whole) < replicas:
            continue
        value = joint_value([c.value for c, _ in whole], objective=workload.objective)
        if best is None or value < best[0]:
            best = (value, whole)
    return best


def _divisions(members: tuple[int, ...], parts: int) -> Iterator[list[tuple[int, ...]]]:
    """Ways to give each part some nodes.

    A search may leave nodes unused, so the last part is offered all that is left.
    """
    if parts == 1:
        yield [members]
        return
    for size in range(1, len(members) - parts + 2):
        for nodes in combinations(members, size):
            rest = tuple(i for i in members if i not in nodes)
            for others in _divisions(rest, parts - 1):
                yield [nodes, *others]


def dealt_replicas(
    search: ReplicaSearch,
    members: Sequence[int],
    kinds: Sequence[object],
    *,
    workload: Workload,
    replicas: int,
) -> tuple[float, list[tuple[Candidate, int]]] | None:
    """Nodes dealt round over so many replicas, kind by kind, so that each gets alike ones.

    Which replica a node goes to depends on those listed before it alone: a node more makes one
    replica better and none worse.
    """
    hands: list[list[int]] = [[] for _ in range(replicas)]
    seen: dict[object, int] = {}
    order: dict[object, int] = {}
    for i in members:
        number = seen.get(kinds[i], 0)
        offset = order.setdefault(kinds[i], len(order))
        seen[kinds[i]] = number + 1
        hands[(number + offset) % replicas].append(i)
    streams = divided_streams(workload.concurrency, replicas)
    whole: list[tuple[Candidate, int]] = []
    for hand, count in zip(hands, streams, strict=True):
        found = search.heuristic(hand, streams=count) if hand else None
        if found is None:
            return None
        whole.append((found, count))
    value = joint_value([c.value for c, _ in whole], objective=workload.objective)
    return value, whole


def replica_counts(constraints: Constraints, *, num_nodes: int, concurrency: int) -> list[int]:
    """Numbers of replicas worth trying, from 2: all small ones, doubling, and the most allowed.

    More nodes only lengthen the list.
    """
    most = min(constraints.max_replicas, concurrency)
    counts = {most, *range(2, _MAX_REPLICA_COUNTS_TRIED + 1)}
    doubled = 2 * _MAX_REPLICA_COUNTS_TRIED
    while doubled < most:
        counts.add(doubled)
        doubled *= 2
    return sorted(count for count in counts if 2 <= count <= min(most, num_nodes))

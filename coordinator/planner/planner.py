"""The planner: model, cluster and wishes in, the best placement out. Pure.

1. Nodes that cannot take part are set aside, each with its reason (`candidates`).
2. Up to `replicas.EXACT_NODES` nodes all orders of all choices of nodes, cuts and shares are
   searched, so no better plan exists within the time and memory models. Beyond, the best plan along
   each of a few orders is found (`orders`), the one over the first nodes is exact, and replicas get
   nodes dealt; a lower bound says how far that may be from the best (`lower_bound`).
3. The winner is spelled out, predicted, and each unused node gets a reason (`unused`).

What holds for both ways: a plan never takes more memory than a node has; it is never slower than
the even split over all nodes, which is one of those searched; and a node appended to the cluster
never makes it slower, because everything that could be chosen without it still can.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.model_cost import ModelCost
from coordinator.planner.candidates import Selection, select_nodes
from coordinator.planner.optimise import Candidate
from coordinator.planner.plan import PlacementPlan, PlanResult, ReplicaPlan
from coordinator.planner.profiles import ClusterProfile, Constraints, Workload
from coordinator.planner.refusal import explain_refusal
from coordinator.planner.replicas import (
    ReplicaSearch,
    dealt_replicas,
    divided_streams,
    exact_replicas,
    replica_counts,
)
from coordinator.planner.time_model import TimeModel, objective_value, predict
from coordinator.planner.unused import explain_unused
from stagemesh.errors import PlacementError

_ANYTHING = Constraints()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Pipelines with their streams, and what they are worth together."""

    value: float
    replicas: tuple[tuple[Candidate, int], ...]
    is_exact: bool


def plan_placement(
    model: ModelCost,
    *,
    cluster: ClusterProfile,
    workload: Workload,
    constraints: Constraints = _ANYTHING,
    advises: bool = True,
) -> PlanResult:
    """Find the best placement.

    Args:
        model: what the layers cost.
        cluster: nodes and links as measured.
        workload: what is asked, and what is to be good.
        constraints: what the user wants.
        advises: whether a refusal says what would fit, for which more is searched.

    Raises:
        ConfigError: a wish makes no sense for this model, or a node has no rate for its dtype.
        PlacementError: nothing fits; the text says what lacks and what would fit.
    """
    selection = select_nodes(model, cluster=cluster, workload=workload, constraints=constraints)
    search = ReplicaSearch(
        model, cluster=selection.cluster, workload=workload, constraints=constraints
    )
    found = find_best(search, workload=workload, constraints=constraints, cluster=selection.cluster)
    if found is None and not advises:
        raise PlacementError("the model does not fit")
    if found is None:
        raise PlacementError(
            explain_refusal(
                model,
                cluster=selection.cluster,
                workload=workload,
                constraints=constraints,
                set_aside=selection.reasons,
            )
        )
    plan = spell_out(search, found, model=model, workload=workload)
    return explain(
        plan,
        search=search,
        model=model,
        selection=selection,
        workload=workload,
        is_exact=found.is_exact,
    )


def explain(
    plan: PlacementPlan,
    *,
    search: ReplicaSearch,
    model: ModelCost,
    selection: Selection,
    workload: Workload,
    is_exact: bool,
) -> PlanResult:
    """A plan with its prediction, a bound and the reasons of the nodes that it leaves out."""
    cluster = selection.cluster
    timer = TimeModel(model, cluster=cluster, workload=workload)
    value = objective_value(plan.replicas, timer=timer, workload=workload)
    bound = value
    if not is_exact:
        bound = min(value, search.bound(range(len(cluster.nodes))).value(allowed=search.allowed))
    return PlanResult(
        plan=plan,
        prediction=predict(plan, model=model, cluster=cluster, workload=workload),
        unused=selection.reasons
        | explain_unused(plan, search=search, timer=timer, workload=workload, cluster=cluster),
        is_exact=is_exact,
        objective_value=value,
        lower_bound=bound,
    )


def find_best(
    search: ReplicaSearch,
    *,
    workload: Workload,
    constraints: Constraints,
    cluster: ClusterProfile,
) -> Found | None:
    """The best pipelines over the nodes of a cluster; None when nothing fits."""
    members = list(range(len(cluster.nodes)))
    first = members[: search.exact_limit]
    is_small = len(first) == len(members)
    best: Found | None = None
    if not is_small:
        best = _heuristic(
            search, members, workload=workload, constraints=constraints, cluster=cluster
        )
    exact = _exact(
        search,
        first,
        workload=workload,
        constraints=constraints,
        below=best.value if best else float("inf"),
    )
    return exact or best


def _exact(
    search: ReplicaSearch,
    members: Sequence[int],
    *,
    workload: Workload,
    constraints: Constraints,
    below: float,
) -> Found | None:
    """The best over a few nodes, if it is below a value."""
    best: Found | None = None
    single = search.exact(members, streams=workload.concurrency, below=below)
    if single is not None:
        replicas = ((single, workload.concurrency),)
        best, below = Found(value=single.value, replicas=replicas, is_exact=True), single.value
    most = min(constraints.max_replicas, len(members), workload.concurrency)
    for count in range(2, most + 1):
        found = exact_replicas(search, members, workload=workload, replicas=count)
        if found is not None and found[0] < below:
            best, below = Found(value=found[0], replicas=tuple(found[1]), is_exact=True), found[0]
    return best


def _heuristic(
    search: ReplicaSearch,
    members: Sequence[int],
    *,
    workload: Workload,
    constraints: Constraints,
    cluster: ClusterProfile,
) -> Found | None:
    kinds = search.kinds()
    few = search.without_surplus(members)
    single = search.heuristic(few, streams=workload.concurrency)
    best: Found | None = None
    if single is not None:
        replicas = ((single, workload.concurrency),)
        # One order and one node per stage: the ordered search leaves nothing out.
        is_exact = (
            constraints.is_order_fixed and search.max_ranks == 1 and constraints.max_replicas == 1
        )
        best = Found(value=single.value, replicas=replicas, is_exact=is_exact)
    counts = replica_counts(constraints, num_nodes=len(members), concurrency=workload.concurrency)
    for count in counts:
        found = dealt_replicas(search, members, kinds, workload=workload, replicas=count)
        if found is not None and (best is None or found[0] < best.value):
            best = Found(value=found[0], replicas=tuple(found[1]), is_exact=False)
    return best


def spell_out(
    search: ReplicaSearch, found: Found, *, model: ModelCost, workload: Workload
) -> PlacementPlan:
    """The plan that a search's result means."""
    assert sorted(divided_streams(workload.concurrency, len(found.replicas))) == sorted(
        streams for _, streams in found.replicas
    )
    return PlacementPlan(
        num_layers=model.num_layers,
        dtype=model.dtype,
        max_context_tokens=workload.max_context_tokens,
        replicas=tuple(
            ReplicaPlan(
                stages=tuple(
                    search.costs(streams).stage(
                        stage.unit, stage.start_layer, stage.end_layer, candidate.shape
                    )
                    for stage in candidate.chain.stages
                ),
                concurrency=streams,
            )
            for candidate, streams in found.replicas
        ),
    )

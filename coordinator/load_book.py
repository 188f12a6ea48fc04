"""How far the ranks of a plan are with loading, and which nodes have the model's weights by now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.load_order import LoadProgress
from coordinator.membership import NodeInfo
from stagemesh.layout import Plan

_MAX_WEIGHT_PEERS = 16


class LoadBook:
    """Of one deployment, over all its plans."""

    def __init__(self) -> None:
        self._progress: dict[tuple[int, int], LoadProgress] = {}
        # Nodes that have loaded the model, and so have files or a cache of it.
        self._holders: set[str] = set()

    @property
    def progress(self) -> Mapping[tuple[int, int], LoadProgress]:
        """Of the last plan, by stage and rank."""
        return self._progress

    def begin(self) -> None:
        """A new plan is about to load."""
        self._progress = {}

    def note(self, plan: Plan | None, stage: int, rank: int, progress: LoadProgress) -> None:
        """A rank has told how far it is.

        Args:
            plan: that it belongs to; None when it was given up meanwhile.
            stage: of the rank.
            rank: in the stage.
            progress: what it told.
        """
        # What a load ends with does not say how its weights came.
        last = self._progress.get((stage, rank))
        if last is not None and progress.fetch is None:
            progress = replace(progress, fetch=last.fetch)
        self._progress[stage, rank] = progress
        if progress.is_ready and plan is not None:
            self._holders.add(plan.stages[stage].node_ids[rank])

    def weight_peers(self, nodes: Sequence[NodeInfo]) -> tuple[tuple[str, str], ...]:
        """(id, address) of nodes that may send weights to others; those that have loaded first."""
        ordered = sorted(nodes, key=lambda node: node.node_id not in self._holders)
        return tuple((node.node_id, node.address) for node in ordered[:_MAX_WEIGHT_PEERS])

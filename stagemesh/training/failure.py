"""A rank that fails ends the step on all ranks, and each error says which rank of the world it was.

rank 3 dies   its tp, pp and dp peers see it go: PeerLost, with its rank in *their* group
              they name it by its rank in the world, and abort all their groups with that
              whoever waited for them: GroupAborted, with the same words; and so on
"""

import contextlib
import re
from types import TracebackType
from typing import Self

from stagemesh.errors import CommError, GroupAborted, NotReady, PeerLost
from stagemesh.parallel.mesh import Mesh

_NAMED = re.compile(r"rank (\d+) \(dp \d+, pp \d+, tp \d+\) is lost")
_LOST = re.compile(
    r"rank \d+ \((?:rank (\d+) of the world, )?node ([^\s)]+)(?: at [^\s)]+)?\) "
    r"(?:is lost|cannot be reached)"
)
"""As errors name a rank; over gloo without its address."""


class RankFailure:
    """Whatever is raised within the block aborts the mesh; the loss of a rank is named by it."""

    def __init__(self, mesh: Mesh) -> None:
        """Guard a mesh."""
        self._mesh = mesh

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        world = self._mesh.world
        lost = self.lost_rank(error) if isinstance(error, CommError) else None
        text = str(error)
        if lost is not None:
            named = _NAMED.search(text)
            at = self._mesh.topology.coordinates(lost)
            where = f"rank {lost} (dp {at.dp}, pp {at.pp}, tp {at.tp}) is lost"
            text = f"{where}: {text}" if named is None else text[named.start() :]
        elif not isinstance(error, GroupAborted):
            text = f"rank {world.rank} failed: {type(error).__name__}: {text}"
        # A group that is over already must not hide why.
        with contextlib.suppress(CommError, NotReady):
            world.abort(text)
        if lost is not None:
            raise PeerLost(text, rank=lost) from error

    def lost_rank(self, error: CommError) -> int | None:
        """The rank of the world whose loss an error tells of; None if it tells of something else.

        An abort carries its cause as text only, so that is where it is looked for.
        """
        named = _NAMED.search(str(error))
        if named is not None:
            return int(named[1])
        told = _LOST.search(str(error))
        if told is not None and told[1] is not None:
            return int(told[1])
        node_id = error.node_id if isinstance(error, PeerLost) and error.node_id else None
        if node_id is None and told is not None:
            node_id = told[2]
        ranks = [m.rank for m in self._mesh.world.members if m.node_id == node_id]
        # Several where ranks are threads of one process.
        return ranks[0] if len(ranks) == 1 else None

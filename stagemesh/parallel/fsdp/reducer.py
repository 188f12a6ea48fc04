"""GradientReducer: reductions of a backward, in the same order on all ranks.

Autograd may complete units in another order on another rank (parameters that are not used there).
So a unit waits for those before it in the order, which is that of the modules from last to first.
"""

from collections import deque
from collections.abc import Sequence

from stagemesh.parallel.fsdp.unit import FsdpUnit

MAX_IN_FLIGHT = 2
"""Reductions of units that run at once: more would keep more gradients whole."""


class GradientReducer:
    """Launches the units' reductions and waits for them."""

    def __init__(self, units: Sequence[FsdpUnit]) -> None:
        """Serve units.

        Args:
            units: in the order of their modules, the root first.
        """
        self._order = tuple(unit for unit in reversed(units) if unit.gradients)
        self._next = 0
        self._in_flight: deque[FsdpUnit] = deque()

    def begin(self) -> None:
        """A backward begins."""
        self._next = 0

    def advance(self) -> None:
        """Launch what is complete, up to the first unit that is not."""
        while self._next < len(self._order):
            unit = self._order[self._next]
            if unit.is_armed and not unit.is_collected:
                return
            self._next += 1
            if unit.is_armed:
                self._launch(unit)

    def finish(self) -> None:
        """Launch the rest, and give all averages to the shards."""
        for unit in self._order:
            if unit.is_armed:
                self._launch(unit)
        while self._in_flight:
            self._finish_oldest()

    def discard(self) -> None:
        """Forget what a backward that failed has left."""
        while self._in_flight:
            for gradient in self._in_flight.popleft().gradients:
                gradient.discard()

    def _launch(self, unit: FsdpUnit) -> None:
        unit.is_armed = False
        for gradient in unit.gradients:
            gradient.launch()
        self._in_flight.append(unit)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for gradient in self._in_flight.popleft().gradients:
            gradient.finish()

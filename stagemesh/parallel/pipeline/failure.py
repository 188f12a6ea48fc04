"""A failure in one stage ends the step on all ranks, with the stage's name in each error."""

import contextlib
import gc
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CommError, NotReady, StageFailed, StagemeshError
from stagemesh.schedule.actions import Action


class AbortOnFailure:
    """Whatever is raised within the block aborts the groups, so that no rank waits for it.

    What torch or a module raises becomes a StageFailed; our own errors stay what they are and get
    a note. Either names what was being done.
    """

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        """Make a guard of some groups."""
        self._groups = groups
        self._action: Action | None = None

    def at(self, action: Action) -> None:
        """Say what is done now."""
        self._action = action

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
        action = self._action
        rank = self._groups[0].rank
        doing = "a step" if action is None else f"the {action.in_words()}"
        text = f"{doing} failed on rank {rank}: {type(error).__name__}: {error}"
        for group in self._groups:
            # A group that is over already must not hide why.
            with contextlib.suppress(CommError, NotReady):
                group.abort(text)
        # The other ranks of a Gloo group hear of the abort when the connections close, and those
        # are held by the operations that it has ended, in cycles of their errors and tracebacks.
        gc.collect()
        if isinstance(error, StagemeshError) or not isinstance(error, Exception):
            error.add_note(text)
            return
        raise StageFailed(
            text,
            stage=-1 if action is None else action.stage,
            operation="" if action is None else action.in_words(),
            error_type=type(error).__name__,
        ) from error

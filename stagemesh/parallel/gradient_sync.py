"""GradientSync: what a pipeline asks of a stage whose gradients are shared with other ranks."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


@runtime_checkable
class GradientSync(Protocol):
    """A module that reduces its gradients over a group; DataParallel and Fsdp are such."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block a backward only adds to this rank's own gradients."""

    def sync_gradients(self) -> None:
        """Reduce what the backwards within `no_sync` have added up; all ranks call it."""

"""What happens to processes that are forked from one that uses gRPC. Torch-free and grpc-free.

gRPC's threads do not exist in a forked child, but its locks do: the first call of the child would
wait for ever; the guard makes that an error. Children that are started with a new interpreter
("spawn"), or forked before gRPC is first used, are fine.

So are forked children that use no gRPC, as the workers of a DataLoader, but only without gRPC's own
fork handlers, which crash them: our threads are inside gRPC at that moment. gRPC reads the setting
as it loads.
"""

import logging
import os
import sys

from stagemesh.errors import ConfigError

logger = logging.getLogger(__name__)

_SETTING = "GRPC_ENABLE_FORK_SUPPORT"


class ForkGuard:
    """Remembers which process first used gRPC, and whether its fork handlers are off."""

    def __init__(self) -> None:
        self._process_id: int | None = None
        self._is_late = False

    def turn_off_handlers(self) -> None:
        """Let gRPC load without its fork handlers, unless the environment has decided."""
        if _SETTING in os.environ:
            return
        self._is_late = "grpc" in sys.modules
        os.environ[_SETTING] = "0"

    def warn_if_late(self) -> None:
        """Say so when gRPC had been loaded before its handlers were turned off."""
        if self._is_late:
            logger.warning(
                "gRPC was loaded before stagemesh.comm: forked DataLoader workers may crash. "
                "Import stagemesh.comm first, or set %s=0 in the environment",
                _SETTING,
            )

    def check(self) -> None:
        """Note that this process uses gRPC now.

        Raises:
            ConfigError: an ancestor did before it was forked.
        """
        process_id = os.getpid()
        if self._process_id is None:
            self._process_id = process_id
        if self._process_id != process_id:
            raise ConfigError(
                f"process {process_id} was forked from process {self._process_id}, which uses gRPC "
                "already: fork after connect is unsupported. Start the child with "
                "multiprocessing.get_context('spawn'), or fork before the first connection"
            )


PROCESS_GUARD = ForkGuard()
"""The one of this process: gRPC's own state is per process, too."""

"""An error in place of a hang, in a process that was forked from one that uses gRPC. Torch-free.

gRPC's threads do not exist in a forked child, but its locks do: the first call of the child would
wait for ever. Children that are started with a new interpreter ("spawn"), or forked before gRPC is
first used, are fine.
"""

import os

from stagemesh.errors import ConfigError


class ForkGuard:
    """Remembers which process first used gRPC."""

    def __init__(self) -> None:
        self._process_id: int | None = None

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

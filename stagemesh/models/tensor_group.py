"""The ranks that run a stage together: what each has, how they meet, and how they end."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, StagemeshError
from stagemesh.placement.tensor_shares import TensorShares

# How long a rank waits for the others to load: disks differ more than the ranks' compute does.
_LOAD_SECONDS = 600.0


class TensorGroup:
    """The ranks that run a stage together, seen from one of them."""

    def __init__(
        self, process_group: ProcessGroup, shares: TensorShares, *, is_direct: bool = True
    ) -> None:
        """Divide a stage between the ranks of a group.

        Args:
            process_group: of the stage's ranks alone, in rank order; nothing else may use it while
                the stage lives.
            shares: what each has.
            is_direct: whether the threads that compute connect with each other, where they can.

        Raises:
            ConfigError: the group has another number of ranks than the shares.
        """
        if process_group.size != shares.num_ranks:
            raise ConfigError(
                f"the shares are of {shares.num_ranks} ranks, group "
                f"{process_group.group_id} has {process_group.size}"
            )
        self.process_group = process_group
        self.shares = shares
        self.sums = DirectGroup(process_group)
        """Adds up what the ranks compute; see `meet`."""
        self._is_direct = is_direct

    @property
    def rank(self) -> int:
        """This rank."""
        return self.process_group.rank

    @property
    def num_kv_heads(self) -> int:
        """KV heads that this rank has."""
        start, end = self.shares.kv_range(self.rank)
        return end - start

    @property
    def first_word(self) -> int:
        """The first of this rank's words."""
        return self.shares.vocab_range(self.rank)[0]

    def meet(self, told: tuple[object, ...], *, room: int) -> int:
        """Wait until all ranks have loaded, and refuse ranks that do not fit each other.

        Then the ranks connect directly.

        Args:
            told: what this rank was told beside the shares; must be the same on all.
            room: tokens for which this rank has room.

        Returns:
            Tokens for which each rank has room.

        Raises:
            ConfigError: a rank was told something else.
        """
        text = repr((self.shares, told))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        own = torch.tensor([digest, room])
        by_rank = own.new_empty((self.process_group.size, 2))
        self.process_group.all_gather_tensor(by_rank, own, timeout=_LOAD_SECONDS)
        digests = by_rank[:, 0].tolist()
        others = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if others:
            raise ConfigError(
                f"ranks {others} of group {self.process_group.group_id} were told another model, "
                "dtype, span of layers or other shares than rank 0"
            )
        if self._is_direct:
            self.sums.connect()
        return int(by_rank[:, 1].min())

    @contextmanager
    def aborting(self, what: str, *, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """End the group when the block fails: the other ranks stop waiting for this one.

        Args:
            what: is done in the block, for the others' error.
            refusals: what all ranks raise alike, before any of them waits for another.
        """
        is_done = False
        try:
            yield
            is_done = True
        finally:
            error = sys.exception()
            if not is_done and not isinstance(error, refusals):
                node = self.process_group.members[self.rank].node_id
                cause = (
                    f"rank {self.rank} (node {node}) failed in {what}: "
                    f"{type(error).__name__}: {error}"
                )
                # A group that has ended already must not hide why.
                with suppress(StagemeshError):
                    self.process_group.abort(cause)

"""Who holds how much of the KV cache, counted in tokens.

One number is enough for a pipeline: every rank of every stage holds its part of each token of each
session, so the rank with the least room bounds all. A sequence reserves its whole length when it is
admitted and gives it back when it ends, so what runs always has room to its end and nothing is ever
preempted. The price is that an answer shorter than its `max_tokens` holds room that it doesn't use.
"""

from stagemesh.errors import ConfigError
from stagemesh.layout import Plan


def kv_capacity_tokens(plan: Plan) -> int:
    """Tokens that the pipeline's KV caches hold: those of the rank with the least room.

    Raises:
        ConfigError: when no stage has a cache, so that there is no bound.
    """
    rooms = [
        rank.kv_cache_bytes // rank.kv_bytes_per_token
        for stage in plan.stages
        for rank in stage.ranks
        if rank.kv_bytes_per_token > 0
    ]
    if not rooms:
        raise ConfigError("no stage of the plan has KV-cache bytes per token")
    return min(rooms)


class KVBudget:
    """Reservations of tokens under a capacity."""

    def __init__(self, *, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
        self.capacity_tokens = capacity_tokens
        self._reserved: dict[int, int] = {}
        self._total = 0

    @property
    def reserved_tokens(self) -> int:
        """Tokens that are reserved."""
        return self._total

    def fits(self, num_tokens: int) -> bool:
        """Whether so many tokens are free."""
        return self._total + num_tokens <= self.capacity_tokens

    def reserve(self, session_id: int, *, num_tokens: int) -> None:
        """Reserve for a session that has none."""
        assert self.fits(num_tokens), f"session {session_id}: {num_tokens} tokens are not free"
        assert session_id not in self._reserved, f"session {session_id} reserved twice"
        self._reserved[session_id] = num_tokens
        self._total += num_tokens

    def release(self, session_id: int) -> None:
        """Give a session's reservation back."""
        self._total -= self._reserved.pop(session_id)

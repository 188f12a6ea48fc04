"""Keys and values of the sessions that a stage serves.

A session owns one contiguous block, [layers, 2, kv_heads, capacity, head_dim] in most families:
reading it needs no copy and no table, and growing it is one copy for all layers, between steps. The
cache as a whole is bounded in bytes; who is admitted is the scheduler's decision, the bound here is
the last guard.
"""

from dataclasses import dataclass

import torch

from stagemesh.errors import CapacityExceeded, ProtocolError
from stagemesh.models.kv_shape import KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of one token's keys and values on a stage."""

    num_layers: int
    """Layers of the stage."""
    num_kv_heads: int
    """Key/value heads of each layer."""
    head_dim: int
    """Elements of a head's key, and of its value."""
    dtype: torch.dtype
    """Element type."""
    device: torch.device
    """Where the cache lives."""
    shapes: tuple[KVShape, ...] | None = None
    """By layer, where layers differ from the numbers above; else None."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one session takes on the stage."""
        if self.shapes is not None:
            return sum(shape.num_elements for shape in self.shapes) * self.dtype.itemsize
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class Session:
    """Keys and values of one sequence.

    `length` tokens are held, `needed` will be after the running step, `capacity` have room.
    """

    __slots__ = ("_block", "capacity", "keys", "length", "needed", "values")

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.length = 0
        self.needed = 0
        self._allocate(layout, capacity)

    def _allocate(self, layout: KVLayout, capacity: int) -> None:
        self.capacity = capacity
        if layout.shapes is not None:
            self._block = torch.empty(
                capacity * sum(shape.num_elements for shape in layout.shapes),
                dtype=layout.dtype,
                device=layout.device,
            )
            self.keys, self.values = _views(self._block, layout.shapes, capacity)
            return
        self._block = torch.empty(
            (layout.num_layers, 2, layout.num_kv_heads, capacity, layout.head_dim),
            dtype=layout.dtype,
            device=layout.device,
        )
        # One view per layer, made once: slicing anew costs microseconds per layer and step.
        self.keys = [self._block[layer, 0] for layer in range(layout.num_layers)]
        self.values = [self._block[layer, 1] for layer in range(layout.num_layers)]

    def resize(self, layout: KVLayout, capacity: int) -> None:
        """Change the room to `capacity` tokens and keep the ones held."""
        old, old_keys, old_values = self._block, self.keys, self.values
        self._allocate(layout, capacity)
        if layout.shapes is None:
            self._block[..., : self.length, :].copy_(old[..., : self.length, :])
            return
        for new, held in ((self.keys, old_keys), (self.values, old_values)):
            for target, source in zip(new, held, strict=True):
                target[:, : self.length].copy_(source[:, : self.length])


def _views(
    block: torch.Tensor, shapes: tuple[KVShape, ...], capacity: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values [heads, capacity, dim] of each layer, one after the other in the block."""
    views: list[torch.Tensor] = []
    offset = 0
    for shape in shapes:
        for dim in (shape.key_dim, shape.value_dim):
            size = shape.num_heads * capacity * dim
            part = block[offset : offset + size]
            views.append(part.view(shape.num_heads, capacity, dim))
            offset += size
    return views[0::2], views[1::2]


class KVCache:
    """The sessions of a stage, bounded in bytes.

    Args:
        layout: shape of a token's keys and values.
        limit_bytes: bound of all sessions together.
        block_tokens: capacity is a multiple of this.
    """

    def __init__(self, layout: KVLayout, *, limit_bytes: int, block_tokens: int = 64) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._block_tokens = block_tokens
        self._sessions: dict[int, Session] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that hold memory."""
        return len(self._sessions)

    def reserve(self, session_id: int, *, start_position: int, num_tokens: int) -> Session:
        """Return the session with room for `num_tokens` more, creating it at position 0.

        Raises:
            ProtocolError: `start_position` is not where the session ends: a step was lost or came
                twice, and computing on would give wrong text.
            CapacityExceeded: the cache's limit would be passed.
        """
        session = self._sessions.get(session_id)
        held = 0 if session is None else session.length
        if start_position != held:
            raise ProtocolError(
                f"session {session_id} holds {held} tokens here, but the segment starts at "
                f"position {start_position}"
            )
        needed = start_position + num_tokens
        if session is None or needed > session.capacity:
            session = self._make_room(session_id, session, needed)
        session.needed = needed
        return session

    def _make_room(self, session_id: int, session: Session | None, needed: int) -> Session:
        capacity = self._fit(session, needed)
        if capacity is None:
            # Room that sessions took in advance goes back before anyone is refused.
            self._trim()
            capacity = self._fit(session, needed)
        if capacity is None:
            raise CapacityExceeded(
                f"the KV cache holds {self.used_bytes} of {self.limit_bytes} bytes and cannot give "
                f"session {session_id} room for {needed} tokens "
                f"({needed * self.layout.bytes_per_token} bytes)"
            )
        if session is None:
            session = self._sessions[session_id] = Session(self.layout, capacity)
            self.used_bytes += capacity * self.layout.bytes_per_token
        else:
            self._resize(session, capacity)
        return session

    def _fit(self, session: Session | None, needed: int) -> int | None:
        """Capacity of at least `needed` tokens that the limit allows, with room in advance."""
        own = 0 if session is None else session.capacity
        available = (self.limit_bytes - self.used_bytes) // self.layout.bytes_per_token + own
        # Doubling keeps the copies of a long answer to a constant factor.
        for tokens in (max(needed, 2 * own), needed):
            rounded = -(-tokens // self._block_tokens) * self._block_tokens
            if rounded <= available:
                return rounded
        return needed if needed <= available else None

    def _trim(self) -> None:
        """Cut every session to what it needs."""
        for session in self._sessions.values():
            if session.capacity > session.needed:
                self._resize(session, session.needed)

    def _resize(self, session: Session, capacity: int) -> None:
        self.used_bytes += (capacity - session.capacity) * self.layout.bytes_per_token
        session.resize(self.layout, capacity)

    def release(self, session_id: int) -> None:
        """Free a session's memory; unknown sessions were never started here and are ignored."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.used_bytes -= session.capacity * self.layout.bytes_per_token

    def clear(self) -> None:
        """Free all sessions."""
        self._sessions.clear()
        self.used_bytes = 0

"""How much memory the parameters take, measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpMemoryStats:
    """Bytes of parameters on one rank, by the dtypes that are really there."""

    total_parameter_bytes: int
    """All parameters whole, in the dtype they are stored in."""
    local_shard_bytes: int
    """This rank's shards, padding included."""
    gathered_bytes: int
    """Gathered parameters that are held now, in the dtype of the computation."""
    peak_gathered_bytes: int
    """The most that was held at once since the module was wrapped, or since `reset_peak_memory`."""

    @property
    def saved_bytes(self) -> int:
        """What this rank need not store."""
        return max(0, self.total_parameter_bytes - self.local_shard_bytes)

    @property
    def reduction_percent(self) -> float:
        """`saved_bytes` of the total, in percent; 0 when nothing is sharded."""
        if not self.total_parameter_bytes:
            return 0.0
        return 100.0 * self.saved_bytes / self.total_parameter_bytes


class MemoryMeter:
    """Counts the bytes of gathered parameters as they come and go."""

    def __init__(self) -> None:
        self._held = 0
        self._peak = 0

    @property
    def held_bytes(self) -> int:
        """Now."""
        return self._held

    @property
    def peak_bytes(self) -> int:
        """The most since the last `reset_peak`."""
        return self._peak

    def add(self, num_bytes: int) -> None:
        """Memory was taken."""
        self._held += num_bytes
        self._peak = max(self._peak, self._held)

    def remove(self, num_bytes: int) -> None:
        """Memory was given back."""
        self._held -= num_bytes

    def reset_peak(self) -> None:
        """Measure anew from what is held now."""
        self._peak = self._held

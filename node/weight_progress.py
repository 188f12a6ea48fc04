"""How far a node is with the weights of a stage that it takes from elsewhere."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FetchProgress:
    """Bytes of a stage's weights; written and read on the loop."""

    total_bytes: int = 0
    """Of the stage; 0 while it is not known."""
    present_bytes: int = 0
    """In the cache by now."""
    hashed_bytes: int = 0
    """What the coordinator has hashed since its start."""
    received: Counter[str] = field(default_factory=Counter)
    """Bytes that came over the network, by who sent them."""
    _present: dict[bytes, int] = field(default_factory=dict)

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the network."""
        return self.received.total()

    def set_present(self, content_hash: bytes, num_bytes: int) -> None:
        """So much of a tensor is in the cache."""
        self.present_bytes += num_bytes - self._present.get(content_hash, 0)
        self._present[content_hash] = num_bytes

"""KVShape: what a layer keeps of a token."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Keys and values that one layer keeps of one token."""

    num_heads: int
    """Key/value heads."""
    key_dim: int
    """Elements of a head's key."""
    value_dim: int
    """Elements of a head's value."""

    @property
    def num_elements(self) -> int:
        """Elements of all heads."""
        return self.num_heads * (self.key_dim + self.value_dim)

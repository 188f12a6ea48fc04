"""How a file holds a tensor where that is not how the model wants it. Torch-free.

Writers of GGUF files reorder rows, transpose matrices or add a number to the weights of norms. A
`TensorInfo` tells the model's shape and names; its `StoredForm` tells what reading has to undo.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stagemesh.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """An order of rows in a file that differs from the model's."""

    kind: Literal["pairs", "qkv"]
    """What the writer did.

    pairs: each head's rows went from two halves [2, D / 2] to neighbouring pairs [D / 2, 2].
    qkv: one matrix of queries, keys and values went from one group for each key/value head
    [num_kv_heads, num_heads / num_kv_heads + 2, D] to all queries, then all keys, then all values.
    """
    num_heads: int
    """Heads of the tensor; query heads for "qkv"."""
    num_kv_heads: int
    """Key/value heads; equal to `num_heads` for "pairs"."""

    def source_rows(self, num_rows: int, *, where: str) -> NDArray[np.int64]:
        """For each row of the model its row in the file.

        Args:
            num_rows: rows of the tensor.
            where: file and tensor, named in errors.

        Raises:
            CheckpointError: the heads do not divide the rows.
        """
        rows = np.arange(num_rows)
        if self.kind == "pairs":
            self._check(num_rows, 2 * self.num_heads, where=where)
            return rows.reshape(self.num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        self._check(num_rows, self.num_heads + 2 * self.num_kv_heads, where=where)
        self._check(self.num_heads, self.num_kv_heads, where=where)
        dim = num_rows // (self.num_heads + 2 * self.num_kv_heads)
        split = (self.num_heads * dim, (self.num_heads + self.num_kv_heads) * dim)
        parts = [part.reshape(self.num_kv_heads, -1, dim) for part in np.split(rows, split)]
        return np.concatenate(parts, axis=1).reshape(-1)

    def _check(self, number: int, divisor: int, *, where: str) -> None:
        if number % divisor:
            raise CheckpointError(
                f"{where}: {number} does not divide by {divisor}, as the order of the rows of "
                f"{self.num_heads} heads and {self.num_kv_heads} key/value heads needs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """What has to be undone on reading; by default nothing."""

    row_order: RowOrder | None = None
    """The order of the rows in the file."""
    is_transposed: bool = False
    """The file has the matrix [columns, rows]."""
    added: float = 0.0
    """What the writer added to each value."""

    def as_json(self) -> list[Any]:
        """For fingerprints."""
        order = self.row_order
        row_order = None if order is None else [order.kind, order.num_heads, order.num_kv_heads]
        return [row_order, self.is_transposed, self.added]


AS_IT_IS = StoredForm()
"""The file holds the tensor as the model wants it."""

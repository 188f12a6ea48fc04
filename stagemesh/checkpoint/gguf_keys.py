"""The metadata keys of one architecture in a GGUF file, checked as they are read. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, UnsupportedModel

# Keys below "{architecture}." that are read for every architecture.
_COMMON_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    }
)
# Keys that describe the file or its history and do not change the output.
_HARMLESS_KEYS = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})
_NEUTRAL_VALUES = (0, 0.0, False, "", None)


class GgufKeys:
    """The metadata below "{architecture}." and the tensors, with errors that name the key.

    Args:
        metadata: all keys of the file.
        architecture: which keys.
        tensors: by their names in the file.
        path: named in errors.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        *,
        architecture: str,
        tensors: Mapping[str, TensorInfo],
        path: str,
    ) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.tensors = tensors
        self.path = path
        self._prefix = f"{architecture}."

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuses a key that nobody reads: a silent default would give fluent nonsense."""
        all_known = _COMMON_KEYS | _HARMLESS_KEYS | frozenset(known)
        for key, value in self.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in all_known:
                continue
            if isinstance(value, list) or value not in _NEUTRAL_VALUES:
                raise UnsupportedModel(f"{self.path}: key {key!r} = {value!r:.80} is not supported")

    def get(self, name: str) -> Any:
        """The value as it is; None when absent."""
        return self.metadata.get(self._prefix + name)

    def number(self, name: str, *, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.metadata.get(self._prefix + name, default)
        # Written so that NaN fails, too.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise CheckpointError(
                f"{self.path}: key {self._prefix + name!r} must be a positive number, "
                f"got {value!r:.80}"
            )
        return value

    def count(self, name: str, *, default: int | None = None) -> int:
        """A positive integer, or a list of equal ones with an entry for each layer."""
        value = self.metadata.get(self._prefix + name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number per layer, all the same
        if isinstance(value, list):
            raise UnsupportedModel(
                f"{self.path}: key {self._prefix + name!r} differs between layers, "
                "which is not supported"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.path}: key {self._prefix + name!r} must be a positive integer, "
                f"got {value!r:.80}"
            )
        return value

    def token_id(self, name: str) -> int | None:
        """An id of the tokenizer's keys; None when absent."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def rows(self, tensor: str, *, axis: int = 0) -> int:
        """Length of an axis of a tensor that must be there."""
        info = self.tensors.get(tensor)
        if info is None or len(info.shape) <= axis:
            raise CheckpointError(f"{self.path}: tensor {tensor} is missing or has too few axes")
        return info.shape[axis]

    def has(self, tensor: str) -> bool:
        """Whether the file holds a tensor."""
        return tensor in self.tensors

    def refuse(self, problem: str) -> UnsupportedModel:
        """The error for `problem`, to be raised by the caller."""
        return UnsupportedModel(f"{self.path}: {problem}")

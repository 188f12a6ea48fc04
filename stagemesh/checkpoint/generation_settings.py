"""What a model's files say about how to draw tokens: the defaults of a request. Torch-free."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_LOG = logging.getLogger(__name__)

# Keys of a GGUF file below "general.sampling.", and the same in generation_config.json.
_GGUF_NAMES = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)
_LIMITS = MappingProxyType(
    {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "top_k": (0, 2**31 - 1), "min_p": (0, 1.0)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that leaves a field out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def generation_config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would hold; empty where the file says nothing."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF_NAMES.items()}
    return {name: value for name, value in found.items() if value is not None}


def sampling_defaults(
    generation_config: Mapping[str, Any], *, where: str | None = None
) -> SamplingDefaults:
    """The settings that are known here; one that is no number in its range is left out.

    Args:
        generation_config: content of generation_config.json.
        where: named in a warning of what is left out; without it there is none.
    """
    found: dict[str, Any] = {}
    for name, (low, high) in _LIMITS.items():
        value = generation_config.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or math.isnan(value) or not low <= value <= high:
            if where is not None:
                _LOG.warning("%s: generation setting %s = %.80r is not used", where, name, value)
            continue
        found[name] = int(value) if name == "top_k" else float(value)
    return SamplingDefaults(**found)

"""Context and concurrency that a placement gets: as asked, or the most that fits."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from coordinator.config import DeploymentConfig
from coordinator.model_cost import NodeCapacity, held_model_cost
from coordinator.partitioner import partition
from coordinator.shared_partitioner import partition_shared
from stagemesh.errors import PlacementError
from stagemesh.layout import Plan
from stagemesh.model_spec import ModelSpec

T = TypeVar("T")

logger = logging.getLogger(__name__)

_DEFAULT_CONCURRENCY = 4
_LEAST_CONTEXT_TOKENS = 512


def run_dtype(config: DeploymentConfig, spec: ModelSpec) -> str:
    """The dtype to run in: asked for, or the checkpoint's own."""
    if config.dtype != "auto":
        return config.dtype
    encodings = {info.encoding for info in spec.tensors.values() if len(info.shape) > 1}
    if encodings == {"BF16"}:
        return "bfloat16"
    return "float16" if encodings == {"F16"} and spec.format == "safetensors" else "float32"


def fit_plan(config: DeploymentConfig, spec: ModelSpec, nodes: Sequence[NodeCapacity]) -> Plan:
    """Place the model by memory alone.

    Raises:
        PlacementError: it does not fit with what the user set, or not even at the least.
    """
    cost = held_model_cost(spec, dtype=run_dtype(config, spec), quantize=config.quantize)

    def share(context: int, concurrency: int) -> Plan:
        return partition_shared(
            model=cost,
            nodes=nodes,
            degrees=_degrees(config, num_nodes=len(nodes)),
            max_context_tokens=context,
            concurrency=concurrency,
        )

    def attempt(context: int, concurrency: int) -> Plan:
        return partition(
            model=cost,
            nodes=nodes,
            max_context_tokens=context,
            concurrency=concurrency,
            num_stages=config.num_stages,
            max_stages=config.max_stages,
        )

    return fit(config, spec, share if config.is_shared else attempt)


def _degrees(config: DeploymentConfig, *, num_nodes: int) -> tuple[int, ...]:
    """Ranks of each stage: as said, or as many stages as there are nodes for."""
    if config.stage_ranks is not None:
        return config.stage_ranks
    (degree,) = config.tp
    most = max(1, num_nodes // degree)
    return (degree,) * min(most, config.max_stages or most)


def fit(config: DeploymentConfig, spec: ModelSpec, attempt: Callable[[int, int], T]) -> T:
    """What `attempt` makes of the first context and concurrency that it does not refuse.

    What the user left open shrinks: first fewer full-length sequences at once, then a shorter
    context; what the user set stays.

    Raises:
        PlacementError: the first refusal, when all are refused.
    """
    first_error: PlacementError | None = None
    for context, concurrency in _choices(config, spec.max_context_tokens):
        try:
            result = attempt(context, concurrency)
        except PlacementError as error:
            first_error = first_error or error
            continue
        if first_error is not None:
            logger.warning(
                "memory holds less than the default",
                extra={"max_context_tokens": context, "concurrency": concurrency},
            )
        return result
    assert first_error is not None
    raise first_error


def _choices(config: DeploymentConfig, model_context: int) -> list[tuple[int, int]]:
    """Pairs of context and concurrency to try, best first."""
    contexts = [config.max_context_tokens or model_context]
    while config.max_context_tokens is None and contexts[-1] // 2 >= _LEAST_CONTEXT_TOKENS:
        contexts.append(contexts[-1] // 2)
    counts = [config.concurrency or _DEFAULT_CONCURRENCY]
    while config.concurrency is None and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return [(contexts[0], count) for count in counts] + [(c, counts[-1]) for c in contexts[1:]]

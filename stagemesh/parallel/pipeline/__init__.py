"""Pipeline parallelism: the stages of a model on several ranks, micro-batches through them."""

from stagemesh.parallel.pipeline.pipeline_parallel import PipelineParallel
from stagemesh.parallel.pipeline.results import StepResult
from stagemesh.parallel.pipeline.split import (
    LlamaStage,
    even_counts,
    split_layers,
    split_llama,
    split_sequential,
)
from stagemesh.parallel.pipeline.tied import TiedParameters

__all__ = [
    "LlamaStage",
    "PipelineParallel",
    "StepResult",
    "TiedParameters",
    "even_counts",
    "split_layers",
    "split_llama",
    "split_sequential",
]

"""What a stage computes for a prompt, and how far two results are apart."""

import torch

from stagemesh.inference.stage_engine import StageEngine
from stagemesh.steps import SamplingParams, Segment, Step


def logits_of(engine: StageEngine, prompt: list[int]) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    hook = engine.stage.model.register_forward_hook(
        lambda _module, _args, output: kept.append(output.logits[0].float().clone())
    )
    segment = Segment(
        session_id=1,
        start_position=0,
        num_tokens=len(prompt),
        sampling=SamplingParams(),
        target_token_ids=tuple(prompt),
    )
    engine.run(Step(step_id=1, segments=(segment,), token_ids=tuple(prompt)), None)
    hook.remove()
    return kept[0]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())

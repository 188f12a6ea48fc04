"""A pipeline without a network: engines called one after the other, and their reference."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import SampledToken, SamplingParams, Segment, Step

GREEDY = SamplingParams()


class StageChain:
    """The stages of a model in one process.

    `logits` holds those that the last stage computed, [n, V] per step that needed some.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        num_stages: int = 1,
        sizes: Sequence[int] | None = None,
        dtype: str = "float32",
        compile_folder: Path | None = None,
    ) -> None:
        spec = load_model_spec(model)
        sizes = sizes or even_sizes(spec.num_layers, num_stages)
        self.engines: list[StageEngine] = []
        start = 0
        for size in sizes:
            self.engines.append(
                StageEngine.load(
                    spec,
                    start_layer=start,
                    end_layer=start + size,
                    dtype=dtype,
                    device=torch.device("cpu"),
                    kv_limit_bytes=2**28,
                    compile_folder=compile_folder,
                )
            )
            start += size
        assert start == spec.num_layers
        self.logits: list[torch.Tensor] = []
        self._next_step_id = 1
        self.engines[-1].stage.model.register_forward_hook(
            lambda _module, _args, output: self.logits.append(output.logits[0].float().clone())
        )

    def run(
        self, segments: Sequence[Segment], token_ids: Sequence[int], *, release: Sequence[int] = ()
    ) -> tuple[SampledToken, ...]:
        """One step through all stages."""
        activation = None
        for engine in self.engines:
            step = Step(
                step_id=self._next_step_id,
                segments=tuple(segments),
                token_ids=tuple(token_ids) if engine is self.engines[0] else (),
                release_session_ids=tuple(release),
            )
            output = engine.run(step, activation)
            activation = output.activation
        self._next_step_id += 1
        return output.tokens

    def generate(
        self, prompt: Sequence[int], count: int, *, session_id: int = 1, chunk: int | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits [len(prompt) + count - 1, V] at every position.

        Args:
            prompt: the prompt's ids.
            count: tokens to generate.
            session_id: of the session, which is freed afterwards.
            chunk: prefill in pieces of this many tokens.
        """
        self.logits.clear()
        prompt = list(prompt)
        chunk = chunk or len(prompt)
        pieces = [prompt[start : start + chunk] for start in range(0, len(prompt), chunk)]
        position = 0
        tokens: list[int] = []
        while len(tokens) < count:
            piece = pieces.pop(0) if pieces else tokens[-1:]
            is_last = not pieces
            segment = Segment(
                session_id=session_id,
                start_position=position,
                num_tokens=len(piece),
                sampling=GREEDY if is_last else None,
                target_token_ids=tuple(piece),  # so that each position's logits are computed
            )
            (sampled,) = self.run([segment], piece)
            position += len(piece)
            if is_last:
                assert sampled.token_id is not None
                tokens.append(sampled.token_id)
        self.run([], [], release=[session_id])
        return tokens, torch.cat(self.logits)


def even_sizes(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, the larger ones first."""
    size, rest = divmod(num_layers, num_stages)
    return [size + (index < rest) for index in range(num_stages)]


def assert_same_logits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within 1e-5 of the largest logit."""
    assert got.shape == expected.shape
    limit = 1e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=limit)


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] of one forward without a cache."""
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


@torch.no_grad()
def reference_tokens(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own generate, with its own cache."""
    inputs = torch.tensor([list(prompt)])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=-1,  # none: the comparison goes on over it
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()

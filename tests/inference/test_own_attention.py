"""Families that compute attention themselves: ragged steps, chunks, and refusals before loading."""

from pathlib import Path

import pytest
import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.steps import SamplingParams, Segment
from tests.support.stage_chain import StageChain
from tools.families.tiny_configs import tiny_model

PROMPTS = {1: [3, 14, 15, 92, 65, 35, 89], 2: [79, 32, 38], 3: [46, 26, 43, 38, 32]}


def segment(session_id: int, start: int, ids: list[int]) -> Segment:
    return Segment(
        session_id=session_id,
        start_position=start,
        num_tokens=len(ids),
        sampling=SamplingParams(),
        target_token_ids=tuple(ids),  # so that each position's logits are computed
    )


@pytest.mark.parametrize("family", ["bloom", "falcon", "gpt_neo"])
def test_sessions_of_one_step_get_what_each_gets_alone(tmp_path: Path, family: str) -> None:
    """Position biases, rotary positions and windows of one sequence must not see another's."""
    tiny_model(family).save_pretrained(tmp_path)
    chain = StageChain(tmp_path, sizes=(2, 2))
    assert all(engine.stage.has_own_attention for engine in chain.engines)
    alone = {s: chain.generate(prompt, 4) for s, prompt in PROMPTS.items()}
    _, in_chunks = chain.generate(PROMPTS[1], 4, chunk=2)
    torch.testing.assert_close(in_chunks, alone[1][1], rtol=0, atol=1e-4)
    fed = {s: [*PROMPTS[s], *tokens[:-1]] for s, (tokens, _) in alone.items()}
    done = dict.fromkeys(PROMPTS, 0)
    for step in range(4):
        parts = {s: ids if not step else [fed[s][done[s]]] for s, ids in PROMPTS.items()}
        chain.logits.clear()
        segments = [segment(s, done[s], ids) for s, ids in parts.items()]
        chain.run(segments, [token for ids in parts.values() for token in ids])
        rows = [alone[s][1][done[s] : done[s] + len(ids)] for s, ids in parts.items()]
        torch.testing.assert_close(torch.cat(chain.logits), torch.cat(rows), rtol=0, atol=1e-4)
        done = {s: done[s] + len(ids) for s, ids in parts.items()}


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("openai-gpt", r"openai-gpt: attention came by layers \[\]"),
        ("jamba", "its layers keep a recurrent state"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, message: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)

    def read(*_: object, **__: object) -> None:
        pytest.fail("a weight was read")

    monkeypatch.setattr("stagemesh.models.weights.WeightReader.read", read)
    with pytest.raises(UnsupportedModel, match=message):
        StageChain(tmp_path, num_stages=2)

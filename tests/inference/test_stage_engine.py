"""Stages of a model against the whole of it, for steps that mix prefills and decodes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stagemesh.errors import CapacityExceeded, ProtocolError
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.steps import SampledToken, SamplingParams, Segment, Step
from tests.support.checkpoints import tiny_model, write_flat_model, write_model
from tests.support.stage_chain import (
    GREEDY,
    StageChain,
    assert_same_logits,
    reference_logits,
    reference_tokens,
)

PROMPTS = {1: [3, 14, 15, 92, 65], 2: [35, 89], 3: [79, 32, 38, 46, 26, 43, 38, 32, 79], 4: [50]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", tiny_model("llama"))


def segment(session_id: int, start: int, count: int, **fields: object) -> Segment:
    return Segment(
        session_id=session_id,
        start_position=start,
        num_tokens=count,
        **({"sampling": GREEDY} | fields),  # type: ignore[arg-type]
    )


def run_ragged(chain: StageChain) -> dict[int, list[int]]:
    """Four sessions in steps that mix prefills, chunks and decodes; their tokens."""
    tokens: dict[int, list[int]] = {session: [] for session in PROMPTS}
    sent = dict.fromkeys(PROMPTS, 0)

    def step(plan: dict[int, int]) -> None:
        segments, ids = [], []
        for session, count in plan.items():
            known = PROMPTS[session] + tokens[session]
            start = sent[session]
            ids += known[start : start + count]
            sent[session] = start + count
            is_last = start + count == len(known)
            segments.append(segment(session, start, count, sampling=GREEDY if is_last else None))
        for session, sampled in zip(plan, chain.run(segments, ids), strict=True):
            if sampled.token_id is not None:
                tokens[session].append(sampled.token_id)

    step({1: 5})
    step({2: 2, 1: 1, 3: 4})
    step({3: 3, 1: 1, 4: 1, 2: 1})
    step({1: 1, 2: 1, 3: 2, 4: 1})
    for _ in range(6):
        step({4: 1, 3: 1, 2: 1, 1: 1})
    return tokens


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 2, 1), (1, 1, 1, 1)])
def test_ragged_steps_give_each_session_its_own_tokens(folder: Path, sizes: tuple[int]) -> None:
    model = tiny_model("llama")
    got = run_ragged(StageChain(folder, sizes=sizes))
    for session, prompt in PROMPTS.items():
        assert got[session] == reference_tokens(model, prompt, len(got[session]))
        assert len(got[session]) >= 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_of_stages_are_those_of_the_whole_bit_for_bit(folder: Path, dtype: str) -> None:
    whole = StageChain(folder, dtype=dtype)
    cut = StageChain(folder, sizes=(1, 2, 1), dtype=dtype)
    assert run_ragged(whole) == run_ragged(cut)
    assert len(whole.logits) == len(cut.logits) > 5
    for a, b in zip(whole.logits, cut.logits, strict=True):
        assert torch.equal(a, b)


def test_draws_are_those_of_the_whole(tmp_path: Path) -> None:
    folder = write_flat_model(tmp_path / "flat")

    def text(chain: StageChain, seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        ids, position, drawn = [5, 6, 7], 0, []
        for _ in range(20):
            (sampled,) = chain.run([segment(1, position, len(ids), sampling=params)], ids)
            position += len(ids)
            ids = [sampled.token_id or 0]
            drawn += ids
        chain.run([], [], release=[1])
        return drawn

    whole, cut = StageChain(folder), StageChain(folder, sizes=(1, 1))
    assert text(whole, 42) == text(cut, 42) == text(whole, 42)
    assert text(whole, 7) == text(cut, 7) != text(whole, 42)


def test_log_probabilities_and_prompt_scores(folder: Path) -> None:
    model = tiny_model("llama")
    chain = StageChain(folder, num_stages=2)
    prompt = PROMPTS[3]
    params = SamplingParams(logprobs=True, num_top_logprobs=3)
    targets = (*prompt[1:], 7)
    scored = segment(
        1, 0, len(prompt), sampling=params, target_token_ids=targets, num_target_top_logprobs=2
    )
    other = segment(2, 0, 2, sampling=None)
    first, second = chain.run([scored, other], [*prompt, 1, 2])
    expected = torch.log_softmax(reference_logits(model, prompt), dim=-1)
    assert second == SampledToken(session_id=2)
    assert first.token_id == int(expected[-1].argmax())
    assert first.logprob == pytest.approx(float(expected[-1].max()), abs=1e-5)
    assert [entry.token_id for entry in first.top] == expected[-1].topk(3).indices.tolist()
    got = torch.tensor([score.logprob for score in first.target_scores])
    torch.testing.assert_close(got, expected[range(9), targets], rtol=0, atol=1e-5)
    for score, row in zip(first.target_scores, expected, strict=True):
        assert [entry.token_id for entry in score.top] == row.topk(2).indices.tolist()


def test_a_step_without_segments_only_releases(folder: Path) -> None:
    chain = StageChain(folder, num_stages=2)
    chain.run([segment(1, 0, 3), segment(2, 0, 2)], [1, 2, 3, 4, 5])
    assert [engine.cache.num_sessions for engine in chain.engines] == [2, 2]
    assert chain.run([], [], release=[1]) == ()
    assert [engine.cache.num_sessions for engine in chain.engines] == [1, 1]
    chain.run([segment(3, 0, 1)], [1], release=[2, 99])
    chain.run([], [], release=[3])
    assert [engine.cache.used_bytes for engine in chain.engines] == [0, 0]


def test_a_released_session_leaves_nothing_to_the_next_with_its_number(folder: Path) -> None:
    chain = StageChain(folder, num_stages=2)
    first, _ = chain.generate(PROMPTS[1], 6)
    chain.generate(PROMPTS[3], 9)
    again, _ = chain.generate(PROMPTS[1], 6)
    assert again == first


WRONG_STEPS: dict[str, Callable[[], Step]] = {
    "too few token ids": lambda: Step(step_id=1, segments=(segment(1, 0, 3),), token_ids=(1, 2)),
    "no token ids": lambda: Step(step_id=1, segments=(segment(1, 0, 3),)),
    "outside the vocabulary of 100": lambda: Step(
        step_id=1, segments=(segment(1, 0, 1),), token_ids=(100,)
    ),
    "starts at position 4": lambda: Step(step_id=1, segments=(segment(1, 4, 1),), token_ids=(1,)),
    "more than one segment of session 1": lambda: Step(
        step_id=1, segments=(segment(1, 0, 1), segment(1, 0, 1)), token_ids=(1, 2)
    ),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_changes_nothing(folder: Path, name: str) -> None:
    chain = StageChain(folder)
    messages = {"too few token ids": "2 token ids for 3", "no token ids": "0 token ids for 3"}
    with pytest.raises(ProtocolError, match=messages.get(name, name)):
        chain.engines[0].run(WRONG_STEPS[name](), None)
    assert chain.engines[0].cache.used_bytes == 0
    tokens, _ = chain.generate(PROMPTS[1], 5)
    assert tokens == reference_tokens(tiny_model("llama"), PROMPTS[1], 5)


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (None, r"shape \[3, 32\], got None"),
        (torch.zeros(2, 32), r"shape \[3, 32\], got \[2, 32\]"),
        (torch.zeros(3, 31), r"shape \[3, 32\], got \[3, 31\]"),
        (torch.zeros(1, 3, 32), r"shape \[3, 32\], got \[1, 3, 32\]"),
        (torch.zeros(3, 32, dtype=torch.bfloat16), "activation of torch.bfloat16"),
    ],
)
def test_a_wrong_activation_is_refused(
    folder: Path, activation: torch.Tensor | None, message: str
) -> None:
    engine = StageChain(folder, num_stages=2).engines[1]
    with pytest.raises(ProtocolError, match=message):
        engine.run(Step(step_id=1, segments=(segment(1, 0, 3),)), activation)
    assert engine.cache.used_bytes == 0


def test_a_full_cache_refuses_the_step_and_keeps_what_it_had(folder: Path) -> None:
    chain = StageChain(folder)
    engine: StageEngine = chain.engines[0]
    engine.cache.limit_bytes = 10 * engine.cache.layout.bytes_per_token
    chain.run([segment(1, 0, 5)], PROMPTS[1])
    with pytest.raises(CapacityExceeded):
        chain.run([segment(2, 0, 2), segment(3, 0, 9)], [*PROMPTS[2], *PROMPTS[3]])
    assert engine.cache.num_sessions == 1
    tokens = []
    for position in range(5, 9):
        (sampled,) = chain.run([segment(1, position, 1)], [7])
        tokens.append(sampled.token_id)
    expected = reference_logits(tiny_model("llama"), [*PROMPTS[1], 7, 7, 7, 7])
    assert tokens == expected[5:].argmax(-1).tolist()


def test_an_error_inside_the_model_leaves_the_sessions_where_they_were(folder: Path) -> None:
    chain = StageChain(folder)
    chain.run([segment(1, 0, 5)], PROMPTS[1])
    layer = chain.engines[0].stage.model.base_model.layers[2]
    hook = layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chain.run([segment(1, 5, 1)], [7])
    hook.remove()
    (sampled,) = chain.run([segment(1, 5, 1)], [7])
    expected = reference_logits(tiny_model("llama"), [*PROMPTS[1], 7])
    assert sampled.token_id == int(expected[-1].argmax())


def test_warm_up_leaves_no_trace(folder: Path) -> None:
    for engine in StageChain(folder, num_stages=3).engines:
        assert (engine.cache.used_bytes, engine.cache.num_sessions) == (0, 0)
        assert engine.cache.limit_bytes == 2**28


def test_a_prompt_of_each_length_up_to_two_blocks(folder: Path) -> None:
    """Lengths around the cache's block of 64 tokens, in one model of 128 positions."""
    model = tiny_model("llama")
    chain = StageChain(folder, num_stages=2)
    for length in (1, 2, 63, 64, 65, 120):
        prompt = [(7 * i + length) % 100 for i in range(length)]
        tokens, logits = chain.generate(prompt, 4)
        assert_same_logits(logits, reference_logits(model, prompt + tokens[:-1]))

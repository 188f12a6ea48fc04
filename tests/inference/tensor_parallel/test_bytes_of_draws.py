"""Bytes that ranks send each other for a step's tokens: candidates, never rows of logits."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.direct_message import HEAD_BYTES
from stagemesh.comm.direct_sockets import SocketLinks
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.inference.vocab_parallel import draw_over_ranks
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import SamplingParams, Segment, Step
from tests.support.checkpoints import write_tiny_checkpoint
from tests.support.ranks import run_ranks
from tests.support.tensor_stages import load_rank, shares_of

HIDDEN = 32
SAMPLINGS = {
    "greedy": SamplingParams(),
    "log-probabilities": SamplingParams(logprobs=True, num_top_logprobs=20),
    "by chance": SamplingParams(temperature=1.0, seed=1),
    "top_k and top_p": SamplingParams(temperature=1.0, seed=1, top_k=40, top_p=0.9),
}
# Four histograms of 4 KiB for each of two filters, and their heads; the others need far less.
MOST_BYTES = {name: 40_000 if "top_k" in name else 1_500 for name in SAMPLINGS}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[SocketLinks]:
    """Bytes that each rank has written to the sockets of its thread."""
    counts: Counter[SocketLinks] = Counter()
    swap, pair = SocketLinks.swap, SocketLinks.pair

    def counted_swap(self: SocketLinks, outgoing: Any, *args: Any, **kwargs: Any) -> None:
        counts[self] += sum(len(piece) for pieces in outgoing.values() for piece in pieces)
        swap(self, outgoing, *args, **kwargs)

    def counted_pair(self: SocketLinks, message: memoryview, *args: Any, **kwargs: Any) -> bool:
        counts[self] += len(message)
        return pair(self, message, *args, **kwargs)

    monkeypatch.setattr(SocketLinks, "swap", counted_swap)
    monkeypatch.setattr(SocketLinks, "pair", counted_pair)
    return counts


def bytes_of_a_draw(
    sent: Counter[SocketLinks], sampling: SamplingParams, *, vocab_size: int
) -> int:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(1))
    segment = Segment(session_id=1, start_position=3, num_tokens=1, sampling=sampling)

    def run(group: ProcessGroup) -> None:
        sums = DirectGroup(group)
        sums.connect(within_process=True, shares_memory=False)
        assert sums.is_direct
        half = vocab_size // 2
        own = logits[:, group.rank * half : (group.rank + 1) * half]
        draw_over_ranks(
            [segment],
            own.clone(),
            process_group=sums,
            first_word=group.rank * half,
            vocab_size=vocab_size,
        )

    sent.clear()
    run_ranks(2, run, backend="grpc")
    assert len(sent) == 2
    return max(sent.values())


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draw_costs_the_same_for_any_vocabulary(sent: Counter[SocketLinks], name: str) -> None:
    small, large = (
        bytes_of_a_draw(sent, SAMPLINGS[name], vocab_size=size) for size in (2_000, 200_000)
    )
    assert small == large < MOST_BYTES[name]
    assert large < 200_000 // 2 * 4 / 10  # a rank's logits


def test_whole_rows_are_beyond_the_bound(sent: Counter[SocketLinks]) -> None:
    """The negative control: ranks that gather their logits."""

    def run(group: ProcessGroup) -> None:
        sums = DirectGroup(group)
        sums.connect(within_process=True, shares_memory=False)
        own = torch.zeros(1, 100_000)
        sums.all_gather_tensor(own.new_empty(2, 1, 100_000), own)

    run_ranks(2, run, backend="grpc")
    assert max(sent.values()) > max(MOST_BYTES.values())


def test_a_step_of_the_last_stage_sends_sums_and_candidates(
    sent: Counter[SocketLinks], tmp_path: Path
) -> None:
    words, layers, tokens = 5_000, 2, 3
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=3, vocab_size=words))

    def run(group: ProcessGroup) -> None:
        engine = load_rank(spec, group, shares_of(spec, 2), layers=(1, 3))
        tensor_group = engine.stage.tensor_group
        assert tensor_group is not None
        tensor_group.sums.connect(within_process=True, shares_memory=False)
        activation = torch.ones(tokens, HIDDEN)
        engine.run(_step(1, 0, tokens), activation)
        engine.run(_step(2, tokens, 1), activation[:1])

    run_ranks(2, run, backend="grpc")
    sums = 2 * layers * (HEAD_BYTES + tokens * HIDDEN * 4 + HEAD_BYTES + HIDDEN * 4)
    candidates: Sequence[int] = [count - sums for count in sent.values()]
    assert len(candidates) == 2
    assert all(0 < count < 1_000 < words // 2 * 4 for count in candidates), candidates


def _step(step_id: int, start: int, count: int) -> Step:
    segment = Segment(
        session_id=1, start_position=start, num_tokens=count, sampling=SamplingParams()
    )
    return Step(step_id=step_id, segments=(segment,), token_ids=())

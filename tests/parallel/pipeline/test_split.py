"""Cutting models into stages; a Llama of transformers in stages equals the whole."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.parallel.pipeline import (
    PipelineParallel,
    even_counts,
    split_layers,
    split_llama,
    split_sequential,
)
from tests.support.ranks import run_ranks


def make_llama(*, is_tied: bool, attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_even_counts(num_layers: int, num_stages: int, expected: list[int]) -> None:
    assert even_counts(num_layers, num_stages=num_stages) == expected


def test_stages_keep_the_names_of_the_model() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])
    for stages in (
        split_sequential(model, counts=[1, 3, 1]),
        split_layers(list(model), counts=[1, 3, 1]),
    ):
        merged = {k: v for stage in stages for k, v in stage.state_dict().items()}
        assert merged.keys() == model.state_dict().keys()
        assert all(merged[key] is not None for key in merged)
        x = torch.randn(3, 2)
        y = x
        for stage in stages:
            y = stage(y)
        assert torch.equal(y, model(x))


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (lambda m: even_counts(2, num_stages=3), "2 layers cannot fill 3 stages"),
        (lambda m: split_sequential(m, counts=[1, 1]), r"add up to 3 layers, got \[1, 1\]"),
        (lambda m: split_layers(list(m), counts=[3, 0]), r"must be positive .* got \[3, 0\]"),
    ],
)
def test_counts_that_do_not_fit_are_refused(cut, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cut(nn.Sequential(*[nn.Identity() for _ in range(3)]))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "counts"),
    [
        ("one_f_one_b", 2, [1, 3]),
        ("zero_bubble", 3, [1, 2, 1]),
        ("interleaved", 2, [1, 1, 1, 1]),
        ("gpipe", 1, [4]),
    ],
)
def test_a_llama_in_stages_trains_as_the_whole(
    schedule: str, num_ranks: int, counts: list[int], is_tied: bool
) -> None:
    reference = make_llama(is_tied=is_tied)
    model = copy.deepcopy(reference)
    batches = [
        torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    ]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for tokens in batches:
        optimizer.zero_grad()
        loss = token_loss(reference(tokens[:, :-1]).logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def run(group: ProcessGroup) -> Any:
        stages = split_llama(copy.deepcopy(model), counts=counts)[group.rank :: group.size]
        pipeline = PipelineParallel(
            stages,
            process_group=group,
            num_microbatches=2,
            schedule=schedule,
            loss_fn=token_loss,
            tied_parameters=[p for stage in stages for p in stage.tied_parameters],
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
        for tokens in batches:
            optimizer.zero_grad()
            result = pipeline.step(tokens[:, :-1], tokens[:, 1:], share_loss=True)
            optimizer.step()
        named = [item for stage in stages for item in stage.named_parameters()]
        return result.loss.item(), {name: (p.grad, p.detach()) for name, p in named}

    results = run_ranks(num_ranks, run)
    parameters = {**dict(reference.named_parameters()), "lm_head.weight": reference.lm_head.weight}
    for loss_here, stage_parameters in results:
        assert loss_here == pytest.approx(loss.item(), rel=1e-5)
        for name, (gradient, value) in stage_parameters.items():
            right = parameters[name]
            torch.testing.assert_close(gradient, right.grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(value, right.detach(), rtol=1e-5, atol=1e-6)
    found = {name for _, stage_parameters in results for name in stage_parameters}
    assert found - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
    if is_tied and num_ranks > 1:
        embedding = results[0][1]["model.embed_tokens.weight"][1]
        head = results[-1][1]["lm_head.weight"][1]
        assert torch.equal(embedding, head)


def test_attention_that_would_look_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa'"):
        split_llama(make_llama(is_tied=False, attention="eager"), counts=[4])

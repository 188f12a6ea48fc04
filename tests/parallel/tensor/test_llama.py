"""Models of transformers, cut by their own plans, against the same models in one piece."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.parallel.tensor.plan import parallelize
from stagemesh.parallel.tensor.state import gather_full_state_dict, tensor_shard_of
from stagemesh.parallel.tensor.transformers_plan import VocabParallelLoss, transformers_plan
from tests.parallel.tensor.support import (
    FP32_TOLERANCE,
    CountedGroup,
    built,
    relative_error,
    train,
    trained_on_ranks,
    worst_error,
)
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(kind: type[PreTrainedConfig] = LlamaConfig, **changes: Any) -> PreTrainedModel:
    config = kind(**(SIZES | changes))
    return built(lambda: AutoModelForCausalLM.from_config(config))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, 11), generator=torch.Generator().manual_seed(step))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    ids = batch(step % 2)
    return model(input_ids=ids, labels=ids).loss


def cut(
    model: PreTrainedModel, group: ProcessGroup, *, shares: Any = None, vocab: Any = "replicated"
) -> PreTrainedModel:
    plan = transformers_plan(model, num_ranks=group.size, shares=shares, vocab=vocab)
    parallelize(model, plan, process_group=group)
    if vocab == "local":
        sizes = model.get_output_embeddings().sizes
        model.loss_function = VocabParallelLoss(group, sizes=sizes)
    return model


@pytest.mark.parametrize(
    ("world_size", "shares", "vocab", "changes", "backend"),
    [
        (1, None, "local", {}, "local"),
        (2, None, "replicated", {"num_key_value_heads": 2}, "local"),
        (2, None, "local", {"num_key_value_heads": 2}, "grpc"),
        (2, None, "gathered", {"num_key_value_heads": 2, "tie_word_embeddings": True}, "gloo"),
        (2, (1, 2), "local", {"attention_bias": True, "mlp_bias": True}, "local"),
        (2, (3, 2), "local", {"tie_word_embeddings": True}, "local"),
        (3, None, "local", {}, "local"),
        (3, (1, 2, 3), "local", {"num_attention_heads": 12, "num_key_value_heads": 6}, "local"),
    ],
)
def test_a_llama_trains_as_in_one_piece(
    world_size: int, shares: Any, vocab: Any, changes: dict[str, Any], backend: str
) -> None:
    model = tiny(**changes)
    whole = copy.deepcopy(model)
    options = {"num_steps": 20, "lr": 0.02, "momentum": 0.9}
    expected = train(whole, loss_of, **options)
    assert expected[-1] < 0.97 * expected[0]
    results = trained_on_ranks(
        model,
        lambda own, group: cut(own, group, shares=shares, vocab=vocab),
        loss_of,
        world_size=world_size,
        backend=backend,
        **options,
    )
    for losses, weights in results:
        assert losses == pytest.approx(expected, rel=FP32_TOLERANCE)
        assert worst_error(weights, whole.state_dict()) < FP32_TOLERANCE


def test_with_adamw_too() -> None:
    model = tiny(num_key_value_heads=2)
    whole = copy.deepcopy(model)
    options = {"num_steps": 20, "lr": 1e-3, "optimizer": torch.optim.AdamW}
    expected = train(whole, loss_of, **options)
    results = trained_on_ranks(
        model,
        lambda own, group: cut(own, group, vocab="local"),
        loss_of,
        world_size=2,
        **options,
    )
    for losses, weights in results:
        assert losses == pytest.approx(expected, rel=FP32_TOLERANCE)
        assert worst_error(weights, whole.state_dict()) < FP32_TOLERANCE


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, Phi3Config, Olmo2Config, Gemma2Config])
def test_other_families_have_the_same_gradients(kind: type[PreTrainedConfig]) -> None:
    changes: dict[str, Any] = {"head_dim": 8} if kind in (Qwen3Config, Gemma2Config) else {}
    if kind is Gemma2Config:  # whose capped attention scores SDPA does not have
        changes["attn_implementation"] = "eager"
    model = tiny(kind, num_key_value_heads=2, **changes)
    vocab = "replicated" if kind is Gemma2Config else "local"
    whole = copy.deepcopy(model)
    loss_of(whole, 0).backward()

    def run(group: ProcessGroup) -> Any:
        own = cut(copy.deepcopy(model), group, vocab=vocab)
        loss = loss_of(own, 0)
        loss.backward()
        return loss.item(), _whole_gradients(own, group)

    for loss, gradients in run_ranks(2, run):
        assert loss == pytest.approx(loss_of(whole, 0).item(), rel=FP32_TOLERANCE)
        expected = {name: p.grad for name, p in whole.named_parameters()}
        assert worst_error(gradients, expected) < FP32_TOLERANCE


def _whole_gradients(own: torch.nn.Module, group: ProcessGroup) -> dict[str, torch.Tensor]:
    """Puts the gradients in the place of the parameters, and gathers as if they were those."""
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(parameter.grad)
    names = dict(own.named_parameters())
    full = gather_full_state_dict(own, process_group=group)
    return {name: full[name] for name in names}


def test_a_norm_of_heads_without_its_sum_is_noticed() -> None:
    """Negative control: the query norm sees only the rank's heads."""
    model = tiny(Qwen3Config, num_key_value_heads=2, head_dim=8)
    whole = copy.deepcopy(model)
    loss_of(whole, 0).backward()
    name = "model.layers.0.self_attn.q_norm.weight"

    def run(group: ProcessGroup) -> torch.Tensor:
        own = copy.deepcopy(model)
        plan = transformers_plan(own, num_ranks=2)
        parallelize(own, {k: v for k, v in plan.items() if "norm" not in k}, process_group=group)
        loss_of(own, 0).backward()
        return own.get_parameter(name).grad

    for grad in run_ranks(2, run):
        assert relative_error(grad, whole.get_parameter(name).grad) > 0.1


def test_bf16_stays_close_to_one_piece() -> None:
    model = tiny(num_key_value_heads=2).to(torch.bfloat16)
    whole = copy.deepcopy(model)
    options = {"num_steps": 5, "lr": 0.05}
    expected = train(whole, loss_of, **options)
    results = trained_on_ranks(
        model, lambda own, group: cut(own, group, vocab="local"), loss_of, world_size=2, **options
    )
    for losses, weights in results:
        # bf16 has 8 bits: each sum of partial results rounds once more than in one piece.
        assert losses == pytest.approx(expected, rel=2e-2)
        assert worst_error(weights, whole.state_dict()) < 2e-2


def test_under_autocast_gradients_stay_close_to_fp32() -> None:
    model = tiny(num_key_value_heads=2)
    whole = copy.deepcopy(model)
    loss_of(whole, 0).backward()

    def run(group: ProcessGroup) -> Any:
        own = cut(copy.deepcopy(model), group, vocab="local")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(own, 0)
        loss.backward()
        return _whole_gradients(own, group)

    expected = {name: p.grad for name, p in whole.named_parameters()}
    for gradients in run_ranks(2, run):
        assert 1e-5 < worst_error(gradients, expected) < 5e-2


def test_activation_checkpointing_changes_nothing() -> None:
    model = tiny(num_key_value_heads=2)
    whole = copy.deepcopy(model)
    loss_of(whole, 0).backward()

    def run(group: ProcessGroup) -> Any:
        own = cut(copy.deepcopy(model), group, vocab="local")
        own.activation_checkpointing_enable()
        own.train()
        loss_of(own, 0).backward()
        return _whole_gradients(own, group)

    expected = {name: p.grad for name, p in whole.named_parameters()}
    for gradients in run_ranks(2, run):
        assert worst_error(gradients, expected) < FP32_TOLERANCE


def test_a_step_makes_two_all_reduces_per_block_and_direction() -> None:
    model = tiny(num_key_value_heads=2)

    def run(group: ProcessGroup) -> tuple[list[str], list[str]]:
        counted: Any = CountedGroup(group)
        own = cut(copy.deepcopy(model), counted, vocab="local")
        counted.calls.clear()
        loss = loss_of(own, 0)
        forward = list(counted.calls)
        counted.calls.clear()
        loss.backward()
        return forward, counted.calls

    for forward, backward in run_ranks(2, run):
        # Embedding, then attention and MLP of two layers; the loss in a single gather.
        assert forward == ["all_reduce"] * 5 + ["all_gather_tensor"]
        # Head, then one for gate and up, one for q, k and v, of two layers.
        assert backward == ["all_reduce"] * 5


def test_whole_logits_without_autograd() -> None:
    model = tiny().eval()
    with torch.no_grad():
        expected = model(batch(0)).logits

    def run(group: ProcessGroup) -> torch.Tensor:
        own = cut(copy.deepcopy(model), group, vocab="gathered")
        with torch.inference_mode():
            logits = own(batch(0)).logits
        assert logits.grad_fn is None
        return logits

    for logits in run_ranks(3, run):
        assert relative_error(logits, expected) < FP32_TOLERANCE


def test_each_rank_holds_its_share() -> None:
    model = tiny()

    def run(group: ProcessGroup) -> Any:
        own = cut(copy.deepcopy(model), group, shares=(1, 2), vocab="local")
        return {name: tuple(p.shape) for name, p in own.named_parameters()}, [
            name for name, p in own.named_parameters() if tensor_shard_of(p) is None
        ]

    (small, replicated), (large, _) = run_ranks(2, run)
    layer = "model.layers.0."
    # Three key/value heads of 8, each read by two query heads: cut 1 and 2.
    assert (small[layer + "self_attn.q_proj.weight"], large[layer + "self_attn.q_proj.weight"]) == (
        (16, 48),
        (32, 48),
    )
    assert (small[layer + "self_attn.k_proj.weight"], large[layer + "self_attn.k_proj.weight"]) == (
        (8, 48),
        (16, 48),
    )
    assert small[layer + "self_attn.o_proj.weight"] == (48, 16)
    assert (small["lm_head.weight"], large["lm_head.weight"]) == ((32, 48), (64, 48))
    assert all("norm" in name for name in replicated)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "shares", "words"),
    [
        ({}, 2, None, ["key/value heads", "of 3", "2 ranks"]),
        ({}, 4, (1, 1, 1, 1), ["key/value heads", "of 3", "4 ranks"]),
        ({}, 3, (1, 1), ["one per rank, 3"]),
        ({"intermediate_size": 70}, 3, None, ["gate_proj", "70", "3 ranks"]),
    ],
)
def test_what_cannot_be_cut_is_refused(
    changes: dict[str, Any], num_ranks: int, shares: Any, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        transformers_plan(tiny(**changes), num_ranks=num_ranks, shares=shares)
    for word in words:
        assert word in str(raised.value)


def test_models_without_a_plan_or_with_an_unknown_style_are_refused() -> None:
    model = tiny()
    model.config.base_model_tp_plan = {"layers.*.mlp": "moe_tp_experts"}
    with pytest.raises(UnsupportedModel, match="moe_tp_experts"):
        transformers_plan(model, num_ranks=1)
    model.config.base_model_tp_plan = None
    with pytest.raises(UnsupportedModel, match="carries no"):
        transformers_plan(model, num_ranks=1)


def test_an_embedding_that_does_more_than_look_up_is_refused() -> None:
    model = tiny(Gemma2Config, num_key_value_heads=2, head_dim=8, attn_implementation="eager")

    def run(group: ProcessGroup) -> None:
        with pytest.raises(UnsupportedModel, match=r"embed_tokens.*ScaledWordEmbedding"):
            cut(copy.deepcopy(model), group, vocab="local")

    run_ranks(2, run)


def test_a_tied_head_must_be_cut_with_its_embedding() -> None:
    model = tiny(num_key_value_heads=2, tie_word_embeddings=True)

    def run(group: ProcessGroup) -> None:
        own = copy.deepcopy(model)
        with pytest.raises(ConfigError, match="tied"):
            parallelize(own, {"lm_head": "vocab_head"}, process_group=group)
        assert own.lm_head.weight is own.model.embed_tokens.weight
        cut(own, group, vocab="local")
        assert own.lm_head.weight is own.model.embed_tokens.weight

    run_ranks(2, run)

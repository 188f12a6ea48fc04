"""Stages that several ranks run, against transformers in one process."""

from pathlib import Path

import pytest
import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.model_spec import load_model_spec
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.steps import SamplingParams
from tests.support.checkpoints import (
    edit_config,
    tiny_model,
    write_flat_model,
    write_model,
    write_tiny_checkpoint,
    write_tiny_gguf,
)
from tests.support.ranks import run_ranks
from tests.support.stage_chain import StageChain, reference_logits, reference_tokens
from tests.support.tensor_stages import generate_on_ranks, load_rank, shares_of, whole_logits
from tools.families.tiny_configs import tiny_model as sparse_model

PROMPT = [3, 14, 15, 92, 65, 35, 89]
PHI3 = {"pad_token_id": 0}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
FAMILIES: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma2", {"sliding_window": 4}),
    ("gemma3_text", {"sliding_window": 4}),
    ("phi3", PHI3),
    ("olmo2", {}),
    ("mistral", {"sliding_window": 4}),
    ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 5.0}),
    ("glm4", {"pad_token_id": 0}),
    ("starcoder2", {"use_bias": True}),
    ("cohere", {"use_qk_norm": True}),
    ("phi", {"num_key_value_heads": 4}),
    ("smollm3", {"pad_token_id": 0}),
    ("exaone4", {"sliding_window": 4}),
    ("olmo3", {"sliding_window": 4}),
    ("granite_swa", {"pad_token_id": 0}),  # a sink for each head
    ("vaultgemma", {}),
    ("gpt_neox", {"num_key_value_heads": 4}),
]


def assert_like_transformers(
    folder: Path, degrees: tuple[int, ...], *, count: int = 8, **settings: object
) -> None:
    model, prompt = settings.pop("model"), settings.pop("prompt", PROMPT)
    runs = generate_on_ranks(folder, prompt, count, degrees=degrees, **settings)  # type: ignore[arg-type]
    expected = reference_tokens(model, prompt, count)  # type: ignore[arg-type]
    assert [run.tokens for run in runs] == [expected] * sum(degrees)
    logits = reference_logits(model, [*prompt, *expected[:-1]])  # type: ignore[arg-type,misc]
    torch.testing.assert_close(whole_logits(runs), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=[name for name, _ in FAMILIES])
@pytest.mark.parametrize("tp", [2, 4])
def test_families(tmp_path: Path, family: str, config: dict[str, object], tp: int) -> None:
    """Four ranks of two KV heads share each of them."""
    model = tiny_model(family, num_layers=2, **config)
    assert_like_transformers(write_model(tmp_path / "m", model), (tp,), model=model)


@pytest.mark.parametrize("degrees", [(1,), (2,), (3,), (2, 2), (1, 1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_several_degrees(tmp_path: Path, degrees: tuple[int, ...], *, tied: bool) -> None:
    """Tied tables are cut alike at both ends, also when these are different stages."""
    model = tiny_model("llama", num_layers=3, tie_word_embeddings=tied, num_key_value_heads=4)
    folder = write_model(tmp_path / "m", model)
    assert_like_transformers(folder, degrees, model=model, chunk=3)


def test_a_config_without_the_tie_key(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=3)
    folder = write_model(tmp_path / "m", model)
    edit_config(folder, {}, remove=["tie_word_embeddings"])
    assert_like_transformers(folder, (2, 2), model=model)


SIZES = [
    # heads, KV heads, head dim, hidden, MLP columns, ranks
    (9, 3, 8, 36, 50, 2),
    (6, 2, 8, 48, 100, 4),
    (12, 2, 4, 48, 100, 8),
    (8, 2, 8, 64, 64, 4),
    (4, 4, 8, 32, 100, 3),
    (4, 1, 8, 32, 64, 3),
    (4, 2, 32, 64, 64, 2),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_ranks_do_not_divide(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    heads, kv_heads, head_dim, hidden, columns, tp = sizes
    model = tiny_model(
        "llama",
        num_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=columns,
        vocab_size=101,
    )
    assert_like_transformers(write_model(tmp_path / "m", model), (tp,), model=model)


def test_a_hidden_size_that_the_heads_do_not_divide(tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model = tiny_model("mistral", num_layers=2, **sizes)
    assert_like_transformers(write_model(tmp_path / "m", model), (2,), model=model)


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2"])
def test_shares_of_unequal_ranks(tmp_path: Path, family: str) -> None:
    config = PHI3 if family == "phi3" else {}
    model = tiny_model(family, num_layers=2, hidden_size=48, **HEADS, **config)
    shares = TensorShares.of_groups(
        kv_groups=(2, 1), mlp_columns=(37, 27), num_heads=6, num_kv_heads=3, vocab_size=100
    )
    folder = write_model(tmp_path / "m", model)
    assert_like_transformers(folder, (2,), model=model, shares=[shares])


def test_a_stage_that_has_only_the_dense_layers_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """Shares are of the experts' columns there, too, and dense layers are wider."""
    model = sparse_model("deepseek_v3", {"first_k_dense_replace": 2})
    model.save_pretrained(tmp_path / "m")
    shares = TensorShares.divide(
        num_ranks=2, num_heads=4, num_kv_heads=4, mlp_columns=16, vocab_size=100, weights=(3, 1)
    )
    assert_like_transformers(tmp_path / "m", (2, 2), model=model, shares=[shares, shares])


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
def test_other_backends(tmp_path: Path, backend: str) -> None:
    model = tiny_model("llama", num_layers=2)
    folder = write_model(tmp_path / "m", model)
    assert_like_transformers(folder, (2, 1), model=model, backend=backend)


@pytest.mark.parametrize("matrix_type", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf_files(tmp_path: Path, family: str, matrix_type: str) -> None:
    """Rows that the writer permuted within heads, and columns that end within a block of 32."""
    path = write_tiny_gguf(tmp_path, family, num_layers=2, matrix_type=matrix_type)
    expected, logits = StageChain(path).generate(PROMPT, 6)
    spec = load_model_spec(path)
    for shares in (shares_of(spec, 2), shares_of(spec, 2, weights=[3, 2]), shares_of(spec, 4)):
        degrees = (shares.num_ranks,)
        runs = generate_on_ranks(path, PROMPT, 6, degrees=degrees, shares=[shares])
        assert [run.tokens for run in runs] == [expected] * shares.num_ranks
        torch.testing.assert_close(whole_logits(runs), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_come_near(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", num_layers=2)
    runs = generate_on_ranks(folder, PROMPT, 1, degrees=(2,), dtype=dtype)
    expected = reference_logits(tiny_model("llama", num_layers=2), PROMPT)
    error = (whole_logits(runs) - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.03


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.05, "num_top_logprobs": 3},
    ],
)
def test_drawn_text_is_that_of_one_rank(tmp_path: Path, params: dict[str, float]) -> None:
    flat, peaked = write_flat_model(tmp_path / "f"), write_tiny_checkpoint(tmp_path / "m")
    for path in (flat, peaked):
        sampling = SamplingParams(seed=42, **params)  # type: ignore[arg-type]
        texts = [
            generate_on_ranks(path, PROMPT, 8, degrees=degrees, sampling=sampling)[0].tokens
            for degrees in ((1,), (3,), (1, 2))
        ]
        assert texts[0] == texts[1] == texts[2]
        assert len(set(texts[0])) > 3


def test_log_probabilities_and_scores_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", num_layers=2)
    sampling = SamplingParams(logprobs=True, num_top_logprobs=5)
    (alone,) = generate_on_ranks(folder, PROMPT, 4, degrees=(1,), sampling=sampling)
    for run in generate_on_ranks(folder, PROMPT, 4, degrees=(3,), sampling=sampling):
        for got, expected in zip(run.sampled, alone.sampled, strict=True):
            assert got.token_id == expected.token_id
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [t.token_id for t in got.top] == [t.token_id for t in expected.top]
            values = [s.logprob for s in expected.target_scores]
            assert [s.logprob for s in got.target_scores] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize(
    ("family", "style", "message"),
    [
        ("llama", {}, r"llama.*no tensor-parallel plan"),
        ("llama", {"layers.*.self_attn.q_proj": "all_reduce"}, r"q_proj .* 'all_reduce'"),
        ("llama", {"layers.*.mlp.up_proj": "colwise"}, "does not cut the attention of layer 0"),
        ("llama", {"layers.*.self_attn": "colwise"}, r"self_attn \(LlamaAttention\) cannot be cut"),
        ("llama", {"layers.*.mlp.up_proj": "colwise_gather_output"}, "up_proj in the style"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_weight_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    style: dict[str, str] | None,
    message: str,
) -> None:
    model = tiny_model(family, num_layers=2)
    folder = write_model(tmp_path / "m", model)
    spec = load_model_spec(folder)
    (folder / "model.safetensors").unlink()
    if style is not None:
        monkeypatch.setattr(type(model.config), "base_model_tp_plan", style)
    with pytest.raises(UnsupportedModel, match=message):
        run_ranks(2, lambda group: load_rank(spec, group, shares_of(spec, 2)))


def test_a_kv_head_paired_with_other_query_heads_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: each rank takes the KV head of its number, as a plain cut would."""
    model = tiny_model("llama", num_layers=2)
    folder = write_model(tmp_path / "m", model)
    monkeypatch.setattr(TensorShares, "kv_range", lambda _self, rank: (rank % 2, rank % 2 + 1))
    runs = generate_on_ranks(folder, PROMPT, 1, degrees=(4,))
    difference = whole_logits(runs) - reference_logits(model, PROMPT)
    assert float(difference.abs().max()) > 0.01

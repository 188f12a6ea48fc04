"""docs/models.md says of each causal family of transformers what the code does with it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.families.parity import YES, check_ranks, check_stages, examine
from tools.families.table import read
from tools.families.tiny_configs import causal_families, tiny_model

# A kind of attention, of layer, of checkpoint or of refusal each.
FAST = [
    *("gpt2", "opt", "bloom", "falcon", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text"),
    *("mimo_v2_flash", "nanochat", "aria_text", "ctrl", "mamba"),
]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAST)
def test_the_table_says_what_the_code_does(tmp_path: Path, family: str) -> None:
    assert examine(family, tmp_path) == read()[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in causal_families() if f not in FAST])
def test_the_table_says_what_the_code_does_with_the_others(tmp_path: Path, family: str) -> None:
    assert examine(family, tmp_path) == read()[family]


def test_the_table_has_all_families_and_enough_that_work() -> None:
    rows = read()
    assert sorted(rows) == causal_families()
    with_stages = [row for row in rows.values() if row.stages == YES]
    with_ranks = [row for row in rows.values() if row.tensor_parallel == YES]
    assert len(with_stages) >= 60
    assert len(with_ranks) >= 40
    for kind in ("mixture of experts", "sliding window", "soft caps", "sinks"):
        assert any(kind in row.notes for row in with_ranks), kind


@pytest.mark.parametrize("check", [check_stages, check_ranks])
def test_one_wrong_expert_is_seen(tmp_path: Path, check: object) -> None:
    """The negative control: two experts of one layer have changed places in the files."""
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    first, second = (f"model.layers.2.block_sparse_moe.experts.{i}.w2.weight" for i in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="logits differ"):
        check(tmp_path, model)  # type: ignore[operator]


def test_sinks_of_other_heads_are_seen(tmp_path: Path) -> None:
    """The negative control: the sinks of two heads, which two ranks have, have changed places."""
    model = tiny_model("gpt_oss")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    sinks = tensors["model.layers.2.self_attn.sinks"]
    tensors["model.layers.2.self_attn.sinks"] = sinks.flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="logits differ"):
        check_ranks(tmp_path, model)

"""What the builder refuses, and what it leaves in a stage."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.inference import attention
from stagemesh.model_spec import load_model_spec
from stagemesh.models.builder import StageModel, build_stage
from stagemesh.models.identity_check import check_identity
from stagemesh.models.placeholders import Elsewhere, Passthrough
from tests.support.checkpoints import edit_tensors, tiny_model, write_model, write_tiny_checkpoint

CPU = torch.device("cpu")


def build(folder: Path, start: int = 0, end: int = 4, dtype: str = "float32") -> StageModel:
    attention.register()
    return build_stage(
        load_model_spec(folder),
        start_layer=start,
        end_layer=end,
        dtype=dtype,
        device=CPU,
        attention=attention.ATTENTION_NAME,
    )


@pytest.mark.parametrize(
    ("start", "end", "held"),
    [
        (0, 4, {"embedding", "norm", "head", 0, 1, 2, 3}),
        (0, 1, {"embedding", 0}),
        (1, 3, {1, 2}),
        (3, 4, {"norm", "head", 3}),
    ],
)
def test_a_stage_holds_its_parts_only(
    tmp_path: Path, start: int, end: int, held: set[int | str]
) -> None:
    stage = build(write_tiny_checkpoint(tmp_path / "m"), start, end)
    base = stage.model.base_model
    assert {i for i, layer in enumerate(base.layers) if not isinstance(layer, Passthrough)} == {
        part for part in held if isinstance(part, int)
    }
    assert isinstance(base.embed_tokens, nn.Embedding) == ("embedding" in held)
    assert isinstance(base.norm, Passthrough) == ("norm" not in held)
    assert isinstance(stage.model.lm_head, Elsewhere) == ("head" not in held)
    assert (stage.is_first, stage.is_last) == ("embedding" in held, "head" in held)
    assert not [name for name, value in stage.model.named_parameters() if value.requires_grad]
    assert not stage.model.training


def test_what_is_elsewhere_says_so_when_it_is_used() -> None:
    with pytest.raises(UnsupportedModel, match="no output head"):
        Elsewhere("output head")(torch.zeros(1))
    probe = torch.randn(1, 2, 3)
    assert Passthrough()(probe, "anything", mask=None) is probe


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.layers.2.self_attn.v_proj.weight", (2, 4)),
        ("model.layers.0.input_layernorm.weight", (0, 1)),
        ("model.norm.weight", (3, 4)),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str, stage: tuple[int, int]) -> None:
    # Each layer loses it, so that no layer lacks what another has.
    leaf = name.split(".", 3)[-1] if ".layers." in name else name
    folder = write_tiny_checkpoint(tmp_path / "m")
    edit_tensors(folder, lambda all_: {k: v for k, v in all_.items() if not k.endswith(leaf)})
    with pytest.raises(CheckpointError, match=f"no tensor {name}".replace(".", r"\.")):
        build(folder, *stage)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder, lambda all_: all_ | {name: all_[name].T.contiguous()})
    with pytest.raises(CheckpointError, match=rf"{name} .*\[32, 64\].* needs \[64, 32\]"):
        build(folder)
    build(folder, 2, 4)  # which does not need it


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 2), (0, 5), (-1, 2), (4, 5)])
def test_a_range_outside_of_the_model_is_refused(tmp_path: Path, start: int, end: int) -> None:
    with pytest.raises(ConfigError, match=r"not within the model's \[0, 4\)"):
        build(write_tiny_checkpoint(tmp_path / "m"), start, end)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16, got 'int8'"):
        build(write_tiny_checkpoint(tmp_path / "m"), dtype="int8")


@pytest.mark.parametrize("family", ["granite", "gemma2", "llama", "phi", "cohere"])
@pytest.mark.parametrize("part", [(1, 3), (2, 4)])
def test_a_later_stage_changes_nothing_outside_of_its_layers(
    tmp_path: Path, family: str, part: tuple[int, int]
) -> None:
    config = {"embedding_multiplier": 12.0} if family == "granite" else {}
    stage = build(write_tiny_checkpoint(tmp_path / "m", family, **config), *part)
    before = list(stage.model.base_model.children())
    check_identity(stage.model, outline=stage.outline, dtype=stage.dtype, device=CPU)
    assert list(stage.model.base_model.children()) == before


class Halving(nn.Module):
    """A rotary embedding that halves the activation it is shown, as a forward may in place."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> object:
        x.mul_(0.5)
        return self._rotary(x, *args, **kwargs)


def test_a_forward_that_changes_the_activation_is_refused_by_name(tmp_path: Path) -> None:
    """The negative control, with a scale and with a change in place."""
    stage = build(write_tiny_checkpoint(tmp_path / "g", "granite"), 2, 4)
    stage.model.base_model.embedding_multiplier = 12.0
    with pytest.raises(UnsupportedModel, match="granite: its forward changes the activation"):
        check_identity(stage.model, outline=stage.outline, dtype=stage.dtype, device=CPU)
    stage = build(write_tiny_checkpoint(tmp_path / "l"), 2, 4)
    base = stage.model.base_model
    base.rotary_emb = Halving(base.rotary_emb)
    with pytest.raises(UnsupportedModel, match="llama: its forward changes the activation"):
        check_identity(stage.model, outline=stage.outline, dtype=stage.dtype, device=CPU)


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma3_text", "olmo3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buffers_are_those_of_a_model_that_transformers_loads(
    tmp_path: Path, family: str, dtype: str
) -> None:
    model = tiny_model(family)
    folder = write_model(tmp_path / "m", model)
    expected = dict(
        type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).named_buffers()
    )
    got = dict(build(folder, dtype=dtype).model.named_buffers())
    assert got.keys() == expected.keys() != set()
    for name, value in expected.items():
        # A scale is kept in full precision here and rounded where it is used, by the family.
        assert torch.equal(got[name].to(value.dtype), value), name
        assert got[name].dtype in (value.dtype, torch.float32)


def test_stages_of_different_dtypes_can_be_built_at_the_same_time(tmp_path: Path) -> None:
    """torch's default dtype is the process's; two nodes in one process must not share it."""
    folder = write_tiny_checkpoint(tmp_path / "m")
    dtypes = ["bfloat16", "float32", "float16", "bfloat16"] * 4
    seen: set[torch.dtype] = set()
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            seen.add(torch.get_default_dtype())
            time.sleep(0.0005)

    with ThreadPoolExecutor(5) as pool:
        pool.submit(watch)
        stages = list(pool.map(lambda dtype: build(folder, 1, 3, dtype), dtypes))
        is_done.set()
    for stage, dtype in zip(stages, dtypes, strict=True):
        assert {p.dtype for p in stage.model.parameters()} == {getattr(torch, dtype)}
        assert stage.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    assert seen == {torch.float32}


def test_a_stored_buffer_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("apertus")
    names = [name for name in model.state_dict() if name.endswith((".beta", ".eps"))]
    folder = write_model(tmp_path / "m", model)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.mlp\.act_fn\."):
        build(folder)
    values = {name: torch.full_like(model.state_dict()[name], 0.625) for name in names}
    edit_tensors(folder, lambda all_: all_ | values)
    got = build(folder).model.state_dict()
    assert len(names) == 8
    assert all(float(got[name]) == 0.625 for name in names)

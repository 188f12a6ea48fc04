"""When a stage is not compiled: it says why, and serves."""

from pathlib import Path

import pytest
import torch

from coordinator.config import DeploymentConfig
from stagemesh.errors import ConfigError
from stagemesh.inference.compiled.stage_compiler import check_can_compile
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.models.packed_linear import PackedLinear, can_pack
from tests.support.checkpoints import write_tiny_checkpoint


def load(model: Path, folder: Path) -> StageEngine:
    spec = load_model_spec(model)
    return StageEngine.load(
        spec,
        start_layer=0,
        end_layer=spec.num_layers,
        dtype="float32",
        device=torch.device("cpu"),
        kv_limit_bytes=2**28,
        compile_folder=folder,
    )


def num_packed(engine: StageEngine) -> int:
    return sum(isinstance(module, PackedLinear) for module in engine.stage.model.modules())


def test_without_a_compiler_the_stage_stays_eager_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = write_tiny_checkpoint(tmp_path / "model", num_layers=2)
    engine = load(model, tmp_path / "cache")
    assert engine.execution.startswith("eager: there is no C++ compiler; install g++")
    assert engine.compiler is not None
    assert engine.compiler.is_settled
    # The linears were kept plain for the compiler; now they are as in any eager stage.
    assert num_packed(engine) == (2 * 7 + 1 if can_pack(engine.device) else 0)


def test_a_family_that_computes_attention_itself_stays_eager_by_name(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "nemotron", num_layers=2)
    engine = load(model, tmp_path / "cache")
    assert engine.execution == "eager: the family's own code computes attention"


def test_code_is_not_taken_from_where_others_can_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    engine = load(write_tiny_checkpoint(tmp_path / "model", num_layers=2), folder)
    assert engine.execution.startswith(f"eager: others can write to {folder}")


def test_a_stage_that_was_not_asked_to_compile_does_not(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", num_layers=2)
    spec = load_model_spec(model)
    engine = StageEngine.load(
        spec,
        start_layer=0,
        end_layer=2,
        dtype="float32",
        device=torch.device("cpu"),
        kv_limit_bytes=2**28,
    )
    assert (engine.execution, engine.compiler) == ("eager", None)


def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path) -> None:
    check_can_compile(tmp_path, quantize="none", is_shared=False)
    check_can_compile(None, quantize="int8", is_shared=True)
    with pytest.raises(ConfigError, match="quantised weights"):
        check_can_compile(tmp_path, quantize="int8", is_shared=False)
    with pytest.raises(ConfigError, match="tensor-parallel ranks"):
        check_can_compile(tmp_path, quantize="none", is_shared=True)
    with pytest.raises(ConfigError, match="quantize is int4"):
        DeploymentConfig(model="m", compile=True, quantize="int4")
    with pytest.raises(ConfigError, match="ranks share"):
        DeploymentConfig(model="m", compile=True, tp=(2,))
    assert DeploymentConfig(model="m", compile=True).compile

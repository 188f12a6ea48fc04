"""One family's tiny checkpoint in stages and on ranks, against transformers in one process."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from stagemesh.checkpoint.refused_families import REFUSED_FAMILIES
from stagemesh.errors import UnsupportedModel
from stagemesh.model_spec import load_model_spec
from stagemesh.models.family_config import computes_attention_itself
from stagemesh.placement.tensor_shares import TensorShares
from tests.support.stage_chain import StageChain, reference_logits
from tests.support.tensor_stages import generate_on_ranks, whole_logits
from tools.families.tiny_configs import VOCAB_SIZE, tiny_model

PROMPT = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26)
NUM_TOKENS = 16
TOLERANCE = 1e-4
"""Of a logit, or of the largest one where that is above 1."""

YES = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """What works of a family."""

    family: str
    """transformers' model type."""
    stages: str
    """Either "yes", or why not."""
    tensor_parallel: str
    """Either "yes", or why not, with two ranks."""
    notes: str
    """What is special in the tiny model that was run."""


def examine(family: str, folder: Path) -> FamilyRow:
    """Run the family in three stages and on two ranks.

    Args:
        family: transformers' model type.
        folder: where the checkpoint is written; it must be empty.

    Raises:
        AssertionError: it runs, and its logits are others than those of transformers.
    """
    if family in REFUSED_FAMILIES:
        reason = REFUSED_FAMILIES[family]
        return FamilyRow(family=family, stages=reason, tensor_parallel="", notes="")
    model = tiny_model(family)
    path = folder / "tiny"
    model.save_pretrained(path)
    notes = _notes(model)
    try:
        check_stages(path, model)
    except UnsupportedModel as error:
        return FamilyRow(family=family, stages=_reason(error), tensor_parallel="", notes=notes)
    try:
        check_ranks(path, model)
    except UnsupportedModel as error:
        return FamilyRow(family=family, stages=YES, tensor_parallel=_reason(error), notes=notes)
    return FamilyRow(family=family, stages=YES, tensor_parallel=YES, notes=notes)


def check_stages(path: Path, model: PreTrainedModel) -> None:
    """Prefill and decode in three stages.

    Raises:
        AssertionError: the logits are others than those of `model`.
        UnsupportedModel: the family is refused.
    """
    chain = StageChain(path, sizes=(1, 2, 1))
    kept = sum(engine.cache.layout.bytes_per_token for engine in chain.engines)
    planned = load_model_spec(path).kv_bytes_per_token(len(chain.engines) + 1, "float32")
    assert kept <= planned, f"a token takes {kept} bytes of cache, planned are {planned}"
    tokens, logits = chain.generate(PROMPT, NUM_TOKENS)
    _compare(logits, tokens, model)


def check_ranks(path: Path, model: PreTrainedModel) -> None:
    """The same with one stage of two ranks, which have no bytes of the files but their own.

    Raises:
        AssertionError: the logits are others than those of `model`, or a rank read other bytes than
            were planned for it.
        UnsupportedModel: the family is refused.
    """
    spec = load_model_spec(path)
    shares = TensorShares.divide(
        num_ranks=2,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        mlp_columns=_mlp_columns(model),
        vocab_size=VOCAB_SIZE,
    )
    with TemporaryDirectory() as folder:
        runs = generate_on_ranks(
            path,
            PROMPT,
            NUM_TOKENS,
            degrees=(2,),
            shares=[shares],
            parts_folder=Path(folder),
        )
        for rank, run in enumerate(runs):
            planned = sum(file.stat().st_size for file in (Path(folder) / f"{rank}").iterdir())
            read = run.engine.stage.read_bytes
            assert read == planned, f"rank {rank} read {read} bytes, {planned} were planned"
    _compare(whole_logits(runs), runs[0].tokens, model)


def _mlp_columns(model: PreTrainedModel) -> int:
    config = model.config
    columns = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return int(columns or 4 * config.hidden_size)


def _compare(logits: torch.Tensor, tokens: list[int], model: PreTrainedModel) -> None:
    expected = reference_logits(model, [*PROMPT, *tokens[:-1]])
    error, scale = float((logits - expected).abs().max()), float(expected.abs().max())
    assert error <= TOLERANCE * max(1.0, scale), f"logits differ by {error:.1e} of {scale:.1e}"


def _reason(error: UnsupportedModel) -> str:
    """An error's text without the model's name in front."""
    text = str(error)
    if text.startswith("tiny"):
        text = text.partition(": ")[2]
    return " ".join(text.split())[:160].replace("|", "/")


def _notes(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    names = [name for name, _ in model.named_parameters()]
    kinds = set(getattr(config, "layer_types", None) or ())
    has_window = "sliding_attention" in kinds or (
        "layer_types" not in dir(config) and bool(getattr(config, "sliding_window", None))
    )
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    found = {
        "mixture of experts": any("experts" in name for name in names),
        "latent attention": bool(getattr(config, "kv_lora_rank", None)),
        "sliding window": has_window,
        "chunked attention": "chunked_attention" in kinds,
        "soft caps": any(getattr(config, cap, None) for cap in caps),
        "sinks": any("sink" in name.rpartition(".")[2] for name in names),
        "learned positions": any("wpe" in n or "embed_positions" in n for n in names),
        "own attention": computes_attention_itself(model.config),
    }
    return ", ".join(name for name, is_there in found.items() if is_there)

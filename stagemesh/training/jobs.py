"""What a training starts with: a model, its weights, a text in its tokens, files to serve it by."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from stagemesh.checkpoint.json_file import read_json_object
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.parallel.fsdp.checkpoint import together
from stagemesh.training.corpus import (
    BASE_TEMPLATE,
    END_OF_TEXT_ID,
    corpus_texts,
    encode_texts,
    tokenizer_files,
    train_tokenizer,
    write_tokenizer,
)
from stagemesh.training.weights import FileWeights, FreshWeights, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The same on all ranks."""

    model: Mapping[str, Any]
    """Content of a config.json."""
    weights: WeightSource
    """First values."""
    tokens: torch.Tensor
    """[N]: the corpus."""
    files: Sequence[Path]
    """A tokenizer's."""


def small_llama(
    *, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, context: int
) -> dict[str, Any]:
    """The config.json of a Llama with a tied head.

    Raises:
        ConfigError: the heads do not divide the width into parts of even size.
    """
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ConfigError(
            f"{num_heads} heads do not divide a width of {hidden_size} into parts of even size"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": None,
    }


def fresh_job(world: ProcessGroup, *, run: Path, model: Mapping[str, Any], seed: int) -> Job:
    """A new model, and a tokenizer trained for the corpus, or the one of the run. Collective.

    Args:
        world: all ranks.
        run: folder that all ranks see; the tokenizer is put there.
        model: of `small_llama`.
        seed: of the weights.

    Raises:
        CheckpointError: on all ranks, if the tokenizer could not be made.
    """
    texts = corpus_texts()

    def make() -> None:
        if not all(path.is_file() for path in tokenizer_files(run)):
            write_tokenizer(run, train_tokenizer(texts, vocab_size=model["vocab_size"]))

    together(world, f"{run}: no tokenizer", make if world.rank == 0 else None)
    tokenizer = Tokenizer.from_file(str(tokenizer_files(run)[0]))
    return Job(
        model=model,
        weights=FreshWeights(model, seed=seed),
        tokens=encode_texts(tokenizer, texts),
        files=tokenizer_files(run),
    )


def fine_tune_job(
    world: ProcessGroup,
    *,
    run: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    chat_template: str | None,
    special_tokens: Mapping[str, str],
    adds_bos: bool,
) -> Job:
    """A model that there is, to be trained on with the corpus. Collective.

    Args:
        world: all ranks.
        run: folder that all ranks see; the tokenizer is put there.
        spec: the model.
        tokenizer: its own.
        chat_template: its own, so that the result serves as it does; None for a base model.
        special_tokens: "bos_token" and "eos_token", as far as it has them.
        adds_bos: its prompts begin with the first of them.

    Raises:
        UnsupportedModel: see FileWeights.
        CheckpointError: on all ranks, if the tokenizer could not be written.
    """

    def make() -> None:
        write_tokenizer(
            run,
            tokenizer,
            chat_template=chat_template or BASE_TEMPLATE,
            bos_token=special_tokens.get("bos_token"),
            eos_token=special_tokens.get("eos_token"),
            adds_bos=adds_bos,
        )

    together(world, f"{run}: no tokenizer", make if world.rank == 0 else None)
    end_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    return Job(
        model=spec.config,
        weights=FileWeights(spec),
        tokens=encode_texts(tokenizer, corpus_texts(), end_id=end_id),
        files=tokenizer_files(run),
    )


def resumed_job(world: ProcessGroup, *, run: Path, checkpoint: Path) -> Job:
    """A checkpoint's model, and the corpus in the tokens of its tokenizer. Collective.

    Args:
        world: all ranks.
        run: folder that all ranks see; the tokenizer is put there.
        checkpoint: of this run, or another.

    Raises:
        CheckpointError: on all ranks, if it has no tokenizer.
    """
    spec = load_model_spec(checkpoint)
    vocabulary, settings = tokenizer_files(run)

    def make() -> None:
        run.mkdir(parents=True, exist_ok=True)
        for path in (vocabulary, settings):
            shutil.copyfile(checkpoint / path.name, path)

    together(world, f"{checkpoint}: no tokenizer", make if world.rank == 0 else None)
    tokenizer = Tokenizer.from_file(str(vocabulary))
    end = read_json_object(settings).get("eos_token")
    end_id = tokenizer.token_to_id(end) if isinstance(end, str) else None
    return Job(
        model=spec.config,
        weights=FileWeights(spec),
        tokens=encode_texts(tokenizer, corpus_texts(), end_id=end_id),
        files=[vocabulary, settings],
    )

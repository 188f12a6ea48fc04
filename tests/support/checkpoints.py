"""Tiny models on disk: random ones of any family, and ones whose output is known by construction.

All are fp32 and built in well under a second. Token id t of the byte tokenizer is byte t.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

IM_START, IM_END, END_OF_TEXT = 256, 257, 258
BYTE_VOCAB_SIZE = 260
"""Bytes, three special tokens, and one id that stands for nothing (so that 4 divides it)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def tiny_model(
    family: str = "llama", *, seed: int = 0, num_layers: int = 4, **config: Any
) -> PreTrainedModel:
    """A random model with hidden size 32; every parameter is random, norms and biases too."""
    sizes: dict[str, Any]
    if family == "gpt2":
        sizes = {"n_layer": num_layers, "n_embd": 32, "n_head": 4, "n_positions": 128}
    else:
        sizes = {
            "num_hidden_layers": num_layers,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
        }
    if family == "falcon":  # derives it
        del sizes["head_dim"]
    tokens = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    model_config = AutoConfig.for_model(family, **(sizes | tokens | config))
    model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.copy_(noise if name.endswith("bias") else 1 + 0.1 * noise)
    return model


def write_model(folder: Path, model: PreTrainedModel, *, sharded: bool = False) -> Path:
    """Writes config.json and one safetensors file, or two and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    # named_parameters lists a tied table once, as files have it.
    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {}
    for index, half in enumerate(halves, start=1):
        file_name = f"model-{index:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(half, file_name)
    size = sum(value.nbytes for value in tensors.values())
    index_text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)
    return folder


def write_tiny_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 4,
    sharded: bool = False,
    **config: Any,
) -> Path:
    """Writes a `tiny_model` as a model folder and returns the folder."""
    model = tiny_model(family, seed=seed, num_layers=num_layers, **config)
    return write_model(folder, model, sharded=sharded)


def edit_config(folder: Path, changes: Mapping[str, Any], *, remove: Iterable[str] = ()) -> None:
    """Changes and removes keys of config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | dict(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in set(remove)}))


def edit_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Rewrites model.safetensors of an unsharded folder with what `change` makes of it."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def write_tiny_gguf(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 4,
    embedding_type: str = "F32",
    matrix_type: str = "F32",
    rope_freqs: list[float] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    **config: Any,
) -> Path:
    """Writes the weights of the same `tiny_model` as a GGUF file and returns the file.

    Names come from gguf-py's own map and q/k rows of the llama architecture are permuted as the
    converter of llama.cpp does, so that the file is independent of the code under test.

    Args:
        folder: where to write; created when missing.
        family: transformers' name of the family.
        seed: of the weights.
        num_layers: layers of the model.
        embedding_type: ggml type of the token table.
        matrix_type: ggml type of the other matrices; vectors are F32.
        rope_freqs: when given, written as the tensor rope_freqs.weight.
        extra: called with the writer before the tensors are added.
        config: changes of the config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny-{family}.gguf"
    model = tiny_model(family, seed=seed, num_layers=num_layers, **config)
    architecture = _GGUF_ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    _add_gguf_config(writer, model.config)
    if extra is not None:
        extra(writer)
    name_map = gguf.get_tensor_name_map(
        {kind: key for key, kind in gguf.MODEL_ARCH_NAMES.items()}[architecture], num_layers
    )
    for name, value in model.named_parameters():
        gguf_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        data = value.detach().numpy()
        if architecture == "llama" and ".q_proj." in name:
            data = _permute(data, model.config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            data = _permute(data, model.config.num_key_value_heads)
        kind = "F32" if data.ndim == 1 else matrix_type
        _add_quantised(writer, gguf_name, data, embedding_type if "embd" in gguf_name else kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def _permute(data: np.ndarray, num_heads: int) -> np.ndarray:
    halves = data.reshape(num_heads, 2, data.shape[0] // num_heads // 2, *data.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))


def _add_quantised(writer: gguf.GGUFWriter, name: str, data: np.ndarray, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def write_chain_model(
    folder: Path,
    *,
    successors: Mapping[int, int],
    vocab_size: int = BYTE_VOCAB_SIZE,
    num_layers: int = 4,
    max_position_embeddings: int = 512,
    eos_token_ids: Iterable[int] = (IM_END,),
    with_tokenizer: bool = True,
) -> Path:
    """A Llama whose greedy output is the walk t -> successors[t], whatever the placement.

    The embedding is the identity (hidden size = vocab size), attention and MLP add nothing, and
    row next(t) of the head is e_t. After the norm the successor's logit is sqrt(vocab_size), all
    others are 0. A token without a successor is followed by the first eos token (by token 0 when
    there is none).

    Args:
        folder: where to write.
        successors: the walk.
        vocab_size: tokens; with a tokenizer at least BYTE_VOCAB_SIZE.
        num_layers: layers, all of which pass their input on.
        max_position_embeddings: longest context.
        eos_token_ids: written to generation_config.json.
        with_tokenizer: also write the byte tokenizer with a chat template.
    """
    eos = list(eos_token_ids)
    num_heads = 4 if vocab_size % 4 == 0 else 1
    model = tiny_model(
        "llama",
        num_layers=num_layers,
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=eos or None,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        model.get_input_embeddings().weight.copy_(torch.eye(vocab_size))
        head = model.get_output_embeddings().weight
        for token_id in range(vocab_size):
            head[successors.get(token_id, eos[0] if eos else 0), token_id] = 1.0
    write_model(folder, model)
    generation = {"eos_token_id": eos} if eos else {}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    if with_tokenizer:
        write_byte_tokenizer(folder)
    return folder


def write_flat_model(folder: Path, vocab_size: int = 100) -> Path:
    """A Llama whose head is zero, so that every token is equally likely."""
    model = tiny_model("llama", num_layers=2, vocab_size=vocab_size)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    return write_model(folder, model)


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json: one token a byte, and three specials."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _byte_chars() -> list[str]:
    """The printable character that the byte-level scheme of GPT-2 uses for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]

"""Every type of GGUF values against gguf-py's own dequantisation, whole, in parts and by stage.

Blocks are random bytes, so that each bit of a block counts and types that gguf-py cannot write are
here, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from stagemesh.checkpoint.gguf_header import PLAIN_TYPES
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import UnsupportedModel
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.tensor_cut import TensorCut
from stagemesh.models.weights import WeightReader
from tests.support.checkpoints import tiny_model

# What people call formats of a file, and the types that come with them.
ASKED_FOR = {
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
}
HIDDEN, NUM_LAYERS, VOCAB = 256, 2, 24
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "num_layers": NUM_LAYERS,
}


def is_decoded(kind: gguf.GGMLQuantizationType) -> bool:
    """Whether gguf-py gives values for a block of this type."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        gguf.quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


DECODED = [kind.name for kind in gguf.GGMLQuantizationType if is_decoded(kind)]
OTHERS = [
    kind.name
    for kind in gguf.GGMLQuantizationType
    if not is_decoded(kind) and kind.name not in PLAIN_TYPES
]


def random_blocks(
    kind: gguf.GGMLQuantizationType, generator: np.random.Generator, count: int = 512
) -> np.ndarray:
    """Random blocks whose values are finite: uint8 [count, bytes of a block]."""
    kept = np.empty((0, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    while len(kept) < count:
        drawn = generator.integers(0, 256, (count, kept.shape[1]), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(drawn, kind).astype(np.float32)
        kept = np.concatenate([kept, drawn[np.isfinite(values).reshape(count, -1).all(axis=1)]])
    return kept[:count]


def write_random(path: Path, type_name: str) -> Path:
    """A Qwen2, whose rows are in the file as in the model, with random matrices of a type."""
    kind = gguf.GGMLQuantizationType[type_name]
    generator = np.random.default_rng(int(kind))
    blocks = random_blocks(kind, generator)
    block_elements = gguf.GGML_QUANT_SIZES[kind][0]
    model = tiny_model("qwen2", **CONFIG)
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, NUM_LAYERS)
    for name, parameter in model.named_parameters():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        if parameter.dim() == 1:
            writer.add_tensor(gguf_name, parameter.detach().numpy())
        else:
            picks = generator.integers(0, len(blocks), parameter.numel() // block_elements)
            data = blocks[picks].reshape(parameter.shape[0], -1)
            writer.add_tensor(gguf_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(path: Path) -> dict[str, torch.Tensor]:
    """All tensors by gguf-py, by their names in the file."""
    with np.errstate(all="ignore"):
        return {
            tensor.name: torch.from_numpy(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            )
            for tensor in gguf.GGUFReader(path).tensors
        }


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32)


@dataclass(frozen=True, kw_only=True)
class RandomFile:
    """A file of one type."""

    path: Path
    spec: ModelSpec
    expected: dict[str, torch.Tensor]
    """By gguf-py."""

    def ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        """Which bytes the tensors of a stage take."""
        tensors = self.spec.tensors_for_stage(start, end)
        return [(info.offset, info.offset + info.num_bytes) for info in tensors]

    def assert_right(self, info: TensorInfo, values: torch.Tensor) -> None:
        assert torch.equal(bits(values), bits(self.expected[info.source_name])), info.source_name


@pytest.fixture(scope="module", params=DECODED)
def random_file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> RandomFile:
    path = write_random(tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf", request.param)
    return RandomFile(path=path, spec=load_model_spec(path), expected=reference(path))


def test_no_type_that_is_asked_for_is_left_out() -> None:
    assert set(DECODED) >= ASKED_FOR


def test_values_equal_those_of_gguf_py(random_file: RandomFile) -> None:
    reader = WeightReader(random_file.spec)
    matrices = 0
    for info in random_file.spec.tensors.values():
        random_file.assert_right(info, reader.read(info, torch.float32))
        matrices += info.encoding == random_file.path.stem
    assert matrices >= 7 * NUM_LAYERS


def test_a_part_equals_that_part_and_reads_no_other_rows(random_file: RandomFile) -> None:
    info = random_file.spec.tensors["model.layers.1.mlp.down_proj.weight"]
    values = random_file.expected[info.source_name]
    reader = WeightReader(random_file.spec)
    rows, columns = ((3, 40), (200, 256)), (70, 300)
    part = reader.read(info, torch.float32, cut=TensorCut(rows=rows, columns=columns))
    assert torch.equal(bits(part), bits(torch.cat([values[3:40], values[200:]])[:, 70:300]))
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[info.encoding]]
    num_blocks = -(-300 // block) - 70 // block
    assert reader.read_bytes == (37 + 56) * num_blocks * size


def test_a_stage_reads_no_byte_of_another(random_file: RandomFile, tmp_path: Path) -> None:
    """What lies outside of its tensors may be anything."""
    raw = random_file.path.read_bytes()
    data_start = min(info.offset for info in random_file.spec.tensors.values())
    path = tmp_path / random_file.path.name
    for start, end in ((0, 1), (1, 2)):
        own = random_file.ranges(start, end)
        other = bytearray(raw[:data_start] + b"\xff" * (len(raw) - data_start))
        for first, last in own:
            other[first:last] = raw[first:last]
        path.write_bytes(other)
        spec = load_model_spec(path)
        reader = WeightReader(spec)
        for info in spec.tensors_for_stage(start, end):
            random_file.assert_right(info, reader.read(info, torch.float32))
        assert reader.read_bytes == sum(last - first for first, last in own)
        # Control: the bytes of the others are not what they were.
        starts = {first for first, _ in own}
        foreign = next(info for info in spec.tensors.values() if info.offset not in starts)
        with np.errstate(all="ignore"), pytest.raises(AssertionError):
            random_file.assert_right(foreign, reader.read(foreign, torch.float32))


@pytest.mark.parametrize("type_name", OTHERS)
def test_a_type_without_values_is_refused_before_anything_loads(
    tmp_path: Path, type_name: str
) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    size = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, size), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = rf"tensor 'blk\.0\.ffn_up\.weight' has the type {type_name}, which .* dequantised"
    with pytest.raises(UnsupportedModel, match=message):
        load_model_spec(tmp_path / "m.gguf")

"""What a rank reads, holds and refuses."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import (
    CapacityExceeded,
    ConfigError,
    GroupAborted,
    ProtocolError,
    UnsupportedModel,
)
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.models.packed_linear import PackedLinear, can_pack
from stagemesh.models.tensor_cut import TensorCut
from stagemesh.models.tensor_layers import RowParallelLinear
from stagemesh.models.weights import WeightReader
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.steps import SamplingParams, Segment, Step
from tests.support.checkpoints import (
    tiny_model,
    write_model,
    write_tiny_checkpoint,
    write_tiny_gguf,
)
from tests.support.ranks import run_ranks
from tests.support.tensor_stages import load_rank, shares_of

HIDDEN, HEAD_DIM, WORDS = 32, 8, 100


def step(start: int, count: int, step_id: int = 1) -> Step:
    segment = Segment(
        session_id=1, start_position=start, num_tokens=count, sampling=SamplingParams()
    )
    return Step(step_id=step_id, segments=(segment,), token_ids=(7,) * count)


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_read_and_held_are_the_shares(tmp_path: Path, *, tied: bool) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", num_layers=2, tie_word_embeddings=tied)
    spec = load_model_spec(folder)
    shares = TensorShares(
        num_kv_heads=2, query_heads=(2, 1, 1), mlp_columns=(30, 24, 10), vocab_rows=(50, 49, 1)
    )
    engines: list[StageEngine] = run_ranks(3, lambda group: load_rank(spec, group, shares))
    for rank, engine in enumerate(engines):
        heads, columns = shares.query_heads[rank], shares.mlp_columns[rank]
        layer = HIDDEN * (2 * heads * HEAD_DIM + 2 * HEAD_DIM + 3 * columns + 2)
        table = HIDDEN * shares.vocab_rows[rank]
        read = 4 * (2 * layer + HIDDEN + (1 if tied else 2) * table)
        assert engine.stage.read_bytes == read
        # Packing gives a tied head memory of its own.
        is_packed = can_pack(torch.device("cpu"))
        assert engine.stage.weight_bytes == read + (4 * table if tied and is_packed else 0)
        assert engine.cache.layout.num_kv_heads == 1


def test_inner_linears_are_packed(tmp_path: Path) -> None:
    if not can_pack(torch.device("cpu")):
        pytest.skip("no oneDNN here")
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))
    engine: StageEngine = run_ranks(2, lambda group: load_rank(spec, group, shares_of(spec, 2)))[1]
    inner = [m.linear for m in engine.stage.model.modules() if isinstance(m, RowParallelLinear)]
    assert [type(linear) for linear in inner] == [PackedLinear] * 4
    assert {(linear.in_features, linear.out_features) for linear in inner} == {(16, 32), (32, 32)}


def test_a_greedy_step_costs_two_sums_a_layer_and_one_for_the_embedding(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=3))

    def run(group: ProcessGroup) -> tuple[list[str], list[str]]:
        first = load_rank(spec, group, shares_of(spec, 2), layers=(0, 2))
        last = load_rank(spec, group, shares_of(spec, 2), layers=(2, 3))
        calls: list[str] = []
        for name in ("all_reduce", "all_gather_tensor"):
            setattr(group, name, _noting(calls, name, getattr(group, name)))
        activation = first.run(step(0, 3), None).activation
        of_first = calls.copy()
        calls.clear()
        last.run(step(0, 3), activation)
        return of_first, calls

    for of_first, of_last in run_ranks(2, run):
        assert of_first == ["all_reduce"] * 5
        assert of_last == ["all_reduce"] * 2 + ["all_gather_tensor"]


def _noting(calls: list[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    def noted(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return call(*args, **kwargs)

    return noted


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_parts_of_gguf_tensors_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    spec = load_model_spec(write_tiny_gguf(tmp_path, num_layers=1, matrix_type=kind))
    prefix, every = "model.layers.0.", slice(None)
    cuts = {
        f"{prefix}self_attn.q_proj.weight": (
            TensorCut(rows=((16, 32),)),
            slice(16, 32),
            slice(None),
        ),
        f"{prefix}self_attn.k_proj.weight": (TensorCut(rows=((8, 16),)), slice(8, 16), every),
        f"{prefix}mlp.down_proj.weight": (TensorCut(columns=(37, 64)), every, slice(37, 64)),
        f"{prefix}self_attn.o_proj.weight": (TensorCut(columns=(8, 16)), every, slice(8, 16)),
    }
    for name, (cut, rows, columns) in cuts.items():
        info = spec.tensors[name]
        whole = WeightReader(spec).read(info, torch.float32)
        reader = WeightReader(spec)
        part = reader.read(info, torch.float32, cut=cut)
        assert torch.equal(part, whole[rows, columns]), name
        assert part.is_contiguous()
        # o_proj has one block of 32 values to a row, of which no less can be read.
        is_whole = "o_proj" in name and kind.startswith("Q")
        assert (reader.read_bytes < info.num_bytes) != is_whole


def test_parts_of_several_ranges_and_of_vectors(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", "qwen2", num_layers=1))
    for name, ranges in (
        ("model.embed_tokens.weight", ((3, 5), (90, 100))),
        ("model.layers.0.self_attn.q_proj.bias", ((8, 16),)),
    ):
        info = spec.tensors[name]
        whole, reader = WeightReader(spec).read(info, torch.float32), WeightReader(spec)
        part = reader.read(info, torch.float32, cut=TensorCut(rows=ranges))
        assert torch.equal(part, torch.cat([whole[a:b] for a, b in ranges]))
        assert reader.read_bytes == part.nbytes


def test_ranks_with_other_shares_are_refused(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))

    def run(group: ProcessGroup) -> StageEngine:
        columns = (30, 34) if group.rank == 0 else (34, 30)
        shares = TensorShares(
            num_kv_heads=2, query_heads=(2, 2), mlp_columns=columns, vocab_rows=(50, 50)
        )
        return load_rank(spec, group, shares)

    with pytest.raises((ConfigError, GroupAborted), match=r"ranks \[1\]|failed in loading"):
        run_ranks(2, run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_heads": (1, 1)}, "2 heads, 2 KV heads and 100 words do not fit a model of 4, 2"),
        ({"vocab_rows": (50, 49)}, "99 words do not fit a model of 4, 2 and 100"),
        ({"mlp_columns": (30, 30)}, r"has 64 MLP columns, the shares \[30, 30\] are of 60"),
    ],
)
def test_shares_of_another_model_are_refused_before_a_weight_is_read(
    tmp_path: Path, change: dict[str, tuple[int, int]], message: str
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", num_layers=2)
    spec = load_model_spec(folder)
    (folder / "model.safetensors").unlink()
    parts = {"query_heads": (2, 2), "mlp_columns": (32, 32), "vocab_rows": (50, 50)} | change
    shares = TensorShares(num_kv_heads=2, **parts)
    with pytest.raises(UnsupportedModel, match=message):
        run_ranks(2, lambda group: load_rank(spec, group, shares))


def test_a_group_of_another_size_is_refused(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))
    with pytest.raises(ConfigError, match=r"the shares are of 3 ranks, group .* has 2"):
        run_ranks(2, lambda group: load_rank(spec, group, shares_of(spec, 3)))


def test_ranks_with_unequal_memory_refuse_the_same_steps(tmp_path: Path) -> None:
    """And stay usable: nobody waits for a rank that has refused."""
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))

    def run(group: ProcessGroup) -> tuple[int, int | None]:
        engine = load_rank(
            spec, group, shares_of(spec, 2), kv_limit_bytes=10_000 * (1 + group.rank)
        )
        limit = engine.cache.limit_bytes // engine.cache.layout.bytes_per_token
        with pytest.raises(CapacityExceeded):
            engine.run(step(0, limit + 1), None)
        with pytest.raises(ProtocolError, match="starts at position 4"):
            engine.run(step(4, 1), None)
        return limit, engine.run(step(0, limit), None).tokens[0].token_id

    first, second = run_ranks(2, run)
    assert first == second
    assert first[0] == 10_000 // (2 * 2 * HEAD_DIM * 4)


def test_a_rank_that_fails_in_a_step_wakes_the_others(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))
    waited: list[float] = []

    def run(group: ProcessGroup) -> None:
        engine = load_rank(spec, group, shares_of(spec, 2))
        engine.run(step(0, 3), None)
        if group.rank == 1:
            layers = engine.stage.model.base_model.get_submodule("layers")
            layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.run(step(3, 1, 2), None)
        else:
            start = time.monotonic()
            with pytest.raises(GroupAborted, match=r"rank 1 .*failed in step 2: ZeroDivisionError"):
                engine.run(step(3, 1, 2), None)
            waited.append(time.monotonic() - start)

    run_ranks(2, run, timeout_seconds=30.0)
    assert waited[0] < 10


class MeanNorm(torch.nn.Module):
    """Not the RMS norm: it subtracts the mean of all heads."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight)


def test_a_norm_over_all_heads_that_is_no_rms_norm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("olmo2", num_layers=2)
    spec = load_model_spec(write_model(tmp_path / "m", model))
    attention_class = type(model.model.layers[0].self_attn)
    init = attention_class.__init__

    def with_mean_norm(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        self.q_norm = MeanNorm(self.q_norm.weight)

    monkeypatch.setattr(attention_class, "__init__", with_mean_norm)
    with pytest.raises(UnsupportedModel, match=r"olmo2.*q_norm \(MeanNorm\) is a norm over all"):
        run_ranks(2, lambda group: load_rank(spec, group, shares_of(spec, 2)))

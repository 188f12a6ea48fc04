"""Ranks whose threads add up over sockets of their own, against transformers in one process."""

from pathlib import Path

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import GroupAborted
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import SamplingParams, Segment, Step
from tests.support.checkpoints import tiny_model, write_model, write_tiny_checkpoint
from tests.support.ranks import run_ranks
from tests.support.stage_chain import reference_logits, reference_tokens
from tests.support.tensor_stages import generate_on_ranks, load_rank, shares_of, whole_logits

PROMPT = [3, 14, 15, 92, 65, 35, 89]


def connect(engine: StageEngine) -> None:
    """As ranks in processes of their own do when they have loaded."""
    group = engine.stage.tensor_group
    assert group is not None
    assert not group.sums.is_direct
    group.sums.connect(within_process=True)
    assert group.sums.is_direct


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("llama", 3), ("olmo2", 2)])
@pytest.mark.parametrize("backend", ["grpc", "gloo"])
def test_like_transformers(tmp_path: Path, family: str, tp: int, backend: str) -> None:
    model = tiny_model(family, num_layers=2, num_key_value_heads=4)
    runs = generate_on_ranks(
        write_model(tmp_path / "m", model),
        PROMPT,
        8,
        degrees=(tp,),
        backend=backend,
        on_engine=connect,
    )
    expected = reference_tokens(model, PROMPT, 8)
    assert [run.tokens for run in runs] == [expected] * tp
    logits = reference_logits(model, [*PROMPT, *expected[:-1]])
    torch.testing.assert_close(whole_logits(runs), logits, rtol=1e-4, atol=1e-4)
    # Each step has two sums per layer, the words' one, and the gather of a draw.
    for run in runs:
        group = run.engine.stage.tensor_group
        assert group is not None
        assert group.sums.time_spent.num_calls >= 8 * (2 * 2 + 2)


def test_parts_that_are_not_added_up_are_another_model(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=2)
    runs = generate_on_ranks(
        write_model(tmp_path / "m", model),
        PROMPT,
        2,
        degrees=(2,),
        on_engine=lambda engine: _keep_apart(engine),
    )
    logits = reference_logits(model, PROMPT)
    assert not torch.allclose(whole_logits(runs)[: len(PROMPT)], logits, rtol=1e-2, atol=1e-2)


def _keep_apart(engine: StageEngine) -> None:
    layer = engine.stage.model.base_model.get_submodule("layers")[0]  # type: ignore[index]
    layer.mlp.down_proj.forward = layer.mlp.down_proj.linear.forward


def test_a_rank_that_fails_in_a_step_tells_the_others_why(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", num_layers=2))

    def run(group: ProcessGroup) -> None:
        engine = load_rank(spec, group, shares_of(spec, 2))
        connect(engine)
        segment = Segment(session_id=1, start_position=0, num_tokens=3, sampling=SamplingParams())
        step = Step(step_id=2, segments=(segment,), token_ids=(1, 2, 3))
        if group.rank == 1:
            layers = engine.stage.model.base_model.get_submodule("layers")
            layers[1].register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[index]
            with pytest.raises(ZeroDivisionError):
                engine.run(step, None)
        else:
            with pytest.raises(GroupAborted, match=r"rank 1 .*failed in step 2: Zero"):
                engine.run(step, None)

    run_ranks(2, run, backend="grpc", timeout_seconds=30.0)

"""A stage compiled on an accelerator against transformers on the CPU."""

import time
from pathlib import Path

import pytest
import torch

from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import Segment, Step
from tests.support.checkpoints import tiny_model, write_model
from tests.support.stage_chain import GREEDY, reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def test_a_stage_compiles_on_a_gpu(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=2)
    engine = StageEngine.load(
        load_model_spec(write_model(tmp_path / "model", model)),
        start_layer=0,
        end_layer=2,
        dtype="float32",
        device=torch.device("cuda", 0),
        kv_limit_bytes=2**28,
        compile_folder=tmp_path / "cache",
    )
    assert engine.compiler is not None
    deadline = time.monotonic() + 500
    while not engine.compiler.is_settled and time.monotonic() < deadline:
        time.sleep(0.1)
        engine.compiler.advance()
    assert engine.execution == "compiled"
    prompt, tokens, position = [3, 14, 15, 92, 65], list[int](), 0
    ids = prompt
    while len(tokens) < 8:
        segment = Segment(
            session_id=1, start_position=position, num_tokens=len(ids), sampling=GREEDY
        )
        output = engine.run(Step(step_id=1, segments=(segment,), token_ids=tuple(ids)), None)
        position += len(ids)
        ids = [output.tokens[0].token_id or 0]
        tokens += ids
    assert tokens == reference_tokens(model, prompt, 8)
    engine.close()

"""The shipped model's 4-bit file, held as it is, in a process of its own."""

import json
import subprocess
import sys

import pytest

from stagemesh.model_spec import load_model_spec

_SCRIPT = """
import json, psutil, torch
torch.set_num_threads(1)
from coordinator.text.tokenizer import load_tokenizer
from node.free_memory import give_back_freed_memory
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from stagemesh.steps import SamplingParams, Segment, Step
spec = load_model_spec("smollm2-135m-instruct")
tokenizer = load_tokenizer(spec)
ids = tokenizer.encode("The capital of France is", add_special_tokens=False)
before = psutil.Process().memory_info().rss
engine = StageEngine.load(
    spec, start_layer=0, end_layer=30, dtype="float32", device=torch.device("cpu"),
    kv_limit_bytes=2**28, quantize="auto",
)
answer, position = [], 0
while len(answer) < 8:
    piece = answer[-1:] or ids
    segment = Segment(
        session_id=1, start_position=position, num_tokens=len(piece), sampling=SamplingParams()
    )
    step = Step(step_id=position + 1, segments=(segment,), token_ids=tuple(piece))
    answer.append(engine.run(step, None).tokens[0].token_id)
    position += len(piece)
give_back_freed_memory()
growth = psutil.Process().memory_info().rss - before
print(json.dumps([growth, engine.stage.weight_bytes, tokenizer.decode(answer)]))
"""


@pytest.mark.slow
def test_the_file_is_held_in_less_than_twice_its_size_and_answers() -> None:
    size = load_model_spec("smollm2-135m-instruct").path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=50, check=True
    )
    growth, held, answer = json.loads(done.stdout)
    assert held < size
    assert growth < 2.0 * size
    # Negative control: in float32 the weights alone are more than that.
    assert held < growth
    assert "Paris" in answer

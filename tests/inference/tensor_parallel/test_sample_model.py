"""The shipped model, whose nine heads and three KV heads no even number of ranks divides."""

import pytest

from stagemesh.model_spec import load_model_spec
from tests.support.tensor_stages import generate_on_ranks, shares_of

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
COUNT = 12


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_unequal_shares_are_read_alone_and_give_the_same_greedy_text() -> None:
    """With transformers' tokens the other placements are compared in tests/cluster."""
    model = "smollm2-135m-instruct"
    spec = load_model_spec(model)
    assert shares_of(spec, 2).query_heads == (6, 3)
    expected = generate_on_ranks(model, PROMPT, COUNT, degrees=(1,))[0].tokens
    assert len(set(expected)) > 5
    runs = generate_on_ranks(model, PROMPT, COUNT, degrees=(2, 1))
    assert {tuple(run.tokens) for run in runs} == {tuple(expected)}
    parts = [run.engine.stage.read_bytes for run in runs]
    assert max(parts) < 0.8 * sum(parts)

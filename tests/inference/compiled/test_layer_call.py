"""What is told of a layer's arguments is enough to call it again."""

import json
from typing import Any

import pytest
import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.attention import STEP_ARGUMENT, MaskRule, StepContext
from stagemesh.inference.compiled.layer_call import LayerCall, note_call
from stagemesh.inference.compiled.units import UnitKind, describe

RULE = MaskRule(lambda _b, _h, q, k: k <= q, is_causal=True)


def call(count: int, **more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    table = torch.arange(6.0)
    kwargs = {
        "attention_mask": RULE,
        "position_embeddings": (torch.ones(1, count, 4), torch.zeros(1, count, 4)),
        "table": table,
        "use_cache": False,
        "past_key_values": None,
        STEP_ARGUMENT: StepContext([], first_layer=0),
    }
    return (torch.randn(1, count, 8),), kwargs | more


def test_a_call_is_told_and_put_together_again() -> None:
    noted = LayerCall.from_json(json.loads(json.dumps(note_call(call(5), call(7)).to_json())))
    args, kwargs = call(11)
    tensors = noted.tensors_of(args, kwargs)
    assert [argument.shape for argument in noted.tensors] == [
        *((1, None, 8), (1, None, 4), (1, None, 4)),
        (6,),
    ]
    assert noted.activation is noted.tensors[0]
    assert noted.rule_of(args, kwargs) is RULE
    step = StepContext([], first_layer=3)
    again_args, again = noted.arguments(tensors, rule=RULE, step=step)
    assert again_args[0] is args[0]
    assert again["position_embeddings"][1] is kwargs["position_embeddings"][1]
    assert isinstance(again["position_embeddings"], tuple)
    assert again[STEP_ARGUMENT] is step
    rest = {"attention_mask": RULE, "use_cache": False, "past_key_values": None}
    assert rest.items() <= again.items()
    assert again.keys() == kwargs.keys()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mystery": object()}, "layers get a object as argument mystery"),
        ({"mystery": [1, {"a": 2}]}, r"layers get a dict as argument mystery\[1\]"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "argument x of torch.complex64"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        note_call(call(5, **more), call(7, **more))


def test_two_token_axes_are_refused() -> None:
    first, second = (call(n, scores=torch.zeros(n, n)) for n in (5, 7))
    with pytest.raises(UnsupportedModel, match="scores has two axes that count tokens"):
        note_call(first, second)


class Layer(torch.nn.Module):
    def __init__(self, index: int, *, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.layer_idx = index
        self.scale = scale
        self.linear = torch.nn.Linear(8, width)


def key(layer: Layer, index: int, *, form: int = 1, **environment: Any) -> str:
    kind = describe(layer, layer=index, call=note_call(call(5), call(7)))
    again = UnitKind.from_json(json.loads(json.dumps(kind.to_json())))
    assert again == kind
    return again.key({"torch": "1"} | environment, form)


def test_layers_share_code_exactly_when_only_weights_and_their_number_differ() -> None:
    first = key(Layer(0), 0)
    assert key(Layer(3), 3) == first
    others = {
        key(Layer(3, width=5), 3),
        key(Layer(3, scale=2.0), 3),
        key(Layer(3), 3, form=4),
        key(Layer(3), 3, torch="2"),
    }
    assert len(others) == 4
    assert first not in others

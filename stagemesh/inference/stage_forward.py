"""Calls of a stage's model for one step, in the way that its family computes attention.

Families that use transformers' attention interface take all segments at once, see `attention`; the
others one after the other, see `own_attention`.
"""

from collections.abc import Sequence

import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.inference import attention
from stagemesh.inference.attention import SegmentSpan, StepContext
from stagemesh.inference.own_attention import own_arguments
from stagemesh.models.builder import StageModel
from stagemesh.models.outline import base_of


def run_layers(
    stage: StageModel, inputs: dict[str, torch.Tensor], context: StepContext
) -> torch.Tensor:
    """The activation [T, D] after the stage's layers.

    Args:
        stage: runs.
        inputs: `input_ids` [1, T] or `inputs_embeds` [1, T, D].
        context: of the step.
    """
    base = base_of(stage.model)
    outputs = [base(**part).last_hidden_state[0] for _, part in _calls(stage, inputs, context)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def run_head(
    stage: StageModel,
    inputs: dict[str, torch.Tensor],
    context: StepContext,
    *,
    rows: Sequence[int],
) -> torch.Tensor:
    """Logits [len(rows), V] of the last stage at these tokens of the step."""
    found = []
    for span, part in _calls(stage, inputs, context):
        own = _own_rows(rows, span)
        if not own:
            base_of(stage.model)(**part)
            continue
        index = torch.tensor(own, device=stage.device)
        logits: torch.Tensor = stage.model(**part, logits_to_keep=index).logits[0]
        if len(logits) != len(own):
            # A few heads know no `logits_to_keep`.
            logits = logits[index]
        found.append(logits)
    return found[0] if len(found) == 1 else torch.cat(found)


def check_attended(stage: StageModel, context: StepContext) -> None:
    """Refuse a family whose attention did not see each layer of the stage exactly once.

    Raises:
        UnsupportedModel: it did not.
    """
    expected = list(range(stage.end_layer - stage.start_layer))
    if context.attended_layers != expected:
        raise UnsupportedModel(
            f"{stage.model.config.model_type}: attention came by layers "
            f"{context.attended_layers}, expected each of {expected} once"
        )


def _calls(
    stage: StageModel, inputs: dict[str, torch.Tensor], context: StepContext
) -> list[tuple[SegmentSpan | None, dict[str, object]]]:
    """Arguments of the model, once for the step or once for each of its segments."""
    (key, values) = next(iter(inputs.items()))
    if not stage.has_own_attention:
        arguments: dict[str, object] = {
            "position_ids": _positions(context, values)[None],
            # A 2-D mask of ones switches off transformers' search for packed sequences.
            "attention_mask": torch.ones(1, 1, dtype=torch.bool, device=stage.device),
            "use_cache": False,
            attention.STEP_ARGUMENT: context,
        }
        return [(None, {key: values, **arguments})]
    calls: list[tuple[SegmentSpan | None, dict[str, object]]] = []
    for span in context.spans:
        tokens = slice(span.offset, span.offset + span.num_tokens)
        part = own_arguments(context, span, num_tokens=span.num_tokens, device=stage.device)
        calls.append((span, {key: values[:, tokens], **part}))
    return calls


def _positions(context: StepContext, values: torch.Tensor) -> torch.Tensor:
    ranges = [
        torch.arange(span.start_position, span.start_position + span.num_tokens)
        for span in context.spans
    ]
    return torch.cat(ranges).to(values.device)


def _own_rows(rows: Sequence[int], span: SegmentSpan | None) -> list[int]:
    """Those of a step's rows that are of a segment, counted from its first token."""
    if span is None:
        return list(rows)
    end = span.offset + span.num_tokens
    return [row - span.offset for row in rows if span.offset <= row < end]

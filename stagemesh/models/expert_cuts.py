"""Which part of a layer's experts a rank has: some MLP columns of every expert.

All ranks route alike and each computes its columns of the experts that were picked; the partial
sums are added up once for all experts of a layer. transformers holds a layer's experts in two
parameters, E experts of hidden size D and I columns:

    gate_up_proj  [E, 2 I, D], or transposed; gate before up, or the two interleaved
    down_proj     [E, D, I], or transposed
"""

from typing import Any

from torch import nn

from stagemesh.errors import UnsupportedModel
from stagemesh.models.tensor_cut import AnyCut, ExpertCut, Once, Range

_WEIGHTS = frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"})


def expert_width(experts: nn.Module, name: str, where: str) -> int:
    """MLP columns I of each expert.

    Raises:
        UnsupportedModel: the module is not of the form above.
    """
    found: dict[str, Any] = dict(experts.named_parameters())
    gate_up: Any = found.get("gate_up_proj")
    down: Any = found.get("down_proj")
    is_known = gate_up is not None and down is not None and set(found) <= _WEIGHTS
    if is_known and gate_up.dim() == down.dim() == 3:
        width = int(down.shape[1 if _is_transposed(experts) else 2])
        if gate_up.shape[2 if _is_transposed(experts) else 1] == 2 * width:
            return width
    raise UnsupportedModel(
        f"{where}: {name} ({type(experts).__name__}) holds its experts in another form than "
        "gate_up_proj and down_proj, and cannot be cut"
    )


def cut_experts(
    experts: nn.Module, name: str, columns: Range, *, is_first_rank: bool
) -> dict[str, AnyCut]:
    """Cuts of the parameters of a module of experts.

    Args:
        experts: the module.
        name: its name.
        columns: of the rank.
        is_first_rank: whether it adds the biases that are added to the sum.
    """
    found: dict[str, Any] = dict(experts.named_parameters())
    is_transposed = _is_transposed(experts)
    width = int(found["down_proj"].shape[1 if is_transposed else 2])
    start, end = columns
    joined: tuple[Range, ...] = ((start, end), (width + start, width + end))
    if not getattr(experts, "is_concatenated", True):
        joined = ((2 * start, 2 * end),)
    cuts: dict[str, AnyCut] = {
        f"{name}.gate_up_proj": ExpertCut(axis=2 if is_transposed else 1, ranges=joined),
        f"{name}.down_proj": ExpertCut(axis=1 if is_transposed else 2, ranges=(columns,)),
    }
    if "gate_up_proj_bias" in found:
        cuts[f"{name}.gate_up_proj_bias"] = ExpertCut(axis=1, ranges=joined)
    if "down_proj_bias" in found:
        cuts[f"{name}.down_proj_bias"] = Once(is_here=is_first_rank)
    return cuts


def _is_transposed(experts: nn.Module) -> bool:
    """Whether columns come before rows, which the shapes say unless the class does."""
    told = getattr(experts, "is_transposed", None)
    if isinstance(told, bool):
        return told
    gate_up, down = (getattr(experts, key) for key in ("gate_up_proj", "down_proj"))
    return bool(gate_up.shape[1] == down.shape[2] and gate_up.shape[2] == 2 * down.shape[1])

"""A layer's experts with weights in 8 or 4 bits.

transformers' classes of experts hold a layer's matrices in two parameters and leave the
multiplication to a function that they look up. All classes that say of themselves they are of the
common form (a gate, no bias, experts' rows before columns) compute the same with each expert's
matrices apart, and only those are replaced.
"""

from typing import Any

import torch
from torch import nn

_COMMON_FORM = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}


def can_hold_experts(module: nn.Module) -> bool:
    """Whether a module holds experts of the common form."""
    told: Any = module
    is_common = all(getattr(told, name, None) is value for name, value in _COMMON_FORM.items())
    return is_common and {n for n, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}


class LowBitExperts(nn.Module):
    """Routed experts: out = sum over a token's picks of weight * down(act(gate(x)) * up(x)).

    Args:
        experts: the family's module, which gives up its parameters and keeps its activation.
        gate_up: a linear layer for each expert, gate before up.
        down: likewise.
    """

    def __init__(self, experts: nn.Module, gate_up: nn.ModuleList, down: nn.ModuleList) -> None:
        super().__init__()
        del experts.gate_up_proj, experts.down_proj
        self.experts = experts
        self.gate_up = gate_up
        self.down = down

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the experts that were picked.

        Shapes:
            hidden_states: [T, D]; top_k_index: [T, k] of experts, with numbers beyond the last for
            none; top_k_weights: [T, k]; returns [T, D].
        """
        experts: Any = self.experts
        num_tokens, num_picks = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)
        picks = top_k_index.flatten().bincount(minlength=len(self.down)).tolist()
        products = hidden_states.new_zeros((num_tokens * num_picks, hidden_states.shape[-1]))
        start = 0
        for gate_up, down, count in zip(self.gate_up, self.down, picks, strict=False):
            if count:
                here = order[start : start + count]
                gated = experts._apply_gate(gate_up(hidden_states[here // num_picks]))
                products[here] = down(gated)
                start += count
        weighted = products * top_k_weights.flatten()[:, None]
        return weighted.view(num_tokens, num_picks, -1).sum(dim=1).to(hidden_states.dtype)

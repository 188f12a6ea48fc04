"""The model and the data of the training benchmark: a small random Llama, as a list of layers.

B sequences, T tokens, D model dim, H heads, K head dim, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 4096
MODEL_DIM = 320
HEADS = 8
MLP_DIM = 864
LAYERS = 8
SEQUENCES = 4
"""Of the whole batch."""
TOKENS = 64


class Block(nn.Module):
    """Attention with rotary positions and a gated MLP, each after an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(MODEL_DIM)
        self.qkv = nn.Linear(MODEL_DIM, 3 * MODEL_DIM, bias=False)
        self.out = nn.Linear(MODEL_DIM, MODEL_DIM, bias=False)
        self.mlp_norm = nn.RMSNorm(MODEL_DIM)
        self.gate_up = nn.Linear(MODEL_DIM, 2 * MLP_DIM, bias=False)
        self.down = nn.Linear(MLP_DIM, MODEL_DIM, bias=False)
        # No buffers: some of what is compared sends those before each forward, and some does not.
        self._cos, self._sin = _rotary_tables()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden and result [B, T, D]."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        result: torch.Tensor = hidden + self.down(F.silu(gate) * up)
        return result

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:2], HEADS, MODEL_DIM // HEADS)
        query, key, value = (
            part.reshape(shape).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True
        )
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Shapes: heads and result [B, H, T, K]."""
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        length = heads.shape[2]
        return heads * self._cos[:length] + turned * self._sin[:length]


class Head(nn.Module):
    """The last norm, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(MODEL_DIM)
        self.logits = nn.Linear(MODEL_DIM, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden [B, T, D]; result [B, T, V]."""
        result: torch.Tensor = self.logits(self.norm(hidden))
        return result


def make_model() -> nn.Sequential:
    """Embedding, blocks and head; the same values on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, MODEL_DIM), *(Block() for _ in range(LAYERS)), Head()
    )


def batch(step: int, *, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, or one of equal parts of them.

    Shapes:
        both: [B / parts, T].
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator)
    own = tokens.chunk(parts)[part]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy. Shapes: logits [B, T, V]; targets [B, T]; result []."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What all trainers step with."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def _rotary_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines. Shapes: [T, K]."""
    half = MODEL_DIM // HEADS // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(TOKENS), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()

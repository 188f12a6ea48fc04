"""What ranks that each have some words tell each other of a row of logits.

Enough for the most likely word, log-probabilities and scores; see `vocab_parallel` for draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stagemesh.comm.direct_group import RankGroup
from stagemesh.inference.draws import drawn_position, num_logit_rows
from stagemesh.inference.sampler import LOGPROB_FLOOR
from stagemesh.steps import SamplingParams, Segment, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRow:
    """One row of logits, and what is wanted of it."""

    target: int | None
    num_top: int
    sampling: SamplingParams | None
    position: int


@dataclass(frozen=True, slots=True)
class RowSummary:
    """What all ranks know of one row."""

    maximum: float
    best_token: int
    log_total: float
    """Logarithm of the sum of all exponentials."""
    target_logit: float
    candidates: tuple[tuple[float, int], ...]
    """(logit, token) of the most likely, in order."""

    def top(self, count: int) -> tuple[TokenLogprob, ...]:
        """The `count` most likely tokens, impossible ones left out."""
        found = (
            TokenLogprob(token, logit - self.log_total) for logit, token in self.candidates[:count]
        )
        return tuple(entry for entry in found if entry.logprob > LOGPROB_FLOOR)


def rows_of(segment: Segment) -> list[LogitRow]:
    """What a segment wants of each of its rows of logits."""
    count = num_logit_rows(segment)
    rows = []
    for index in range(count):
        is_last = index == count - 1
        sampling = segment.sampling if is_last else None
        targets = segment.target_token_ids
        rows.append(
            LogitRow(
                target=targets[index] if targets else None,
                num_top=max(
                    segment.num_target_top_logprobs if targets else 0,
                    sampling.num_top_logprobs if sampling is not None else 0,
                ),
                sampling=sampling,
                position=drawn_position(segment),
            )
        )
    return rows


def summarise(
    rows: Sequence[LogitRow],
    logits: torch.Tensor,
    process_group: RankGroup,
    first_word: int,
    vocab_size: int,
) -> list[RowSummary]:
    """Bring together what all ranks need to know of each row: one all-gather.

    Shapes:
        logits: [n, V_r] float32, this rank's.
    """
    num_top = min(max((row.num_top for row in rows), default=0), vocab_size)
    best, index = logits.max(dim=-1)
    shift = torch.where(best.isfinite(), best, 0.0)
    # [n, 4 + 2 num_top]; word ids are exact in float64.
    own = torch.full((len(rows), 4 + 2 * num_top), -math.inf, dtype=torch.float64)
    own[:, 0], own[:, 1] = best.double(), (index + first_word).double()
    own[:, 2] = torch.exp(logits - shift[:, None]).sum(dim=-1, dtype=torch.float64)
    own[:, 3] = torch.tensor(
        [logit_of(row.target, r, logits, first_word) for r, row in enumerate(rows)],
        dtype=torch.float64,
    )
    count = min(num_top, logits.shape[-1])
    if count:
        values, words = torch.sort(logits, dim=-1, descending=True, stable=True)
        own[:, 4 : 4 + count] = values[:, :count].double()
        own[:, 4 + num_top : 4 + num_top + count] = (words[:, :count] + first_word).double()
    gathered = own.new_empty((process_group.size, *own.shape))
    process_group.all_gather_tensor(gathered, own)
    return [_join(gathered[:, row], num_top) for row in range(len(rows))]


def logit_of(token: int | None, row: int, logits: torch.Tensor, first_word: int) -> float:
    """The logit of a token where this rank has it, minus infinity elsewhere."""
    if token is None or not 0 <= token - first_word < logits.shape[-1]:
        return -math.inf
    return float(logits[row, token - first_word])


def _join(parts: torch.Tensor, num_top: int) -> RowSummary:
    """One row's summary from those of the ranks [R, 4 + 2 num_top]."""
    rank = int(torch.argmax(parts[:, 0]))
    maximum = float(parts[rank, 0])
    shift = maximum if math.isfinite(maximum) else 0.0
    total = math.fsum(
        part[2] * math.exp(part[0] - shift) for part in parts.tolist() if math.isfinite(part[0])
    )
    values, words = parts[:, 4 : 4 + num_top], parts[:, 4 + num_top :]
    found = [
        (value, int(word))
        for value, word in zip(values.flatten().tolist(), words.flatten().tolist(), strict=True)
        if math.isfinite(word)
    ]
    return RowSummary(
        maximum=maximum,
        best_token=int(parts[rank, 1]),
        log_total=shift + math.log(total) if total > 0 else math.nan,
        target_logit=float(parts[:, 3].max()),
        candidates=tuple(sorted(found, key=lambda entry: (-entry[0], entry[1]))),
    )

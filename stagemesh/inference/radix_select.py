"""The most likely words of a vocabulary that ranks have parts of: where top_k and top_p cut.

A float32 has an order-preserving whole number of 32 bits. Its digits to the base 256 are found from
the highest on: each rank counts its words by the next digit among those that share the digits found
so far, an all-reduce adds the counts up, and the running sum from the largest digit down says where
the cut lies. After four digits the logit at the cut is known exactly, and of the words that have
just that logit those with the lowest ids are kept, as a stable sort would.

    all-reduces: 4 of [rows, 256, 2] int64; one all-gather of [rows] for the words at the cut
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.direct_group import RankGroup

_BINS = 256
_SHIFTS = (24, 16, 8, 0)


def cut_to_count(
    logits: torch.Tensor, counts: Sequence[int], *, process_group: RankGroup
) -> torch.Tensor:
    """Which of this rank's words are among the `counts[row]` most likely ones.

    Shapes:
        logits: [n, V_r] float32; returns [n, V_r] bool.
    """
    everyone = torch.ones_like(logits, dtype=torch.bool)
    return _select(logits, everyone.long(), counts, everyone, process_group)


def cut_to_mass(
    logits: torch.Tensor,
    masses: torch.Tensor,
    needed: Sequence[int],
    *,
    is_candidate: torch.Tensor,
    process_group: RankGroup,
) -> torch.Tensor:
    """Which of this rank's words are in the smallest set of most likely ones of `needed` mass.

    Words of the same logit have the same mass.

    Shapes:
        logits: [n, V_r] float32.
        masses: [n, V_r] int64, not negative.
        is_candidate: [n, V_r] bool, the words that may be kept; returns the same.
    """
    return _select(logits, masses, needed, is_candidate, process_group)


def _select(
    logits: torch.Tensor,
    weights: torch.Tensor,
    needed: Sequence[int],
    is_candidate: torch.Tensor,
    process_group: RankGroup,
) -> torch.Tensor:
    keys = _ordered_keys(logits)
    is_tied = is_candidate.clone()
    above = torch.zeros(len(needed), dtype=torch.int64)  # weight of all words above the tied ones
    at_cut = torch.zeros(len(needed), 2, dtype=torch.int64)
    cut = torch.zeros(len(needed), 1, dtype=torch.int64)
    for shift in _SHIFTS:
        digits = (keys >> shift) & (_BINS - 1)
        histogram = _histogram(digits, weights, is_tied)
        process_group.all_reduce(histogram)
        for row, need in enumerate(needed):
            digit, passed = _digit_of(histogram[row, :, 0], need - int(above[row]))
            above[row] += passed
            at_cut[row] = histogram[row, digit]
            is_tied[row] &= digits[row] == digit
            cut[row] |= digit << shift
    num_kept = [
        -(-(need - int(above[row])) // max(1, int(at_cut[row, 0]) // int(at_cut[row, 1])))
        for row, need in enumerate(needed)
    ]
    return (is_candidate & (keys > cut)) | _lowest_ids(is_tied, num_kept, process_group)


def _digit_of(weights: torch.Tensor, need: int) -> tuple[int, int]:
    """The digit at which the sum from the largest one down reaches `need`, and the sum before."""
    downwards = torch.cumsum(weights.flip(0), dim=0)
    index = int(torch.searchsorted(downwards, need))
    passed = int(downwards[index - 1]) if index else 0
    return _BINS - 1 - index, passed


def _histogram(digits: torch.Tensor, weights: torch.Tensor, is_tied: torch.Tensor) -> torch.Tensor:
    """[n, 256, 2]: weight and number of the tied words of each digit."""
    histogram = torch.zeros(digits.shape[0], _BINS, 2, dtype=torch.int64)
    histogram[..., 0].scatter_add_(1, digits, weights * is_tied)
    histogram[..., 1].scatter_add_(1, digits, is_tied.long())
    return histogram


def _lowest_ids(
    is_tied: torch.Tensor, num_kept: Sequence[int], process_group: RankGroup
) -> torch.Tensor:
    """Of the tied words the first `num_kept[row]` over all ranks, in the order of their ids."""
    own = is_tied.sum(dim=-1)
    by_rank = own.new_empty((process_group.size, own.numel()))
    process_group.all_gather_tensor(by_rank, own)
    before = by_rank[: process_group.rank].sum(dim=0)
    limit = torch.tensor(num_kept, dtype=torch.int64) - before
    return is_tied & (torch.cumsum(is_tied.long(), dim=-1) <= limit[:, None])


def _ordered_keys(logits: torch.Tensor) -> torch.Tensor:
    """Whole numbers in [0, 2^32) in the order of the float32 values; both zeros are one."""
    bits = (logits.float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits | 0x80000000)

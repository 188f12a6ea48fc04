"""How a dim of a tensor is cut over the ranks of a group: whole numbers only."""

from collections.abc import Sequence

from stagemesh.errors import ConfigError


def even_sizes(total: int, *, num_ranks: int, name: str) -> tuple[int, ...]:
    """Equal sizes, one per rank.

    Args:
        total: what to split.
        num_ranks: number of parts.
        name: of what is split, in errors.

    Raises:
        ConfigError: the ranks do not divide it; uneven sizes must be asked for.
    """
    _check_num_ranks(num_ranks)
    if total < num_ranks or total % num_ranks:
        raise ConfigError(
            f"{name} of {total} cannot be split evenly over {num_ranks} ranks; give uneven sizes "
            "or shares to split it all the same"
        )
    return (total // num_ranks,) * num_ranks


def proportional_sizes(total: int, *, shares: Sequence[int], name: str) -> tuple[int, ...]:
    """Sizes in proportion to the ranks' shares, each at least 1; equal remainders go first.

    Raises:
        ConfigError: a share is below 1, or there is less to split than there are ranks.
    """
    _check_num_ranks(len(shares))
    if min(shares) < 1:
        raise ConfigError(f"shares must be whole numbers >= 1, got {list(shares)}")
    if total < len(shares):
        raise ConfigError(f"{name} of {total} cannot be split over {len(shares)} ranks")
    whole = sum(shares)
    sizes = [max(1, total * share // whole) for share in shares]

    def lack(rank: int) -> int:
        """Times `whole`: exact where fractions would tie or drift."""
        return total * shares[rank] - sizes[rank] * whole

    while sum(sizes) < total:
        sizes[max(range(len(shares)), key=lack)] += 1
    while sum(sizes) > total:
        # The floor of 1 gave more than there is.
        donors = [rank for rank, size in enumerate(sizes) if size > 1]
        sizes[min(donors, key=lack)] -= 1
    return tuple(sizes)


def balanced_sizes(total: int, *, num_ranks: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, the larger ones first; some are 0 if there are too few."""
    _check_num_ranks(num_ranks)
    return tuple(total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks))


def resolve_sizes(
    sizes: Sequence[int] | None, *, total: int, num_ranks: int, name: str, smallest: int = 1
) -> tuple[int, ...]:
    """The sizes that were asked for, checked; even ones if none were.

    Raises:
        ConfigError: not one size >= `smallest` per rank, or another sum than `total`.
    """
    if sizes is None:
        return even_sizes(total, num_ranks=num_ranks, name=name)
    _check_num_ranks(num_ranks)
    if len(sizes) != num_ranks or min(sizes) < smallest or sum(sizes) != total:
        raise ConfigError(
            f"the sizes of {name} must be {num_ranks} numbers >= {smallest} with sum {total}, "
            f"got {list(sizes)}"
        )
    return tuple(sizes)


def shard_span(sizes: Sequence[int], *, rank: int) -> tuple[int, int]:
    """Begin and end of a rank's part, [start, end).

    Raises:
        ConfigError: there is no such rank.
    """
    if not 0 <= rank < len(sizes):
        raise ConfigError(f"rank must be in [0, {len(sizes)}), got {rank}")
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def _check_num_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise ConfigError(f"the number of tensor-parallel ranks must be >= 1, got {num_ranks}")

"""Figures for a person."""


def gib(num_bytes: int) -> str:
    """Bytes."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """A time."""
    return f"{1e3 * seconds:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"

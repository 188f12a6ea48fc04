"""Figures for a person."""


def gib(num_bytes: int) -> str:
    """Bytes."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"

"""Random numbers that depend on names instead of on the order in which they are asked for."""

import zlib

import torch


def generator_of(*parts: object) -> torch.Generator:
    """A generator on the CPU for these words and numbers, the same on any host.

    torch's generator takes only the lower 32 bits of a seed, so all of them are mixed into that.
    """
    text = "/".join(map(str, parts))
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))

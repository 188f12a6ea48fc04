"""Gives freed memory back to the system, which the C library keeps otherwise.

Loading a stage frees one large block after the other: what was read, once it is packed. glibc keeps
such blocks for later, so that a node held up to twice its weights (1.3 GiB in place of 0.9 for 29
layers of the sample model) until something else was in need of them.
"""

import ctypes
import sys


def give_back_freed_memory() -> None:
    """Return what is free to the system, where the C library can; takes milliseconds."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none and keep less
        trim(0)

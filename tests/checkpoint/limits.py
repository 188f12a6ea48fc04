"""What a hostile file may cost: less than a second of work and less than 64 MiB."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cheap() -> Iterator[None]:
    """Fails when the block takes a second, or 64 MiB of memory at its peak."""
    tracemalloc.start()
    start = time.process_time()
    try:
        yield
        seconds = time.process_time() - start
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 1.0
    assert peak < 64 << 20

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread_per_rank() -> Iterator[None]:
    """Ranks are threads already; with torch's own on top of them they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

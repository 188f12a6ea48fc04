from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.children import Children, children


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Children]:
    with children(tmp_path) as started:
        yield started

"""What holds for all tests."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up: for its own end only."""
    root = logging.getLogger()
    levels = {root: root.level} | {
        logger: logger.level
        for logger in root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger)
    }
    handlers = list(root.handlers)
    yield
    for logger, level in levels.items():
        logger.setLevel(level)
    for handler in [h for h in root.handlers if h.get_name() and h not in handlers]:
        root.removeHandler(handler)

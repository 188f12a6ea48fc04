"""Logging for the two command lines; the library itself only calls `logging.getLogger(__name__)`.

A message is a stable event text; data goes into `extra`. `setup_logging` is called by a `cli.py`,
once; importing this module attaches nothing. `node_id`, `rank` and `request_id` come from the
context, so a line says whose it is without every function passing them on.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

_context: ContextVar[dict[str, str | int] | None] = ContextVar("log_context", default=None)
_HANDLER_NAME = "stagemesh"
# Their debug lines, one and more per message sent, would bury ours.
_CHATTY_LOGGERS = ("grpc", "httpcore", "httpx", "asyncio", "uvicorn")
# What every record has; anything else in its __dict__ came through `extra`.
_RECORD_FIELDS = frozenset(
    (*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName", "context")
)


def setup_logging(
    format: LogFormat = "text", level: str | int = "INFO", *, stream: TextIO | None = None
) -> None:
    """Send all logging to standard error, or `stream`; a second call replaces the first's handler.

    Raises:
        ValueError: when the level or the format has no such name.
    """
    formatters = {"text": TextFormatter, "json": JsonFormatter}
    if format not in formatters:
        raise ValueError(f"log format is {format!r}: allowed are {', '.join(formatters)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(formatters[format]())
    handler.addFilter(add_context)
    root = logging.getLogger()
    root.setLevel(level.upper() if isinstance(level, str) else level)
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    for old in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)


@contextlib.contextmanager
def bind(
    *, node_id: str | None = None, rank: int | None = None, request_id: str | None = None
) -> Iterator[None]:
    """Add fields to every record of the block, and of the tasks that are started in it."""
    given = {"node_id": node_id, "rank": rank, "request_id": request_id}
    fields = {name: value for name, value in given.items() if value is not None}
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


@contextlib.contextmanager
def span(
    logger: logging.Logger, name: str, *, level: int = logging.DEBUG, **fields: Any
) -> Iterator[None]:
    """Log `name` with `duration_seconds` when the block ends, and the error's type if it failed."""
    started = time.perf_counter()
    outcome: dict[str, Any] = {}
    try:
        yield
    except BaseException as error:
        outcome["error_type"] = type(error).__name__
        raise
    finally:
        outcome["duration_seconds"] = round(time.perf_counter() - started, 6)
        logger.log(level, name, extra={**fields, **outcome})


def add_context(record: logging.LogRecord) -> bool:
    """The filter that copies the context into a record; keeps every record."""
    record.context = _context.get() or {}
    return True


def _data_of(record: logging.LogRecord) -> dict[str, Any]:
    context: dict[str, Any] = getattr(record, "context", {})
    extra = {k: v for k, v in record.__dict__.items() if k not in _RECORD_FIELDS}
    return {**context, **extra}


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: event key=value ...`, one line and its traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Append the data; a text with blanks or control characters is quoted and escaped."""
        pairs = [f"{key}={_text_value(value)}" for key, value in _data_of(record).items()]
        return " ".join([super().formatMessage(record), *pairs])


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Put event, data and traceback into one object."""
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **_data_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _text_value(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and " " not in text else repr(text)

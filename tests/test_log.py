import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from stagemesh import log

logger = logging.getLogger("tests.log")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The root logger as it was, after the test."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield io.StringIO()
    root.setLevel(level)
    root.handlers[:] = handlers


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_json_has_event_data_and_context(stream: io.StringIO) -> None:
    log.setup_logging("json", stream=stream)
    with log.bind(node_id="n1", rank=2):
        with log.bind(request_id="r"):
            logger.info("loaded %d", 3, extra={"num_layers": 10})
        logger.info("idle")
    logger.info("outside")
    inner, outer, outside = (json.loads(line) for line in lines(stream))
    assert inner["event"] == "loaded 3"
    assert (inner["node_id"], inner["rank"], inner["request_id"]) == ("n1", 2, "r")
    assert (inner["num_layers"], inner["level"], inner["logger"]) == (10, "INFO", "tests.log")
    assert "request_id" not in outer
    assert set(outside) == {"time", "level", "logger", "event"}  # negative control


def test_text_is_one_line_whatever_is_in_it(stream: io.StringIO) -> None:
    log.setup_logging("text", stream=stream)
    with log.bind(node_id="n1"):
        logger.info("refused", extra={"why": "two words\nERROR forged", "port": 7})
    (line,) = lines(stream)
    assert line.endswith(r"INFO tests.log: refused node_id=n1 why='two words\nERROR forged' port=7")


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_traceback_is_kept(stream: io.StringIO, kind: log.LogFormat) -> None:
    log.setup_logging(kind, stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    assert "ValueError: broken" in stream.getvalue()
    assert len(lines(stream)) == 1 or kind == "text"


def test_a_span_tells_duration_and_failure(stream: io.StringIO) -> None:
    log.setup_logging("json", "debug", stream=stream)
    with log.span(logger, "prefill", num_tokens=5):
        pass
    with pytest.raises(KeyError), log.span(logger, "prefill", level=logging.INFO):
        raise KeyError("x")
    good, bad = (json.loads(line) for line in lines(stream))
    assert good["num_tokens"] == 5
    assert 0 <= good["duration_seconds"] < 1
    assert "error_type" not in good
    assert (bad["error_type"], bad["level"]) == ("KeyError", "INFO")


async def test_context_belongs_to_a_task(stream: io.StringIO) -> None:
    log.setup_logging("json", stream=stream)

    async def work(request_id: str) -> None:
        with log.bind(request_id=request_id):
            await asyncio.sleep(0)
            logger.info(request_id)
            await asyncio.to_thread(logger.info, request_id)

    await asyncio.gather(*(work(str(number)) for number in range(5)))
    parsed = [json.loads(line) for line in lines(stream)]
    assert len(parsed) == 10
    assert all(line["event"] == line["request_id"] for line in parsed)


def test_a_second_setup_replaces_the_first(stream: io.StringIO) -> None:
    first = io.StringIO()
    log.setup_logging("text", stream=first)
    log.setup_logging("json", "warning", stream=stream)
    logger.info("too low")
    logger.warning("seen")
    assert first.getvalue() == ""
    assert [json.loads(line)["event"] for line in lines(stream)] == ["seen"]


@pytest.mark.parametrize(
    "arguments", [{"format": "xml"}, {"level": "LOUD"}, {"format": "json", "level": ""}]
)
def test_wrong_settings_are_refused(stream: io.StringIO, arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"log format|level"):
        log.setup_logging(**arguments, stream=stream)

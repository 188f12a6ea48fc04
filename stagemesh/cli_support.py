"""What both command lines share: sizes, the token, logging options, signals."""

import asyncio
import atexit
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from stagemesh.errors import ConfigError, StagemeshError
from stagemesh.log import setup_logging

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "2GiB", "500 MB" or "1073741824".

    Raises:
        ConfigError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(
            f"not a size: {text!r}; write for example 2GiB, 500MB or a number of bytes"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


class Bytes(click.ParamType[int]):
    """A size on the command line."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail with the reason."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def read_token(path: Path | None, value: str | None) -> str | None:
    """The cluster's token from a file or, where none is given, from the environment's value.

    Raises:
        ConfigError: the file is not readable or empty.
    """
    if path is None:
        return value or None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror}") from error
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    return token


def token_options(function: F) -> F:
    """Add --token-file and the variable STAGEMESH_TOKEN (as `token`)."""
    function = click.option(
        "--token-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the cluster's secret; the variable STAGEMESH_TOKEN does too.",
    )(function)
    return click.option("--token", envvar="STAGEMESH_TOKEN", hidden=True)(function)


def log_options(function: F) -> F:
    """Add --log-level and --log-format."""
    function = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
    )(function)
    return click.option(
        "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
    )(function)


def run_until_signalled(main: Coroutine[Any, Any, int], *, exit_with_parent: bool = False) -> int:
    """Run `main`; SIGTERM and SIGINT cancel it once, a second signal exits at once with 128 + n.

    Args:
        main: the program; its result is the exit code.
        exit_with_parent: also stop when standard input ends, which it does when the parent process
            that holds its other end dies, however it dies.

    Returns:
        The exit code: of `main`, or 0 after a first signal.
    """
    # The interpreter's last collection looks at each object that torch and transformers made, which
    # takes seconds, after all has been closed: frozen ones it leaves to the end of the process.
    atexit.register(gc.freeze)
    return asyncio.run(_run_until_signalled(main, exit_with_parent=exit_with_parent))


async def _run_until_signalled(main: Coroutine[Any, Any, int], *, exit_with_parent: bool) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(main, name="main")
    stopping = False

    def stop(number: int) -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + number)
        stopping = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    if exit_with_parent:
        loop.add_reader(sys.stdin.fileno(), _on_stdin, loop, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not stopping:
            raise
        return 0


def _on_stdin(loop: asyncio.AbstractEventLoop, stop: Callable[[int], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop(signal.SIGTERM)


def guarded(function: Callable[[], int], *, log_format: str, log_level: str) -> None:
    """Set up logging, run, exit: an error of ours is one line on standard error and status 1."""
    setup_logging("json" if log_format == "json" else "text", log_level)
    try:
        status = function()
    except StagemeshError as error:
        click.echo(f"error: {error}", err=True)
        status = 1
    except ExceptionGroup as group:
        ours, rest = group.split(StagemeshError)
        if rest is not None or ours is None:
            raise
        for each in _leaves(ours):
            click.echo(f"error: {each}", err=True)
        status = 1
    raise SystemExit(status)


def _leaves(group: ExceptionGroup[StagemeshError]) -> list[Exception]:
    """The exceptions of nested groups, in order."""
    leaves: list[Exception] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, ExceptionGroup) else [error])
    return leaves

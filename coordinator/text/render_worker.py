"""Child process that renders one chat template: `python -m coordinator.text.render_worker`.

Whatever a template does, it does it here: bounded in processor time (a timer of the kernel, which
also ends a single long call), memory and output, and unable to open any file. The parent sees an
answer, an error or the end of the connection.

The connection is file descriptor 0. First frame: the source and the limits. Then one frame per
rendering and one answer for each: {"text": ...} or {"error": ...}.
"""

import contextlib
import importlib
import resource
import signal
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.text.frames import pack_frame, receive_frame
from coordinator.text.template_environment import OutputTooLong, build_environment, render_template

_MAX_ERROR_CHARS = 500

# What code inside a template can raise. SyntaxError: Jinja writes Python, which has limits of its
# own. Anything else ends this process, and the parent says so.
_TEMPLATE_FAULTS = (
    TemplateError,
    OutputTooLong,
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
)


def main() -> None:
    """Serve renderings until the parent closes the connection."""
    connection = socket.socket(fileno=0)
    try:
        setup = receive_frame(connection, max_bytes=1 << 30)
        environment = build_environment()
        _load_all(environment)
        _confine(max_memory_bytes=setup["max_memory_bytes"])
        renderer = _Renderer(environment, setup=setup)
        while True:
            request = receive_frame(connection, max_bytes=1 << 30)
            connection.sendall(pack_frame(renderer.answer(request)))
    except (EOFError, ConnectionError):
        return


def _load_all(environment: ImmutableSandboxedEnvironment) -> None:
    """Touch what Python and Jinja load at first use; later no file can be opened.

    Escapes in a template's strings load a codec, its first error loads Jinja's traceback rewriter.
    """
    importlib.import_module("jinja2.debug")
    for source in ("{{ '\\n\\u00e9' ~ [1.5, none, 'x']|tojson(indent=1) }}", "{{ 1 / 0 }}", "{% x"):
        with contextlib.suppress(ArithmeticError, TemplateError):
            environment.from_string(source).render()


def _confine(*, max_memory_bytes: int) -> None:
    """Bound this process for good: memory, no written bytes, no newly opened file."""
    for kind, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        _, most = resource.getrlimit(kind)
        bound = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (bound, bound))


class _Renderer:
    """Renders the one template, compiled at the first rendering."""

    def __init__(
        self, environment: ImmutableSandboxedEnvironment, *, setup: Mapping[str, Any]
    ) -> None:
        self._environment = environment
        self._setup = setup
        self._template: Template | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Render within the limit of processor time."""
        # The default action of SIGPROF ends the process, also amid a call that never returns.
        signal.setitimer(signal.ITIMER_PROF, self._setup["max_cpu_seconds"])
        try:
            return {"text": self._render(request)}
        except _TEMPLATE_FAULTS as error:
            return {"error": _describe(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _render(self, request: Mapping[str, Any]) -> str:
        if self._template is None:
            self._template = self._environment.from_string(self._setup["source"])
        return render_template(
            self._template,
            variables={**self._setup["special_tokens"], **request["variables"]},
            now=datetime.fromisoformat(request["now"]),
            max_chars=self._setup["max_output_chars"],
        )


def _describe(error: BaseException) -> str:
    """One line that says what went wrong, bounded since templates write their own messages."""
    message = str(error)[:_MAX_ERROR_CHARS] or "no message"
    place = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return f"{type(error).__name__}: {message}{place}"


if __name__ == "__main__":
    main()

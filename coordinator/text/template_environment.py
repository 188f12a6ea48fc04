"""The Jinja environment of chat templates, the same dialect as transformers renders.

Runs in the renderer's child process only (`coordinator.text.render_worker`): compiling a template
already evaluates its constants, so not even that is safe in the coordinator itself.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class OutputTooLong(Exception):
    """The rendered text passed its limit."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's own words for training.

    Here it renders what is inside.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja reads this attribute as it is

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """Jinja's namespace without underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold the underscore name {name!r}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime(now: datetime) -> Callable[[str], str]:
    return lambda pattern: now.strftime(pattern)


def build_environment() -> ImmutableSandboxedEnvironment:
    """The sandbox: no attribute that leads to Python's internals, no changes to its input."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.pop("lipsum", None)
    environment.globals.update(
        raise_exception=_raise_exception, dict=_new_dict, namespace=_SafeNamespace
    )
    return environment


def render_template(
    template: Template, *, variables: Mapping[str, Any], now: datetime, max_chars: int
) -> str:
    """Render a template piece by piece.

    Raises:
        OutputTooLong: the text passed `max_chars`.
        Exception: whatever the template runs into, TemplateError and its kin above all.
    """
    pieces: list[str] = []
    length = 0
    for piece in template.generate(strftime_now=_strftime(now), **variables):
        length += len(piece)
        if length > max_chars:
            raise OutputTooLong(f"the rendered text is longer than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)

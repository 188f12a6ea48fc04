"""Parsers of request fields whose forms a plain type cannot say.

Each takes the decoded JSON value and returns ours, or raises `ValueError` with a sentence that
follows the parameter's name. They keep pydantic's unions out: a union's error names every form
that did not fit, where a client wants to hear about its own value.
"""

from typing import Any

MAX_STOPS = 4
MAX_STOP_CHARS = 1024


class UnsupportedError(ValueError):
    """A valid OpenAI feature that this server does not have; never ignored silently."""


def parse_stop(value: Any) -> tuple[str, ...]:
    """A string, up to four strings, or none; empty strings count as none."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string, a list of strings or null.")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}.")
    if any(len(s) > MAX_STOP_CHARS for s in stops):
        raise ValueError(f"a stop string may have at most {MAX_STOP_CHARS} characters.")
    return tuple(s for s in stops if s)


Prompt = str | tuple[int, ...]


def parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids or a list of token ids.")
    if all(_is_id(item) for item in value):
        return (tuple(value),)
    return tuple(_parse_prompt(item) for item in value)


def _parse_prompt(item: Any) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and item and all(_is_id(i) for i in item):
        return tuple(item)
    raise ValueError("a prompt of a list must be a string or a non-empty list of token ids.")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_content(value: Any, *, role: str) -> str:
    """The text of a message: a string, text parts joined with nothing between, or null.

    Null is an assistant's turn without text, and refused for every other role.
    """
    if value is None:
        if role == "assistant":
            return ""
        raise ValueError(f"must not be null for the role {role!r}.")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts.")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ValueError('a content part must be an object with a "type".')
    if kind != "text":
        raise UnsupportedError(
            f"content parts of type {kind[:40]!r} are unsupported, only 'text' is."
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError('a content part of type "text" needs a string "text".')
    return text


def parse_role(value: Any) -> str:
    """A role that a chat template knows; `developer` is the newer name of `system`."""
    if value in ("tool", "function"):
        raise UnsupportedError(f"the role {value!r} is unsupported: this server has no tool calls.")
    if value == "developer":
        return "system"
    if value not in ("system", "user", "assistant"):
        shown = repr(value)[:40]
        raise ValueError(f"must be system, developer, user or assistant, got {shown}.")
    return str(value)


def check_response_format(value: Any) -> None:
    """Only plain text; a client that asked for JSON must not be given anything else."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise ValueError('must be an object with a "type".')
    if kind in ("json_schema", "json_object"):
        raise UnsupportedError(f"the type {kind!r} is unsupported, only 'text' is.")
    if kind != "text":
        raise ValueError(f"unknown type {kind[:40]!r}, only 'text' is supported.")


def refuse_unless_empty(value: Any) -> None:
    """For fields of features that we do not have: null and empty forms change nothing."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return
    raise UnsupportedError("unsupported by this server; leave it out.")


def refuse_unless_zero(value: Any) -> None:
    """For penalties that we do not apply: 0 and null change nothing."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number.")
    if value != 0:
        raise UnsupportedError("unsupported by this server; only 0 is accepted.")


def refuse_tool_choice(value: Any) -> None:
    """Without tools, `none` and `auto` both mean plain text."""
    if value not in (None, "none", "auto"):
        raise UnsupportedError("unsupported: this server has no tool calls.")

"""A model's chat template: messages in, prompt text out.

A template is a program that came with a model, so it is not trusted. Two walls stand around it:

1. Jinja's immutable sandbox: no way from a value to Python's internals, no changes to the input,
   no range over more than 100,000 numbers.
2. A child process (`render_process`), because no check inside an interpreter stops every slow or
   huge operation (nested loops, doubled strings, a list of lists of lists; even compiling computes
   constants). The kernel bounds its processor time and memory and lets it open no file. A rendering
   costs a round trip of well under a millisecond; the child starts at the first one and lives as
   long as the `ChatTemplate`.

Every fault of a template is a ConfigError, so one request fails and the others are served.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from coordinator.text.metadata import text_metadata
from coordinator.text.render_process import RenderKilled, RenderLimits, RenderProcess
from stagemesh.errors import ConfigError
from stagemesh.model_spec import ModelSpec


class ChatTemplate:
    """Renders conversations with one template.

    Args:
        source: the template, as in tokenizer_config.json or a GGUF's tokenizer.chat_template.
        bos_token: what the template's `bos_token` stands for; None is an empty text.
        eos_token: likewise.
        special_tokens: further names for the template ("pad_token", ...).
        limits: what one rendering may use.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self.source = source
        self._limits = limits or RenderLimits()
        names = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        setup = {
            "source": source,
            # An unset name is undefined in the template, which renders as nothing.
            "special_tokens": {key: value for key, value in names.items() if value is not None},
        }
        self._renderer = RenderProcess(setup, limits=self._limits)
        self._num_kills = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            messages: each with "role" and "content": text, a list of text parts, or None.
            add_generation_prompt: end with the head of the assistant's turn.
            tools: descriptions of tools, as the template expects them.

        Raises:
            ConfigError: the template refuses the messages, is faulty or passed a limit.
        """
        if self._num_kills >= self._limits.max_kills:
            raise ConfigError(
                f"the model's chat template passed its limits {self._num_kills} times and is not "
                "run any more; use /v1/completions, or load the model with another template"
            )
        variables = {
            "messages": [_with_joined_parts(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        request = {"variables": variables, "now": datetime.now().isoformat()}
        try:
            answer = self._renderer.render(request)
        except RenderKilled as error:
            self._num_kills += 1
            raise ConfigError(f"the model's chat template was stopped: {error}") from error
        except (TypeError, RecursionError) as error:
            raise ConfigError(f"messages and tools must be plain JSON values: {error}") from error
        if "error" in answer:
            raise ConfigError(f"the model's chat template failed: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the renderer's process; happens by itself when the object is dropped."""
        self._renderer.close()


def load_chat_template(spec: ModelSpec, *, limits: RenderLimits | None = None) -> ChatTemplate:
    """The chat template of a model.

    Raises:
        ConfigError: the model has none.
        CheckpointError: the model's settings are faulty.
    """
    metadata = text_metadata(spec)
    if not metadata.chat_template:
        raise ConfigError(
            f"model {spec.name} has no chat template, so it cannot take chat messages; "
            "use /v1/completions"
        )
    named = dict(metadata.special_tokens)
    bos_token, eos_token = named.pop("bos_token", None), named.pop("eos_token", None)
    return ChatTemplate(
        metadata.chat_template,
        bos_token=bos_token,
        eos_token=eos_token,
        special_tokens=named,
        limits=limits,
    )


def _with_joined_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a list of text parts joined to one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("the content of a message must be text or a list of text parts")
    return {**message, "content": "".join(texts)}

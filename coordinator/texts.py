"""Tokenizers and chat templates of the served models, made once."""

from collections.abc import Iterable

from coordinator.text.chat_template import ChatTemplate, load_chat_template
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.errors import ConfigError, ModelNotFound
from stagemesh.model_spec import ModelSpec


class ServedTexts:
    """The API's TextProvider.

    Args:
        models: name and headers of each served model.

    Raises:
        ModelError: a model has no usable tokenizer.
    """

    def __init__(self, models: Iterable[tuple[str, ModelSpec]]) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        self._templates: dict[str, ChatTemplate | ConfigError] = {}
        for name, spec in models:
            self._tokenizers[name] = load_tokenizer(spec)
            try:
                self._templates[name] = load_chat_template(spec)
            except ConfigError as error:
                # Such a model still serves completions; whoever chats with it is told why not.
                self._templates[name] = error

    def tokenizer(self, model_name: str) -> Tokenizer:
        """The tokenizer of a served model.

        Raises:
            ModelNotFound: it is not served.
        """
        if model_name not in self._tokenizers:
            raise ModelNotFound(f"no model {model_name!r} is served")
        return self._tokenizers[model_name]

    def chat_template(self, model_name: str) -> ChatTemplate:
        """The chat template of a served model.

        Raises:
            ModelNotFound: it is not served.
            ConfigError: it has no template.
        """
        if model_name not in self._templates:
            raise ModelNotFound(f"no model {model_name!r} is served")
        template = self._templates[model_name]
        if isinstance(template, ConfigError):
            raise ConfigError(str(template)) from template
        return template

    def close(self) -> None:
        """End the templates' processes."""
        for template in self._templates.values():
            if isinstance(template, ChatTemplate):
                template.close()

"""What the API needs to know about text, by the name of a served model."""

from typing import Protocol

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.tokenizer import Tokenizer


class TextProvider(Protocol):
    """Finds a model's tokenizer and chat template; both are made once and shared."""

    def tokenizer(self, model_name: str) -> Tokenizer:
        """The tokenizer of a served model."""
        ...

    def chat_template(self, model_name: str) -> ChatTemplate:
        """The chat template of a served model.

        Raises:
            ConfigError: the model has none, so it serves completions only.
        """
        ...

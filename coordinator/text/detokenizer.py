"""Text from token ids while they arrive, never with half a character.

A token may end inside a UTF-8 character. Its bytes wait until the character is whole, so a stream
holds no U+FFFD for text that is valid as a whole. Bytes that no later byte can make valid become
U+FFFD at once, and a character that was never finished becomes one U+FFFD at the very end: both as
in `Tokenizer.decode`, so that a streamed and a whole answer are the same text.
"""

import codecs

from coordinator.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Decodes one sequence, token by token.

    Args:
        tokenizer: spells the tokens.
        skip_special_tokens: special tokens give no text.
        is_continuation: the text follows a prompt, so that a sentencepiece vocabulary's space at
            the very start stays. Off, it is dropped as in `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = tokenizer.strips_leading_space and not is_continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is complete now, which may be empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if raw and self._strip_space:
            raw = raw.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """End the text: U+FFFD when a character was left unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)

"""One sequence's tokens become text events. Pure: tokens in, events out.

A token's text may be held back: its bytes are part of a character, or they may be the start of a
stop string. Its log-probability is held back with it, so what the client has of both always
belongs together, and tokens of a stop string appear in neither.
"""

from collections import deque
from dataclasses import dataclass

from coordinator.api.sequences import Choice
from coordinator.generation import FinishReason, GeneratedToken
from coordinator.text.detokenizer import StreamDetokenizer
from coordinator.text.stop_strings import StopChecker
from coordinator.text.tokenizer import Tokenizer
from stagemesh.steps import TargetScore, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """A token of the text with its log-probability."""

    token_id: int
    """The token."""
    logprob: float | None
    """None for the first token of an echoed prompt, which nothing predicts."""
    top: tuple[TokenLogprob, ...]
    """Most likely tokens at its place."""
    text_offset: int
    """Where its text begins in the choice's text, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvent:
    """What one or more tokens add to a choice."""

    index: int
    """The choice."""
    text: str = ""
    """New text; the texts of all events, joined, are the choice's."""
    scored: tuple[ScoredToken, ...] = ()
    """Scores of the tokens whose text begins in the text so far, where asked for."""
    num_tokens: int = 0
    """Generated tokens since the last event. The token that ends a sequence counts."""
    finish_reason: FinishReason | None = None
    """Set in the last event, and only there."""


class ChoiceText:
    """Turns one choice's tokens into events; one object per choice."""

    def __init__(self, choice: Choice, *, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._tokenizer = tokenizer
        self._detokenizer = StreamDetokenizer(tokenizer, is_continuation=choice.is_continuation)
        self._stops = StopChecker(choice.stop_strings)
        self._prompt_chars = len(choice.prompt_text)
        self._decoded_chars = 0
        self._emitted_chars = 0
        self._held: deque[ScoredToken] = deque()

    def opening(self, first: GeneratedToken | None) -> TextEvent:
        """The event of the echoed prompt; `first` carries its scores where asked for."""
        scores = first.prompt_scores if first is not None else ()
        return TextEvent(
            index=self._choice.index,
            text=self._choice.prompt_text,
            scored=self._score_prompt(scores),
        )

    def feed(self, token: GeneratedToken) -> TextEvent:
        """Take the next token; the event has no text where all of it is held back."""
        if token.token_id is None:
            return TextEvent(index=self._choice.index, finish_reason=token.finish_reason)
        is_end = token.token_id in self._choice.request.stop_token_ids
        piece = "" if is_end else self._decode(token, token_id=token.token_id)
        text, stop = self._stops.feed(piece)
        if token.finish_reason is not None and stop is None:
            rest, stop = self._stops.feed(self._detokenizer.flush())
            text += rest + self._stops.flush()
        finish_reason = token.finish_reason if stop is None else "stop"
        self._emitted_chars += len(text)
        return TextEvent(
            index=self._choice.index,
            text=text,
            scored=self._release(is_last=finish_reason is not None and stop is None),
            num_tokens=1,
            finish_reason=finish_reason,
        )

    def _decode(self, token: GeneratedToken, *, token_id: int) -> str:
        if self._choice.request.sampling.logprobs:
            self._held.append(
                ScoredToken(
                    token_id=token_id,
                    logprob=token.logprob,
                    top=token.top,
                    text_offset=self._prompt_chars + self._decoded_chars,
                )
            )
        piece = self._detokenizer.add(token_id)
        self._decoded_chars += len(piece)
        return piece

    def _release(self, *, is_last: bool) -> tuple[ScoredToken, ...]:
        """The held tokens whose text begins in what has been emitted; at the end all."""
        border = self._prompt_chars + self._emitted_chars
        released: list[ScoredToken] = []
        while self._held and (is_last or self._held[0].text_offset < border):
            released.append(self._held.popleft())
        return tuple(released)

    def _score_prompt(self, scores: tuple[TargetScore | None, ...]) -> tuple[ScoredToken, ...]:
        scored: list[ScoredToken] = []
        detokenizer = StreamDetokenizer(self._tokenizer)
        offset = 0
        # Without scores there is nothing to say; with them there is one for each token.
        token_ids = self._choice.request.prompt_token_ids if scores else ()
        for token_id, score in zip(token_ids, scores, strict=True):
            scored.append(
                ScoredToken(
                    token_id=token_id,
                    logprob=score.logprob if score is not None else None,
                    top=score.top if score is not None else (),
                    text_offset=offset,
                )
            )
            offset += len(detokenizer.add(token_id))
        return tuple(scored)

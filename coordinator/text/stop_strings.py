"""Stop strings over streamed text: pure, text in and text out.

The match that completes first wins, whatever the pieces the text arrives in; of those that complete
at the same character the longest one does. Text is held back only while it may still be the start
of a stop string:

    stops ("FG",)    feed "DE" -> "DE"     feed "F" -> ""    feed "G" -> "", matched "FG"
    stops ("FX",)    feed "DE" -> "DE"     feed "F" -> ""    feed "G" -> "FG"
"""

from stagemesh.errors import ConfigError


class StopChecker:
    """Passes text on until one of the stop strings has been seen.

    Args:
        stops: the stop strings; none of them empty. Without any, all text passes at once.

    Raises:
        ConfigError: a stop string is empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("a stop string must not be empty")
        self._stops = stops
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns:
            The text that may go out now, and the stop string once it has been seen. Neither the
            stop string nor anything after it ever goes out; after a match nothing does.
        """
        if self._matched is not None:
            return "", self._matched
        pending = self._held + text
        match = self._first_match(pending)
        if match is not None:
            start, self._matched = match
            self._held = ""
            return pending[:start], self._matched
        keep = self._num_held(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], None

    def flush(self) -> str:
        """Return what was held back; the text has ended, so it is no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str) -> tuple[int, str] | None:
        """Start and text of the match with the earliest end, the longest of equals."""
        starts = [(pending.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_held(self, pending: str) -> int:
        """Length of the longest end of `pending` that a stop string starts with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            tail = pending[len(pending) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

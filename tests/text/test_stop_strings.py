"""Stop strings over streamed text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.stop_strings import StopChecker
from stagemesh.errors import ConfigError


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """Joined output and match of a whole stream."""
    checker = StopChecker(stops)
    out, matched = "", None
    for piece in pieces:
        emitted, matched = checker.feed(piece)
        out += emitted
        if matched is not None:
            break
    return out + checker.flush(), matched


def brute_force(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The rule, over the whole text: look after each character whether a stop string has ended."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        # A model that says the letters after C, one token each.
        ("DEFGHIJ", ("", "DEFGHIJ")),
        ("FG", ("DE", "FG")),
        ("FX", ("DEFGHIJKLM", None)),
        ("MN", ("DEFGHIJKLM", None)),  # its start is still held when the text ends
    ],
)
def test_stop_string_over_single_letter_tokens(stop: str, expected: tuple[str, str | None]) -> None:
    assert run((stop,), list("DEFGHIJKLM")) == expected


def test_only_a_possible_start_is_held_back() -> None:
    checker = StopChecker(("FX", "HIX"))
    assert [checker.feed(letter)[0] for letter in "DEFGHIJ"] == [
        "D",
        "E",
        "",
        "FG",
        "",
        "",
        "HIJ",
    ]
    assert checker.flush() == ""


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ((), ["any", "thing"], ("anything", None)),
        (("ab",), ["xxa", "by"], ("xx", "ab")),  # across a token border
        (("ab",), ["xabyab"], ("x", "ab")),  # inside a token: nothing after it goes out
        (("b", "abc"), ["abc"], ("a", "b")),  # the match that completes first wins
        (("c", "abc"), ["abc"], ("", "abc")),  # the longest of those that complete together
        (("aab",), ["aa", "ab"], ("a", "aab")),  # a failed start may hold the true one
        (("\n\n",), ["one\n", "two\n", "\n"], ("one\ntwo", "\n\n")),
    ],
)
def test_matches(
    stops: tuple[str, ...], pieces: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(stops, pieces) == expected


def test_nothing_goes_out_after_a_match() -> None:
    checker = StopChecker(("b",))
    assert checker.feed("abc") == ("a", "b")
    assert checker.feed("more") == ("", "b")
    assert checker.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        StopChecker(("a", ""))


@given(
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=4).map(tuple),
    pieces=st.lists(st.text("ab\u00e9", max_size=5), max_size=12),
)
@settings(deadline=None)
def test_stream_equals_brute_force(stops: tuple[str, ...], pieces: list[str]) -> None:
    assert run(stops, pieces) == brute_force(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    text=st.text("ab", max_size=20),
)
@settings(deadline=None)
def test_no_more_is_held_than_may_become_a_stop_string(stops: tuple[str, ...], text: str) -> None:
    checker = StopChecker(stops)
    out = ""
    for letter in text:
        emitted, matched = checker.feed(letter)
        out += emitted
        if matched is not None:
            return
    held = checker.flush()
    assert out + held == text
    assert held == "" or any(stop.startswith(held) for stop in stops)

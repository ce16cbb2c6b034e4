"""Stop strings in text that arrives in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.stop_strings import StopStrings


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What comes out for each piece, then at the end; and the match."""
    stop_strings = StopStrings(stops, include_in_output=include)
    outputs = [stop_strings.feed(piece) for piece in pieces]
    return [*outputs, stop_strings.flush()], stop_strings.matched


def by_definition(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The shortest prefix of the text that ends with a stop string decides."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_text_passes_at_once_when_nothing_looks_like_a_stop_string() -> None:
    assert run(["hello", " world"], ["STOP"]) == (["hello", " world", ""], None)


def test_the_longest_possible_beginning_is_held_back_and_let_go() -> None:
    assert run(["a<", "/", "b"], ["</s>"]) == (["a", "", "</b", ""], None)
    assert run(["x</", "s"], ["</s>"]) == (["x", "", "</s"], None)


def test_a_match_over_several_pieces_ends_the_text() -> None:
    assert run(["a EN", "D b", "c"], ["END"]) == (["a ", "", "", ""], "END")


def test_a_match_can_be_part_of_the_output() -> None:
    assert run(["a EN", "D b"], ["END"], include=True) == (["a ", "END", ""], "END")


def test_the_match_that_is_complete_first_wins_and_then_the_longer_one() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa", ""], "bc")
    assert run(["xabc"], ["c", "abc"]) == (["x", ""], "abc")


def test_a_repeated_beginning_is_not_missed() -> None:
    assert run(["aab"], ["ab"]) == (["a", ""], "ab")
    assert run(["a", "a", "a", "b"], ["aab"]) == (["", "", "a", "", ""], "aab")


def test_a_match_counts_if_its_end_may_be_one() -> None:
    stop_strings = StopStrings(["END", "ab", "abc"])
    assert stop_strings.feed("END EN", may_end=False) == "END "
    assert stop_strings.feed("x ab", may_end=False) == "ENx "
    assert stop_strings.feed("c") == ""
    assert stop_strings.matched == "abc"


@pytest.mark.parametrize("include", [False, True])
@given(
    text=st.text("abé", max_size=30),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    include: bool, text: str, stops: list[str], cuts: list[int]
) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    outputs, matched = run(pieces, stops, include=include)
    assert ("".join(outputs), matched) == by_definition(text, stops, include=include)

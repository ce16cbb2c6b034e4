"""Streaming text: whole characters only, and in sum the text of all tokens."""

import codecs
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerFile

from connector.server_messages import TokenOutput
from engine.request import SampledToken
from server.choice import Choice, OutputOptions
from server.detokenizer import Detokenizer
from server.tokenizer import Tokenizer
from tests.byte_fallback import FIRST_BYTE, byte_fallback_json
from tests.server_rig import SAMPLE_TEXT, SPECIAL_TOKENS, tokenizer_json

texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from([*SAMPLE_TEXT, "👩‍👩‍👧‍👦", "\ufffd", "é", "🏳️‍🌈", "\n", " "]), max_size=4).map("".join),
)


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(TokenizerFile.from_str(tokenizer_json()))


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer(TokenizerFile.from_str(byte_fallback_json()))


def stream(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.feed(token_id) for token_id in ids]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@given(text=texts)
def test_the_pieces_joined_are_the_text(text: str) -> None:
    ids = encode(byte_level(), text)
    assert "".join(stream(byte_level(), ids)) == text


@given(text=texts)
def test_no_piece_holds_a_part_of_a_character(text: str) -> None:
    pieces = stream(byte_level(), encode(byte_level(), text))
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(ids=st.lists(st.integers(3, 258), max_size=60))
def test_arbitrary_bytes_become_what_a_decoder_makes_of_them_less_an_unfinished_end(ids: list[int]) -> None:
    raw = b"".join(map(byte_level().token_bytes, ids))
    expected = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    assert "".join(stream(byte_level(), ids)) == expected


@given(ids=st.lists(st.integers(0, 339), max_size=60), prompt=st.lists(st.integers(0, 339), max_size=30))
def test_any_ids_after_any_prompt_give_the_text_of_their_bytes(ids: list[int], prompt: list[int]) -> None:
    tokenizer = byte_level()
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids if token_id not in tokenizer.special_ids)
    expected = codecs.getincrementaldecoder("utf-8")("replace").decode(raw)
    assert "".join(stream(tokenizer, ids, tuple(prompt))) == expected


def test_skipped_special_tokens_leave_no_trace_and_do_not_hold_text_back() -> None:
    special = byte_level().special_ids
    assert len(special) == len(SPECIAL_TOKENS)
    ids = [*encode(byte_level(), "ab"), *list(special) * 16, *encode(byte_level(), "é👍")]
    assert "".join(stream(byte_level(), ids)) == "abé👍"


def test_a_token_that_ends_within_a_character_shows_what_comes_before_it() -> None:
    tokenizer = byte_level()
    ids = [i for i in range(340) if tokenizer.token_bytes(i) == b" \xd0"]
    assert ids, "no such token in this vocabulary"
    assert stream(tokenizer, [*ids, *encode(tokenizer, "x")]) == [" ", "\ufffdx"]


def test_special_tokens_can_be_shown() -> None:
    detokenizer = Detokenizer(byte_level(), skip_special_tokens=False)
    assert detokenizer.feed(2) == SPECIAL_TOKENS[2]


@given(text=st.text("the cataé👍日", max_size=30))
def test_byte_fallback_tokenizers_stream_whole_characters(text: str) -> None:
    text = " ".join(text.split())
    ids = encode(byte_fallback(), text)
    assert "".join(stream(byte_fallback(), ids)) == byte_fallback().decode(ids, skip_special_tokens=True)


def test_the_prompt_decides_about_the_first_space() -> None:
    ids = encode(byte_fallback(), "the cat")
    assert "".join(stream(byte_fallback(), ids)) == "the cat"
    assert "".join(stream(byte_fallback(), ids, tuple(ids))) == " the cat"


def test_bytes_that_turn_out_to_be_no_character_do_not_end_the_stream() -> None:
    tokenizer = byte_fallback()
    ids = [*(FIRST_BYTE + byte for byte in b"\xe4\xbd\xa0\xe4"), *encode(tokenizer, "the cat")]
    text = "".join(stream(tokenizer, ids))
    assert text == "你\ufffd the cat"


@pytest.mark.parametrize("text", ["", "abc", "日本語 👍🏽"])
def test_token_bytes_joined_are_the_text(text: str) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        raw = b"".join(map(tokenizer.token_bytes, encode(tokenizer, text)))
        assert raw.decode().strip() == text


def test_tokens_show_as_text_or_as_bytes() -> None:
    lone = next(i for i in range(340) if byte_level().token_bytes(i) == b"\xf0")
    assert byte_level().token_text(lone) == "bytes:\\xf0"
    assert byte_level().token_text(encode(byte_level(), "a")[0]) == "a"
    assert byte_level().token_bytes(10_000) == b""


def choice_text(ids: list[int], sizes: list[int], options: OutputOptions) -> tuple[str, str | None, object]:
    """Text, finish and stop reason when the tokens come in outputs of these sizes."""
    choice = Choice(0, byte_level(), (), options)
    text, position = "", 0
    for size in [*sizes, len(ids)]:
        part = ids[position : position + size]
        position += size
        is_last = position >= len(ids)
        output = TokenOutput(
            request_id="r", tokens=[SampledToken(i) for i in part], finish_reason="length" if is_last else None
        )
        delta = choice.add(output)
        text += delta.text
        if delta.finish_reason is not None:
            return text, delta.finish_reason, delta.stop_reason
    raise AssertionError("not finished")


@given(
    text=texts,
    stops=st.lists(st.sampled_from(["é", "The", "👍", " ", "ка", "ab", "日本"]), max_size=2),
    sizes=st.lists(st.integers(1, 5), max_size=10),
)
def test_text_and_end_are_the_same_however_tokens_are_grouped(text: str, stops: list[str], sizes: list[int]) -> None:
    ids = encode(byte_level(), text)
    options = OutputOptions(stop=tuple(stops))
    result = choice_text(ids, sizes, options)
    assert result == choice_text(ids, [], options)
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    assert result[0] == (text[: min(ends)] if ends else text)
    assert (result[1], result[2] is not None) == (("stop", True) if ends else ("length", False))

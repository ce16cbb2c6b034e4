"""Events however they are cut, and what one says."""

from random import Random

import pytest

from loadtest.chunk import read_chunk
from loadtest.sse import EventParser

BODY = b": hello\n\ndata: one\n\ndata:two\r\n\r\nevent: x\r\ndata: three\r\nid: 4\r\n\r\n: ping\n\ndata: a\ndata: b\n\n"
EVENTS = [b"one", b"two", b"three", b"a\nb"]


def test_events_are_the_same_however_the_body_is_cut() -> None:
    rng = Random(5)
    for size in [1, 2, 3, len(BODY), *(rng.randrange(4, 30) for _ in range(50))]:
        parser = EventParser()
        found = [data for start in range(0, len(BODY), size) for data in parser.feed(BODY[start : start + size])]
        assert found == EVENTS, size
        assert parser.is_between_events


def test_an_event_is_given_out_with_the_byte_that_completes_it() -> None:
    parser = EventParser()
    assert parser.feed(b"data: one\n") == []
    assert not parser.is_between_events
    assert parser.feed(b"\ndata: t") == [b"one"]
    assert parser.feed(b"wo\n\n") == [b"two"]


def test_a_carriage_return_in_the_data_stays() -> None:
    assert EventParser().feed(b"data: a\rb\n\n") == [b"a\rb"]


@pytest.mark.parametrize(
    ("choice", "bears", "may_bear"),
    [
        ('{"text": "a", "finish_reason": null}', True, False),
        ('{"text": "a", "finish_reason": "length"}', True, False),
        ('{"text": "", "finish_reason": null}', True, False),
        ('{"text": "", "finish_reason": "stop"}', False, True),
        ('{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}', False, False),
        ('{"delta": {"role": "assistant", "content": "a"}, "finish_reason": null}', True, False),
        ('{"delta": {"content": "a"}, "finish_reason": null}', True, False),
        ('{"delta": {"reasoning_content": "a"}, "finish_reason": null}', True, False),
        ('{"delta": {"tool_calls": [{}]}, "finish_reason": null}', True, False),
        ('{"delta": {}, "finish_reason": "stop"}', False, True),
    ],
)
def test_which_events_bear_tokens(choice: str, bears: bool, may_bear: bool) -> None:
    chunk = read_chunk(b'{"choices": [' + choice.encode() + b"]}")
    assert (chunk.bears_token, chunk.may_bear_token) == (bears, may_bear)


def test_usage_timings_and_errors() -> None:
    usage = read_chunk(
        b'{"choices": [], "usage": {"completion_tokens": 3}, "timings": {"queue": 1, "on": true, "x": "y"}}'
    )
    assert usage.usage == {"completion_tokens": 3}
    assert usage.timings == {"queue": 1.0}
    assert not usage.bears_token
    assert read_chunk(b'{"error": {"message": "gone"}}').error == "gone"
    assert read_chunk(b'{"error": "gone"}').error == "gone"
    for nonsense in (b"{", b"[]", b"3"):
        with pytest.raises(ValueError, match=r"."):
            read_chunk(nonsense)

"""Reads strict JSON from text that arrives in pieces: each reader stops right behind its value.

What is wrong raises `Malformed`, with the source at the first token that cannot be there.
"""

import json
import re
from collections.abc import Sequence

from server.text_source import SPACE, EndedEarly, Malformed, Reading, TextSource

_STRING_RUN = re.compile(r'(?:[^"\\\x00-\x1f\ud800-\udfff]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")


def read_value(source: TextSource) -> Reading[None]:
    """Any value. Keeps its own stack, so that depth costs no recursion."""
    closers: list[str] = []
    while True:
        is_complete = yield from _begin_value(source, closers)
        while is_complete:
            if not closers:
                return
            is_complete = yield from _end_or_next(source, closers)


def read_string(source: TextSource) -> Reading[str]:
    """A string's value. Unlike the other readers it gives up at the string's start."""
    start = source.position
    try:
        yield from _skip_string(source)
    except Malformed:
        source.position = start
        raise
    value: str = json.loads(source.text[start : source.position])
    return value


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    source = TextSource()
    source.text, source.ended = text.strip(SPACE), True
    try:
        for _ in read_value(source):
            raise AssertionError("waits for text that has ended")
    except Malformed:
        return False
    return not source.rest and source.text.startswith("{")


def _begin_value(source: TextSource, closers: list[str]) -> Reading[bool]:
    """Reads a scalar, or the start of a container up to its first value. Says whether a value is complete."""
    yield from source.skip_space()
    match (yield from source.peek()):
        case "{":
            source.take(1)
            closers.append("}")
            return (yield from _begin_members(source, closers))
        case "[":
            source.take(1)
            closers.append("]")
            return (yield from _closes(source, closers))
        case '"':
            yield from _skip_string(source)
        case _:
            yield from _skip_scalar(source)
    return True


def _begin_members(source: TextSource, closers: list[str]) -> Reading[bool]:
    if (yield from _closes(source, closers)):
        return True
    yield from skip_key(source)
    return False


def _closes(source: TextSource, closers: list[str]) -> Reading[bool]:
    yield from source.skip_space()
    if (yield from source.accept(closers[-1])):
        closers.pop()
        return True
    return False


def _end_or_next(source: TextSource, closers: list[str]) -> Reading[bool]:
    """Behind a value in a container: reads the container's end, which completes it, or what precedes its next value."""
    if (yield from _closes(source, closers)):
        return True
    yield from source.expect(",")
    if closers[-1] == "}":
        yield from source.skip_space()
        yield from skip_key(source)
    return False


def skip_key(source: TextSource) -> Reading[None]:
    """A member's name and the colon."""
    yield from _skip_string(source)
    yield from source.skip_space()
    yield from source.expect(":")


def _skip_string(source: TextSource) -> Reading[None]:
    yield from source.expect('"')
    while True:
        source.take_match(_STRING_RUN)
        character = yield from source.peek()
        if character == '"':
            source.take(1)
            return
        if _PARTIAL_ESCAPE.fullmatch(source.rest):
            if source.ended:
                raise EndedEarly
            yield
        elif not character:
            raise EndedEarly
        elif not _STRING_RUN.match(source.text, source.position):
            raise Malformed


def _skip_scalar(source: TextSource) -> Reading[None]:
    character = yield from source.peek()
    if character.isalpha():
        yield from _skip_word(source, _WORDS)
        return
    start = source.position
    scalar = yield from source.take_run(_SCALAR_RUN)
    is_cut = source.ended and not source.rest
    if is_cut or not _NUMBER.fullmatch(scalar):
        source.position = start
        raise (EndedEarly if is_cut else Malformed)


def _skip_word(source: TextSource, words: Sequence[str]) -> Reading[None]:
    for word in words:
        if (yield from source.accept(word)):
            return
    is_cut = source.ended and any(word.startswith(source.rest) for word in words)
    raise (EndedEarly if is_cut else Malformed)

"""Every format of tool calls: what is a call, what is content, and that the cutting of the text changes nothing."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from server.forced_tool_parser import NamedToolParser, RequiredToolParser
from server.tool_parser import CallArguments, CallStart, Piece, ToolParser
from server.tool_parsers import TOOL_PARSERS, choose_tool_parser

NAMES = ("get_weather", "add", "f")
ALL: dict[str, type[ToolParser]] = {**TOOL_PARSERS, "required": RequiredToolParser, "named": NamedToolParser}
Read = tuple[str, list[tuple[str, str]]]
"""Content, then name and arguments of each call."""


def make_parser(name: str, **settings: int) -> ToolParser:
    return ALL[name](NAMES[:1] if name == "named" else NAMES, **settings)


def joined(pieces: Sequence[Piece]) -> Read:
    """Fails where pieces come in an order that no client could join."""
    content, calls = "", []
    for piece in pieces:
        match piece:
            case CallStart():
                assert piece.index == len(calls)
                assert piece.call_id
                calls.append([piece.name, ""])
            case CallArguments():
                assert piece.index == len(calls) - 1
                assert piece.text
                calls[piece.index][1] += piece.text
            case str():
                assert piece
                content += piece
    return content, [(name, arguments) for name, arguments in calls]


def parse(name: str, pieces: Sequence[str], **settings: int) -> Read:
    parser = make_parser(name, **settings)
    read = [piece for text in pieces for piece in parser.feed(text)]
    return joined(read + parser.flush())


WEATHER = ("get_weather", '{"city": "Paris"}')
CASES: list[tuple[str, str, Read]] = [
    ("hermes", "Just text.", ("Just text.", [])),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', ("", [WEATHER])),
    (
        "hermes",
        'Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n'
        '{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call> Done.',
        ("Let me see. Done.", [("f", "{}"), WEATHER]),
    ),
    (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": [2, {"c": null}]}}, {"name": "f"}]</tool_call>',
        ("", [("add", '{"a": 1, "b": [2, {"c": null}]}'), ("f", "{}")]),
    ),
    ("hermes", "<tool_call>[]</tool_call>", ("", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}", "id": 3}</tool_call>', ("", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut sh', ("", [("f", '{"a": "cut sh')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', ("", [("f", '{"a": 1')])),
    ("hermes", '<tool_call>{"name": "get_', ('<tool_call>{"name": "get_', [])),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}', ('<tool_call>{"name": "other", "arguments": {}}', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', ('<tool_call>{"name": "f", "arguments": [1]}', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": 1}', ('<tool_call>{"name": "f", "arguments": 1}', [])),
    ("hermes", '<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', [])),
    (
        "hermes",
        '<tool_call>{bad}</tool_call><tool_call>{"name": "f"}</tool_call>',
        ("<tool_call>{bad}</tool_call>", [("f", "{}")]),
    ),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', ("<tool_call>", [("f", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "say "hi""}}</tool_call>',
        ('hi""}}</tool_call>', [("f", '{"a": "say "')]),
    ),
    ("hermes", "\n a < b, <tool", ("\n a < b, <tool", [])),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', ("", [WEATHER])),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "arguments": {"city": "Paris"}}', ("", [WEATHER])),
    (
        "llama3_json",
        ' {"name": "f", "parameters": {}}; {"type": "function", "name": "get_weather", "parameters": '
        '{"city": "Paris"}}',
        ("", [("f", "{}"), WEATHER]),
    ),
    ("llama3_json", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    ("llama3_json", '<|python_tag|>print("x")', ('<|python_tag|>print("x")', [])),
    ("llama3_json", 'So {"name": "f", "parameters": {}}', ('So {"name": "f", "parameters": {}}', [])),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', ("", [WEATHER])),
    (
        "mistral",
        'Yes.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}',
        ("Yes.", [WEATHER, ("f", "{}")]),
    ),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", ("[TOOL_CALLS]other[ARGS]{}", [])),
    ("pythonic", "[get_weather(city='Paris'), f()]", ("", [WEATHER, ("f", "{}")])),
    (
        "pythonic",
        ' <|python_start|>[add(a=[1, -2.5], b={"k": True, "s": "it\'s ) ]"}, c=null)]<|python_end|>',
        ("", [("add", '{"a": [1, -2.5], "b": {"k": true, "s": "it\'s ) ]"}, "c": null}')]),
    ),
    ("pythonic", "[1, 2]", ("[1, 2]", [])),
    ("pythonic", "[f(1)]", ("[f(1)]", [])),
    ("pythonic", "[f(a=open('x'))]", ("[f(a=open('x'))]", [])),
    ("pythonic", "[f(), add(a=1e999)]", ("add(a=1e999)]", [("f", "{}")])),
    ("pythonic", "[f(a='\\d', b='über \\' \\\\')]", ("", [("f", '{"a": "\\\\d", "b": "über \' \\\\"}')])),
    ("pythonic", "[f(**x)]", ("[f(**x)]", [])),
    ("pythonic", "[f(a='cut", ("[f(a='cut", [])),
    (
        "required",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "f"}]',
        ("", [WEATHER, ("f", "{}")]),
    ),
    ("named", ' {"city": "Paris"} ', ("", [WEATHER])),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_whole_and_character_by_character(name: str, text: str, expected: Read) -> None:
    assert parse(name, [text]) == expected
    assert parse(name, list(text)) == expected


@pytest.mark.parametrize("name", ALL)
def test_what_a_format_writes_it_reads(name: str) -> None:
    calls = [("get_weather", {"city": "Köln 👍", "n": {"a": [1.5, None, True]}}), ("f", {})]
    calls = calls[:1] if name == "named" else calls
    content, read = parse(name, [ALL[name].write_calls(calls)])
    assert content == ""
    assert [(called, json.loads(arguments)) for called, arguments in read] == calls


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "required", "named"])
def test_arguments_go_out_while_they_arrive(name: str) -> None:
    text = ALL[name].write_calls([("get_weather", {"city": "x" * 50})])
    parser = make_parser(name)
    arrived = [piece for character in text[:-10] for piece in parser.feed(character)]
    assert isinstance(arrived[0], CallStart)
    assert len(arrived) > 40
    assert joined(arrived)[1][0][1].startswith('{"city": "xxxx')


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|python_start|>", "<|python_end|>",
    '{"name": "f", "arguments": ', '{"name": "add", "parameters": ', '{"name": "nope", ', '"name"', '"arguments"', ": ",
    '{"a": 1}', "{}", "}", "{", "[", "]", "(", ")", ", ", "; ", '"', "'", "\\", "\\u00", "1", "-2.5e3", "tru", "null",
    "f(a=", "add(", "f", "é", "👍", "\n", " ", "<", "text",
]  # fmt: skip


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    fragments = st.sampled_from(FRAGMENTS) | st.text(max_size=3)
    text = draw(st.sampled_from([case[1] for case in CASES]) | st.just("")) + "".join(draw(st.lists(fragments)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=20)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400, deadline=None)
@example(name="hermes", pieces=["<tool_call>", '{"name": "f", "arguments": {"a": "\\u00', 'é9"}}'])
@given(name=st.sampled_from(sorted(ALL)), pieces=cut_texts())
def test_the_cutting_of_the_text_changes_nothing(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, pieces) == whole
    content, calls = whole
    if not calls and "[]" not in text.replace(" ", "").replace("\n", "").replace("\t", "").replace("\r", ""):
        assert content == text, "something was lost"


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_no_part_of_a_marker_is_ever_content(name: str) -> None:
    for marker in ALL[name].markers:
        parser = make_parser(name)
        assert all(parser.feed(character) == [] for character in marker)
        parser = make_parser(name)
        assert joined(parser.feed("Hi " + marker[:-1])) == ("Hi ", [])
        assert joined(parser.flush()) == (marker[:-1], [])


def test_a_single_call_where_only_one_is_wanted() -> None:
    text = TOOL_PARSERS["hermes"].write_calls([("f", {}), ("add", {"a": 1})])
    assert parse("hermes", [text], max_calls=1) == ("", [("f", "{}")])


def test_ids_are_unique_and_such_as_mistral_takes() -> None:
    assert make_parser("hermes").new_call_id().startswith("call_")
    assert len({make_parser("hermes").new_call_id() for _ in range(100)}) == 100
    assert make_parser("mistral").new_call_id().isalnum()
    assert len(make_parser("mistral").new_call_id()) == 9


def test_deep_nesting_costs_no_recursion() -> None:
    deep = '{"a":' * 20_000 + "1" + "}" * 20_000
    assert parse("hermes", [f'<tool_call>{{"name": "f", "arguments": {deep}}}</tool_call>']) == ("", [("f", deep)])
    parens = "[f(a=" + "[" * 20_000 + "]" * 20_000 + ")]"
    assert parse("pythonic", [parens]) == (parens, [])


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ messages }}", (), "hermes"),
        ("in <tool_call></tool_call> tags", ("<|python_tag|>",), "hermes"),
        ("{{ '[TOOL_CALLS]' }}", (), "mistral"),
        ("{{ messages }}", ("[TOOL_CALLS]",), "mistral"),
        ("{{ '<|python_tag|>' }}", (), "llama3_json"),
        ("you should put it as [func_name1(a=1)]", ("<|python_tag|>",), "pythonic"),
    ],
)
def test_auto_goes_by_the_template_then_by_the_vocabulary(
    template: str, tokens: tuple[str, ...], expected: str
) -> None:
    assert choose_tool_parser("auto", template, tokens) is TOOL_PARSERS[expected]
    assert choose_tool_parser("pythonic", template, tokens) is TOOL_PARSERS["pythonic"]


def test_an_unknown_parser_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser must be one of auto, hermes, llama3_json, mistral, pyth"):
        choose_tool_parser("nope", "", ())

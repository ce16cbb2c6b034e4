"""The fields that shape an output: what reaches the node for each, what is refused, and that nobody else suffers."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ErrorKind, RequestError, ServingError
from engine.grammar import MAX_GRAMMAR_CHARS, Grammar
from server import grammar_checker
from server.grammar_checker import GrammarChecker
from tests.server_rig import FakeNode, RunningServer, answers, running_server, write_model_directory

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä", None]}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"enum":["ä",null]}}}'
CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'
"""Overflows an 8 MiB stack."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    with running_server(directory, [node.address]) as server:
        server.wait_ready()
        yield node, server
    node.close()


@pytest.fixture
def node(shared: tuple[FakeNode, RunningServer]) -> FakeNode:
    shared[0].generates.clear()
    shared[0].script = answers([65])
    return shared[0]


@pytest.fixture
def server(shared: tuple[FakeNode, RunningServer], node: FakeNode) -> RunningServer:
    return shared[1]


def response_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
OF_SCHEMA = Grammar("json_schema", SCHEMA_TEXT)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
        ({"response_format": response_format(SCHEMA)}, OF_SCHEMA),
        ({"response_format": response_format(SCHEMA, strict=True, description="x")}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, OF_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["b", "a"]}}, Grammar("choice", '["b","a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"guided_json": SCHEMA}, OF_SCHEMA),
        ({"guided_json": SCHEMA_TEXT}, OF_SCHEMA),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["b", "a"]}, Grammar("choice", '["b","a"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ],
)
def test_what_reaches_the_node(
    server: RunningServer, node: FakeNode, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for reply in (server.complete(**fields), server.chat(**fields, n=2)):
        assert reply.status_code == 200, reply.text
    assert [generate.sampling.grammar for generate in node.generates] == [grammar] * 3


def test_gbnf_reaches_the_node_as_lark(server: RunningServer, node: FakeNode) -> None:
    assert server.complete(guided_grammar='root ::= "a" root | "b"\n').status_code == 200
    (generate,) = node.generates
    assert generate.sampling.grammar is not None
    assert generate.sampling.grammar.kind == "lark"
    assert "start:" in generate.sampling.grammar.text


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None, "schema"),
        ({"response_format": response_format({"not": {}})}, "response_format", "not"),
        (
            {"response_format": response_format({"type": "array", "uniqueItems": True})},
            "response_format",
            "uniqueItems",
        ),
        ({"response_format": response_format({"type": "text"})}, "response_format", "text"),
        ({"response_format": response_format({"const": "\ud800"})}, None, ""),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[1]"}, "guided_json", "object"),
        ({"guided_json": f'{{"maximum":{10**400}}}'}, "guided_json", "beyond 2**53"),
        ({"guided_regex": "a(+"}, "guided_regex", "repetition operator"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", "characters"),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_choice": [1]}, "guided_choice.0", "string"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "x"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
        ({"structured_outputs": {"regex": "a(+"}}, "structured_outputs.regex", "repetition operator"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude each other"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude each other"),
        ({"guided_grammar": CHAIN}, "guided_grammar", "too complex"),
    ],
)
def test_what_is_refused(
    server: RunningServer, node: FakeNode, fields: dict[str, Any], param: str | None, reason: str
) -> None:
    for path, rest in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        # Spelled by the standard library, which unlike httpx's can spell half of a surrogate pair.
        body = json.dumps({"model": "tiny", **rest, **fields})
        reply = server.client.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param if param is not None else error["param"].startswith("response_format")
        assert reason in error["message"]
    assert node.generates == [], "refused before any node heard of it"


def test_a_schema_nested_beyond_all_measure(server: RunningServer, node: FakeNode) -> None:
    for depth in (100, 5000):
        text = '{"items":' * depth + "{}" + "}" * depth
        body = f'{{"model":"tiny","prompt":"Hi","guided_json":{text}}}'
        reply = server.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), reply.text
    assert len(node.generates) == 1


def test_a_grammar_that_a_node_gives_up_is_the_clients_fault(server: RunningServer, node: FakeNode) -> None:
    def too_complex(node: FakeNode, generate: Any) -> None:
        kind, error = ErrorKind.INVALID_REQUEST, "the grammar is too complex: ..."
        node.send_output(generate.request_id, finish_reason="error", error_kind=kind, error=error)

    node.script = too_complex
    reply = server.complete(guided_regex="a+")
    assert (reply.status_code, "too complex" in reply.json()["error"]["message"]) == (400, True)


# The checker by itself


@pytest.fixture
def checker(directory: Path) -> Iterator[GrammarChecker]:
    before = set(threading.enumerate())
    checker = GrammarChecker(directory)
    yield checker
    checker.close()
    assert checker._child._process is None
    assert set(threading.enumerate()) <= before


def check(checker: GrammarChecker, text: str = "a+", kind: Any = "regex") -> Grammar:
    return asyncio.run(checker.check(kind, text, "guided_regex"))


def pid_of(checker: GrammarChecker) -> int:
    assert checker._child._process is not None
    return checker._child._process.pid


def test_a_grammar_is_checked_once(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = checker._child.ask
    monkeypatch.setattr(checker._child, "ask", lambda kind, text: asked.append(text) or ask(kind, text))
    monkeypatch.setattr(grammar_checker, "MAX_REMEMBERED", 2)
    for text in ("a+", "a+", "a(", "a(", "b+", "a+"):
        if text == "a(":
            with pytest.raises(RequestError, match="unclosed"):
                check(checker, text)
        else:
            check(checker, text)
    assert asked == ["a+", "a(", "b+", "a+"], "verdicts of both kinds are remembered, the least recently used go"


def test_one_that_takes_too_long_is_ended_and_the_next_is_checked(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(checker)
    first = pid_of(checker)
    endless = json.dumps({"type": "integer", "multipleOf": 999_983})
    with pytest.raises(RequestError, match="longer than 2 s"):
        check(checker, endless, "json_schema")
    check(checker, "b+")
    assert pid_of(checker) != first
    with pytest.raises(RequestError, match="longer than 2 s"):
        check(checker, endless, "json_schema")  # remembered: it costs nothing now
    assert checker._child._process is not None
    assert checker._child._process.poll() is None


def test_a_child_that_died_idle_is_nobodys_fault(checker: GrammarChecker) -> None:
    check(checker)
    process = checker._child._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    check(checker, "b+")


def test_too_many_at_once_are_turned_away(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)

    async def run() -> list[Any]:
        checks = (checker.check("regex", f"a{{{i}}}", "guided_regex") for i in range(3))
        return await asyncio.gather(*checks, return_exceptions=True)

    *good, refused = asyncio.run(run())
    assert all(isinstance(grammar, Grammar) for grammar in good)
    assert isinstance(refused, ServingError)
    assert refused.kind is ErrorKind.OVERLOADED


def test_closing_ends_a_check_that_goes_on(directory: Path) -> None:
    checker = GrammarChecker(directory)
    check(checker)

    async def run() -> Any:
        endless = json.dumps({"type": "integer", "multipleOf": 999_983})
        going_on = asyncio.ensure_future(checker.check("json_schema", endless, "guided_json"))
        while not checker._num_waiting:
            await asyncio.sleep(0)
        checker.close()
        return (await asyncio.gather(going_on, return_exceptions=True))[0]

    error = asyncio.run(run())
    assert isinstance(error, ServingError)
    assert error.kind is ErrorKind.NO_NODE_READY


def test_a_checker_that_does_not_start_is_our_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checker = GrammarChecker(tmp_path)
    with pytest.raises(ServingError, match="does not start"):
        check(checker)
    checker.close()
    assert "config.json" in capfd.readouterr().err, "and it can be seen why"

"""Streams through the real server are, event for event, parts of the whole answer: 500 random cases."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer as TokenizerFile

from connector.server_messages import Generate, TokenOutput, Tokens
from engine.model_config import ModelConfig
from engine.model_source import resolve_model
from engine.request import SampledToken
from server.tokenizer import Tokenizer
from tests.byte_fallback import byte_fallback_json
from tests.server_rig import FakeNode, RunningServer, Script, make_identity, running_server, write_model_directory
from tests.stream_cases import StreamCase, make_case

SEED = 20


def says(case: StreamCase, rng: Random) -> Script:
    """The case's tokens in random portions; what comes after a stop string is for nobody."""
    tokens = [
        SampledToken(token_id, -0.5 * position, [(token_id, -0.5 * position), (position, -9.0)])
        for position, token_id in enumerate(case.ids)
    ]

    def script(node: FakeNode, generate: Generate) -> None:
        rest = tokens
        while rest:
            size = rng.choice([1, 1, 2, 5, 20])
            portion, rest = rest[:size], rest[size:]
            end = {} if rest else {"finish_reason": "stop" if case.stop_token is not None else "length"}
            stop_reason = None if rest else case.stop_token
            output = TokenOutput(request_id=generate.request_id, tokens=portion, stop_reason=stop_reason, **end)
            node.send(Tokens(outputs=[output]))

    return script


@contextmanager
def scripted(directory: Path) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    node.identity = make_identity(config_digest=ModelConfig.from_checkpoint(directory).digest())
    with running_server(directory, [node.address]) as server:
        server.wait_ready()
        yield node, server
    node.close()


def ask(server: RunningServer, *, chat: bool, stream: bool, case: StreamCase) -> bytes:
    logprobs = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    body = {**case.body, **logprobs, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = (server.chat if chat else server.complete)(**body)
    assert response.status_code == 200, response.text
    return response.content


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Each decoded by itself, so that a character split over two of them would show."""
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ").decode()) for event in events]


def text_in(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta"))["content"] if choice.get("delta") != {} else ""


def joined_logprobs(choices: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for logprobs in (choice["logprobs"] for choice in choices if choice["logprobs"]):
        for name, values in logprobs.items():
            joined.setdefault(name, []).extend(values or [])
    return joined


def check(case: StreamCase, stream: bytes, whole: bytes) -> None:
    body = json.loads(whole)
    (answer,) = body["choices"]
    *events, last = events_of(stream)
    choices = [event["choices"][0] for event in events]
    expected = case.expected
    for end in (answer, choices[-1]):
        assert (end["finish_reason"], end["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
    assert text_in(answer) == "".join(map(text_in, choices)) == expected.text
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
    assert answer["token_ids"] == ids == case.ids[: expected.num_tokens]
    assert last["usage"] == body["usage"]
    assert last["usage"]["completion_tokens"] == expected.num_tokens
    assert joined_logprobs(choices) == joined_logprobs([answer])
    check_promptness(case, choices[:-1])


def check_promptness(case: StreamCase, choices: Sequence[dict[str, Any]]) -> None:
    """Each event's text is all that its tokens have, but for what might become a stop string."""
    text, num_tokens = "", 0
    for choice in choices:
        text += text_in(choice)
        num_tokens += len(choice.get("token_ids", ()))
        if num_tokens:
            so_far = case.texts[num_tokens]
            assert so_far.startswith(text)
            assert case.may_be_held_back(so_far.removeprefix(text)) or so_far == text


def run_cases(directory: Path, seed: int, count: int) -> None:
    with scripted(directory) as (node, server):
        for number in range(count):
            rng = Random(f"{seed}/{number}")
            case = make_case(rng, server.assets.tokenizer)
            node.script = says(case, rng)
            chat = number % 2 == 0
            stream = ask(server, chat=chat, stream=True, case=case)
            check(case, stream, ask(server, chat=chat, stream=False, case=case))


@pytest.mark.demo_model
def test_streamed_is_whole_is_defined_with_a_byte_level_tokenizer() -> None:
    run_cases(resolve_model("smollm2-135m"), SEED, 350)


def test_streamed_is_whole_is_defined_with_a_byte_fallback_tokenizer(tmp_path: Path) -> None:
    run_cases(write_model_directory(tmp_path, byte_fallback_json()), SEED + 1, 150)


@pytest.mark.demo_model
def test_the_definition_is_what_the_library_reads_from_all_tokens_at_once() -> None:
    tokenizer = Tokenizer.from_directory(resolve_model("smollm2-135m"))
    for number in range(200):
        case = replace(make_case(Random(number), tokenizer), stop_token=None)
        text = tokenizer.decode(case.ids, skip_special_tokens=case.skip_special)
        assert text in (case.texts[-1], case.texts[-1] + "\ufffd")


def test_the_definition_is_what_the_library_reads_where_all_bytes_are_characters() -> None:
    tokenizer = Tokenizer(TokenizerFile.from_str(byte_fallback_json()))
    before = tokenizer.encode("the cat", add_special_tokens=False)
    whole_cases = 0
    for number in range(200):
        case = replace(make_case(Random(number), tokenizer), stop_token=None)
        text = tokenizer.decode(before + case.ids, skip_special_tokens=case.skip_special)
        if "\ufffd" not in text:
            whole_cases += 1
            assert text == "the cat" + case.texts[-1]
    assert whole_cases > 50

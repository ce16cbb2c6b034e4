"""What the less common fields do: what is sent to the nodes for them, and what the answer shows."""

import struct
from collections.abc import Iterator, Sequence

import pytest

from connector.server_messages import Generate, TokenOutput, Tokens
from engine.prompt_logprobs import PromptLogprobs
from engine.request import SampledToken
from tests.server_rig import (
    MAX_MODEL_LEN,
    FakeNode,
    RunningServer,
    answers,
    events_of,
    running_server,
    write_model_directory,
)

PROMPT = [70, 71, 72, 73]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeNode, RunningServer]]:
    node = FakeNode()
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), [node.address]) as server:
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


def sent(node: FakeNode) -> Generate:
    (generate,) = node.generates
    node.generates.clear()
    return generate


def scored_piece(start: int, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Made up: the token at position p has logprob -p and rank p; alternatives are 1, 2 ... with -0.1, -0.2 ..."""
    count = len(token_ids)
    positions = range(start, start + count)
    return PromptLogprobs(
        start=start,
        num_top=num_top,
        logprobs=struct.pack(f"<{count}f", *(-float(p) for p in positions)),
        ranks=struct.pack(f"<{count}i", *positions),
        top_token_ids=struct.pack(f"<{count * num_top}i", *(list(range(1, num_top + 1)) * count)),
        top_logprobs=struct.pack(f"<{count * num_top}f", *([-i / 10 for i in range(1, num_top + 1)] * count)),
    )


def scores_prompts(node: FakeNode, generate: Generate) -> None:
    """In pieces of two positions, then two tokens."""
    prompt, num_top = generate.prompt_token_ids, generate.sampling.prompt_logprobs
    assert num_top is not None
    for start in range(1, len(prompt), 2):
        piece = scored_piece(start, prompt[start : start + 2], num_top)
        node.send(Tokens(outputs=[TokenOutput(request_id=generate.request_id, prompt_logprobs=piece)]))
    tokens = [SampledToken(65, -0.5), SampledToken(66, -0.25)][: generate.sampling.max_tokens]
    for position, token in enumerate(tokens, start=1):
        finish_reason = "length" if position == len(tokens) else None
        output = TokenOutput(request_id=generate.request_id, tokens=[token], finish_reason=finish_reason)
        node.send(Tokens(outputs=[output]))


class TestPromptLogprobs:
    def test_completions_show_them_with_each_choice(self, node: FakeNode, server: RunningServer) -> None:
        node.script = scores_prompts
        choices = server.complete(prompt=[PROMPT, [80]], n=2, prompt_logprobs=1, max_tokens=2).json()["choices"]
        text = server.assets.tokenizer.token_text
        alternative = {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": text(1)}
        expected = [
            None,
            *(
                {str(i): {"logprob": -float(p), "rank": p, "decoded_token": text(i)}, "1": alternative}
                for p, i in enumerate(PROMPT[1:], start=1)
            ),
        ]
        assert [choice["prompt_logprobs"] for choice in choices] == [expected, expected, [None], [None]]
        assert all(choice["logprobs"] is None for choice in choices)

    def test_a_chat_shows_them_at_the_top(self, node: FakeNode, server: RunningServer) -> None:
        node.script = scores_prompts
        body = server.chat(prompt_logprobs=0, return_token_ids=True, max_tokens=2).json()
        assert [list(entry or {}) for entry in body["prompt_logprobs"]] == [
            [],
            *([str(i)] for i in body["prompt_token_ids"][1:]),
        ]

    @pytest.mark.parametrize("prompt_logprobs", [0, 4])
    def test_beside_an_echo_each_has_its_own_number(
        self, node: FakeNode, server: RunningServer, prompt_logprobs: int
    ) -> None:
        node.script = scores_prompts
        (choice,) = server.complete(
            prompt=PROMPT, echo=True, logprobs=2, prompt_logprobs=prompt_logprobs, max_tokens=2
        ).json()["choices"]
        assert sent(node).sampling.prompt_logprobs == max(2, prompt_logprobs)
        assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1 + prompt_logprobs] * 3
        assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:4]] == [3] * 3

    def test_an_echo_without_logprobs_asks_for_none(self, node: FakeNode, server: RunningServer) -> None:
        assert server.complete(prompt=PROMPT, echo=True).json()["choices"][0]["logprobs"] is None
        assert sent(node).sampling.prompt_logprobs is None


class TestEcho:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_alone(self, node: FakeNode, server: RunningServer, stream: bool) -> None:
        """`max_tokens` 0: the one token that a node has to make is neither shown nor counted."""
        node.script = scores_prompts
        options = {"stream_options": {"include_usage": True}} if stream else {}
        reply = server.complete(
            prompt=PROMPT, echo=True, logprobs=1, max_tokens=0, stream=stream, return_token_ids=True, **options
        )
        bodies = events_of(reply) if stream else [reply.json()]
        choices = [choice for body in bodies for choice in body["choices"]]
        assert "".join(choice["text"] for choice in choices) == server.decode(PROMPT)
        assert [i for choice in choices for i in choice.get("token_ids", [])] == []
        logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        assert logprobs == [None, -1.0, -2.0, -3.0]
        assert choices[-1]["finish_reason"] == "length"
        assert (bodies[-1]["usage"]["prompt_tokens"], bodies[-1]["usage"]["completion_tokens"]) == (4, 0)
        assert sent(node).sampling.max_tokens == 1

    def test_the_stream_opens_each_choice_with_its_prompt(self, node: FakeNode, server: RunningServer) -> None:
        node.script = scores_prompts
        events = events_of(server.complete(prompt=[PROMPT, [80, 81]], echo=True, logprobs=0, max_tokens=2, stream=True))
        for index, prompt in enumerate((PROMPT, [80, 81])):
            parts = [c for event in events for c in event["choices"] if c["index"] == index]
            assert parts[0]["text"] == server.decode(prompt)
            assert parts[0]["logprobs"]["token_logprobs"] == [None, *(-float(p) for p in range(1, len(prompt)))]
            assert parts[1]["logprobs"]["text_offset"] == [len(server.decode(prompt))]


def ranked_answers(node: FakeNode, generate: Generate) -> None:
    """Sequence i of a prompt makes i + 1 tokens; the third of each prompt has the best mean."""
    index = int(generate.request_id.rpartition("-")[2])
    logprob = {0: -3.0, 1: -1.0, 2: -0.5, 3: -2.0}[index % 4]
    for position in range(index % 4 + 1):
        token = SampledToken(65 + index % 4, logprob)
        finish_reason = "length" if position == index % 4 else None
        output = TokenOutput(
            request_id=generate.request_id,
            tokens=[token],
            finish_reason=finish_reason,
            num_prompt_tokens=4,
            num_cached_tokens=index + 1,
        )
        node.send(Tokens(outputs=[output]))


class TestBestOf:
    def test_the_best_are_shown_and_all_are_counted(self, node: FakeNode, server: RunningServer) -> None:
        node.script = ranked_answers
        body = server.complete(prompt=[PROMPT, PROMPT], best_of=4, n=2, seed=3).json()
        texts = [server.decode([67] * 3), server.decode([66] * 2)]
        assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(texts * 2))
        assert all(choice["logprobs"] is None for choice in body["choices"])
        assert body["usage"] == {
            "prompt_tokens": 8,
            "completion_tokens": 20,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 1 + 5},
        }
        assert len({generate.sampling.seed for generate in node.generates}) == 4
        assert {generate.sampling.logprobs for generate in node.generates} == {0}

    def test_with_echo_logprobs_and_token_ids(self, node: FakeNode, server: RunningServer) -> None:
        def script(node: FakeNode, generate: Generate) -> None:
            piece = scored_piece(1, PROMPT[1:], 0)
            node.send(Tokens(outputs=[TokenOutput(request_id=generate.request_id, prompt_logprobs=piece)]))
            ranked_answers(node, generate)

        node.script = script
        (choice,) = server.complete(prompt=PROMPT, best_of=4, echo=True, logprobs=0, return_token_ids=True).json()[
            "choices"
        ]
        assert choice["text"] == server.decode(PROMPT) + server.decode([67] * 3)
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.5, -0.5, -0.5]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT, [67] * 3)

    def test_as_many_as_are_shown_is_nothing_special(self, node: FakeNode, server: RunningServer) -> None:
        node.script = ranked_answers
        body = server.complete(prompt=PROMPT, best_of=2, n=2).json()
        assert [choice["text"] for choice in body["choices"]] == [server.decode([65]), server.decode([66, 66])]
        assert {generate.sampling.logprobs for generate in node.generates} == {None}
        assert server.complete(prompt=PROMPT, best_of=1, stream=True).status_code == 200


class TestTruncation:
    @pytest.mark.parametrize(("kept", "expected"), [(2, [72, 73]), (4, PROMPT), (100, PROMPT)])
    def test_the_last_tokens_stay(self, node: FakeNode, server: RunningServer, kept: int, expected: list[int]) -> None:
        reply = server.complete(prompt=PROMPT, truncate_prompt_tokens=kept, echo=True, return_token_ids=True).json()
        assert sent(node).prompt_token_ids == expected
        assert reply["choices"][0]["prompt_token_ids"] == expected
        assert reply["choices"][0]["text"].startswith(server.decode(expected))
        assert reply["usage"]["prompt_tokens"] == len(expected)

    @pytest.mark.parametrize(("max_tokens", "room"), [(20, 20), (None, 16)])
    def test_as_many_as_leave_room(
        self, node: FakeNode, server: RunningServer, max_tokens: int | None, room: int
    ) -> None:
        text = "word " * 3 * MAX_MODEL_LEN
        assert server.complete(prompt=text, truncate_prompt_tokens=-1, max_tokens=max_tokens).status_code == 200
        generate = sent(node)
        assert generate.prompt_token_ids == server.encode(text)[-(MAX_MODEL_LEN - room) :]
        assert generate.sampling.max_tokens == room

    def test_a_text_too_long_for_the_model_by_any_measure(self, node: FakeNode, server: RunningServer) -> None:
        text = "x" * 90_000
        assert server.complete(prompt=text).status_code == 400
        assert server.complete(prompt=text, truncate_prompt_tokens=3).status_code == 200
        assert sent(node).prompt_token_ids == server.encode(text)[-3:]

    def test_a_chat(self, node: FakeNode, server: RunningServer) -> None:
        whole = server.chat(return_token_ids=True).json()["prompt_token_ids"]
        node.generates.clear()
        assert server.chat(truncate_prompt_tokens=3).status_code == 200
        assert sent(node).prompt_token_ids == whole[-3:]
        long = [{"role": "user", "content": "word " * 3 * MAX_MODEL_LEN}]
        assert server.chat(messages=long, truncate_prompt_tokens=-1).status_code == 200
        assert len(sent(node).prompt_token_ids) == MAX_MODEL_LEN - 1
        assert server.chat(messages=long, truncate_prompt_tokens=-1, max_completion_tokens=9).status_code == 200
        assert len(sent(node).prompt_token_ids) == MAX_MODEL_LEN - 9


class TestPriority:
    def test_body_and_header(self, node: FakeNode, server: RunningServer) -> None:
        for post in (server.complete, server.chat):
            post()
            assert sent(node).priority == 0
            post(priority=7)
            assert sent(node).priority == 7
        body = {"prompt": "Hi", "priority": 7}
        server.client.post("/v1/completions", json=body, headers={"X-Vllm-Priority": "-3"})
        assert sent(node).priority == -3

    @pytest.mark.parametrize("header", ["high", "1.5", "", "9999999999", "99999999999999"])
    def test_a_header_that_is_no_integer(self, node: FakeNode, server: RunningServer, header: str) -> None:
        reply = server.client.post("/v1/completions", json={"prompt": "Hi"}, headers={"X-Vllm-Priority": header})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "X-Vllm-Priority")
        assert node.generates == []


class TestRequestId:
    def test_from_the_body(self, node: FakeNode, server: RunningServer) -> None:
        for post, prefix in ((server.complete, "cmpl-"), (server.chat, "chatcmpl-")):
            reply = post(request_id="mine:1")
            assert reply.json()["id"] == f"{prefix}mine:1"
            assert reply.headers["X-Request-Id"] == "mine:1"
        assert events_of(server.complete(request_id="mine:1", stream=True))[0]["id"] == "cmpl-mine:1"

    def test_the_header_comes_first(self, node: FakeNode, server: RunningServer) -> None:
        body = {"prompt": "Hi", "request_id": "body"}
        reply = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "header"})
        assert (reply.json()["id"], reply.headers["X-Request-Id"]) == ("cmpl-header", "header")
        reply = server.client.post("/v1/completions", json=body, headers={"X-Request-Id": "not usable"})
        assert (reply.json()["id"], reply.headers["X-Request-Id"]) == ("cmpl-body", "body")


class TestConfinement:
    def test_allowed_token_ids(self, node: FakeNode, server: RunningServer) -> None:
        server.complete(allowed_token_ids=[5, 6])
        assert sent(node).sampling.allowed_token_ids == (5, 6)

    def test_bad_words_as_they_are_spelled_first_and_after_a_space(self, node: FakeNode, server: RunningServer) -> None:
        """`the` has a token of its own after a space. `q7` has none: with a space it is longer, and holds the bare."""
        server.complete(bad_words=["the", " q7", "the"])
        the, spaced, q7 = (tuple(server.encode(text)) for text in ("the", " the", "q7"))
        assert len(spaced) == len(the)
        assert sent(node).sampling.bad_words == (the, spaced, q7)


class TestUsage:
    def test_each_prompt_counts_once_and_each_output(self, node: FakeNode, server: RunningServer) -> None:
        node.script = ranked_answers
        options = {"prompt": [PROMPT, [80]], "n": 4}
        whole = server.complete(**options).json()["usage"]
        assert whole == {
            "prompt_tokens": 5,
            "completion_tokens": 20,
            "total_tokens": 25,
            "prompt_tokens_details": {"cached_tokens": 1 + 5},
        }
        events = events_of(server.complete(**options, stream=True, stream_options={"include_usage": True}))
        assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole)
        assert all("usage" not in event for event in events[:-1])

    def test_continuous_usage_is_in_every_chunk_and_never_falls(self, node: FakeNode, server: RunningServer) -> None:
        node.script = ranked_answers
        stream_options = {"include_usage": True, "continuous_usage_stats": True}
        options = {"prompt": PROMPT, "n": 4, "stream": True, "stream_options": stream_options, "echo": True}
        counts = [event["usage"]["completion_tokens"] for event in events_of(server.complete(**options))]
        assert (counts[0], counts[-1]) == (0, 10)
        assert counts == sorted(counts)

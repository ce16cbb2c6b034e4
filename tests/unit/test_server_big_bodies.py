"""Bodies that would hold up everybody else's streams are refused before much of them is looked at: by counting."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from engine.errors import RequestError
from server import body_limit
from server.body_limit import MAX_VALUES
from server.model_assets import load_model_assets
from server.prompts import PromptReader
from server.protocol import MAX_FIELDS, MAX_LOGIT_BIASES, CompletionBody
from tests.server_rig import MAX_MODEL_LEN, FakeNode, RunningServer, answers, running_server, write_model_directory


class CountedIds(Sequence[int]):
    """Token ids that count how many of them were looked at."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.num_seen = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if index >= self._length:
            raise IndexError
        self.num_seen += 1
        return 65


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    node = FakeNode()
    node.script = answers([65])
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), [node.address]) as server:
        server.wait_ready()
        yield server
    node.close()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    return PromptReader(load_model_assets(write_model_directory(tmp_path_factory.mktemp("model"))))


def post(server: RunningServer, content: bytes, path: str = "completions") -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    reply = server.client.post(f"/v1/{path}", content=content, headers=headers)
    return reply.status_code, reply.json().get("error", {})


@pytest.mark.parametrize("num_ids", [MAX_MODEL_LEN + 1, 4_000_000])
def test_more_token_ids_than_the_model_takes_are_refused_unseen(reader: PromptReader, num_ids: int) -> None:
    ids = CountedIds(num_ids)
    with pytest.raises(RequestError, match=f"{MAX_MODEL_LEN} tokens, but prompt has {num_ids}") as caught:
        reader.read_token_ids(ids, "prompt", MAX_MODEL_LEN)
    assert (caught.value.param, ids.num_seen) == ("prompt", 0)


def test_as_many_as_the_model_takes_are_all_looked_at(reader: PromptReader) -> None:
    ids = CountedIds(MAX_MODEL_LEN)
    assert reader.read_token_ids(ids, "prompt", MAX_MODEL_LEN).token_ids is ids
    assert ids.num_seen >= MAX_MODEL_LEN


def test_the_body_model_looks_at_the_first_id_of_a_prompt_only() -> None:
    body = CompletionBody.model_validate({"prompt": [[1, "later"], [2, -1]]})
    assert body.prompt == [[1, "later"], [2, -1]]


def test_other_work_goes_on_between_two_prompts_of_a_batch(reader: PromptReader) -> None:
    async def run() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await reader.read_completion(CompletionBody(prompt=[[65]] * 50), MAX_MODEL_LEN)
        task.cancel()
        return turns

    assert asyncio.run(run()) >= 50


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server: RunningServer, chunked: bool) -> None:
    # Not even JSON: nobody has tried.
    content = b'{"prompt": [1' + b",1" * MAX_VALUES
    body: Any = (content[start : start + 65536] for start in range(0, len(content), 65536)) if chunked else content
    status, error = post(server, body)
    assert (status, error["message"]) == (413, f"the body must not hold more than {MAX_VALUES} values")


def test_the_limit_counts_values_over_all_parts(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "MAX_VALUES", 5)
    assert post(server, b'{"prompt":"a","n":1,"seed":1,"max_tokens":3,"x":1}')[0] == 200
    assert post(server, b'{"prompt":"a","n":1,"seed":1,"max_tokens":3,"x":1,"y":1}')[0] == 413
    parts: Any = iter([b'{"prompt":"a","n":1,', b'"seed":1,"max_tokens":3,', b'"x":1,"y":1}'])
    assert post(server, parts)[0] == 413


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIASES + 1)}}, f"logit_bias: .*{MAX_LOGIT_BIASES} fields"),
        ({f"unknown{i}": "x" for i in range(MAX_FIELDS)}, f"body: .*{MAX_FIELDS} fields"),
    ],
)
def test_objects_of_too_many_fields(server: RunningServer, body: dict[str, Any], message: str) -> None:
    status, error = post(server, json.dumps({"prompt": "Hi", **body}).encode())
    assert status == 400
    assert re.match(message, error["message"])


def test_a_message_of_too_many_fields(server: RunningServer) -> None:
    message = {"role": "user", "content": "Hi"} | {f"unknown{i}": 1 for i in range(MAX_FIELDS)}
    status, error = post(server, json.dumps({"messages": [message]}).encode(), "chat/completions")
    assert (status, error["param"]) == (400, "messages.0")

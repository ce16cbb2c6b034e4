"""Every request field of OpenAI's API and of vLLM's, and what becomes of it: accepted, refused by name, or ignored.

Accepted fields are read: a value without sense is a 400 that names the field. Refused are those that would change the
answer and are not implemented, unless their value asks for nothing. Ignored are those that cannot change the answer.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from server.protocol import ChatBody, CompletionBody
from tests.server_rig import FakeNode, RunningServer, answers, running_server, write_model_directory

SENSELESS = [{"no": "sense"}]
SENSELESS_FOR = {"documents": 5}
TOOL = {"type": "function", "function": {"name": "f"}}
BY_FLAG = {"chat_template"}
"""Read, and refused unless a flag of the server allows it."""
BOTH_ACCEPTED: dict[str, Any] = {
    "add_special_tokens": True,
    "allowed_token_ids": [65, 66],
    "bad_words": ["bad"],
    "cache_salt": "salt",
    "frequency_penalty": 0.5,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "x"',
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {},
    "logit_bias": {"65": 1.0},
    "max_tokens": 3,
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "tiny",
    "n": 2,
    "presence_penalty": 0.5,
    "priority": -1,
    "prompt_logprobs": None,
    "repetition_penalty": 1.1,
    "request_id": "my-id",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "seed": 1,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [7],
    "stream": True,
    "stream_options": None,
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "truncate_prompt_tokens": 5,
}
ACCEPTED: dict[str, dict[str, Any]] = {
    "completions": BOTH_ACCEPTED | {"prompt": "Hi", "best_of": 2, "echo": True, "logprobs": 2},
    "chat": BOTH_ACCEPTED
    | {
        "messages": [{"role": "user", "content": "Hi"}],
        "add_generation_prompt": True,
        "chat_template_kwargs": {"x": 1},
        "continue_final_message": False,
        "documents": [],  # this template takes none
        "echo": False,
        "logprobs": True,
        "max_completion_tokens": 3,
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [TOOL],
        "top_logprobs": None,
    },
}
BOTH_REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy"},
    "max_new_tokens": 5,
    "typical_p": 0.5,
    "chat_template": "{{ messages }}",
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_whitespace_pattern": " ",
    "logits_processors": ["x"],
    "modalities": ["audio"],
    "prompt_embeds": "AAAA",
    "reasoning_effort": "high",
    "repetition_detection": {"max_pattern_size": 3},
    "return_tokens_as_token_ids": True,
    "suffix": "end",
    "thinking_token_budget": 5,
    "use_beam_search": True,
    "verbosity": "low",
    "vllm_xargs": {"x": 1},
    "web_search_options": {},
}
OF_CHAT = {"documents": [{"text": "x"}], "tool_choice": "required", "tools": [TOOL]}
OF_CHAT |= {"max_completion_tokens": 2, "top_logprobs": 3}
REFUSED = {"completions": BOTH_REFUSED | OF_CHAT, "chat": BOTH_REFUSED | {"best_of": 2}}
BOTH_IGNORED = (
    "guided_decoding_backend",  # there is no other to choose from
    "include_reasoning",  # nothing of the output is taken out of it
    "length_penalty",  # of beam search
    "media_io_kwargs",  # media are refused
    "metadata",
    "mm_processor_kwargs",
    "prediction",  # makes others' servers faster, not different
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",  # of tokenizers that are not in tokenizer.json
    "store",
    "user",
    "a_field_of_the_future",
)
IGNORED = {"completions": (*BOTH_IGNORED, "parallel_tool_calls"), "chat": BOTH_IGNORED}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BASE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi"},
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    node = FakeNode()
    node.max_model_len = 1000  # tools are told in the prompt
    node.script = answers([65])
    with running_server(write_model_directory(tmp_path_factory.mktemp("model")), [node.address]) as server:
        server.wait_ready()
        yield server
    node.close()


def post(server: RunningServer, endpoint: str, **fields: Any) -> tuple[int, str]:
    """Status and the field that is named."""
    reply = server.client.post(PATHS[endpoint], json=BASE[endpoint] | fields)
    return reply.status_code, "" if reply.status_code == 200 else str(reply.json()["error"]["param"])


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_is_complete(endpoint: str) -> None:
    body = {"completions": CompletionBody, "chat": ChatBody}[endpoint]
    assert set(ACCEPTED[endpoint]) == set(body.model_fields) - BY_FLAG
    assert not set(ACCEPTED[endpoint]) & (set(REFUSED[endpoint]) | set(IGNORED[endpoint]))


@pytest.mark.parametrize("endpoint", PATHS)
def test_accepted(server: RunningServer, endpoint: str) -> None:
    for name, value in ACCEPTED[endpoint].items():
        assert post(server, endpoint, **{name: value}) == (200, ""), name
        status, param = post(server, endpoint, **{name: SENSELESS_FOR.get(name, SENSELESS)})
        assert (status, param.split(".")[0]) == (400, name)


@pytest.mark.parametrize("endpoint", PATHS)
def test_refused(server: RunningServer, endpoint: str) -> None:
    for name, value in REFUSED[endpoint].items():
        assert post(server, endpoint, **{name: value}) == (400, name)
        assert post(server, endpoint, **{name: None}) == (200, ""), name


@pytest.mark.parametrize("endpoint", PATHS)
def test_ignored(server: RunningServer, endpoint: str) -> None:
    assert post(server, endpoint, **dict.fromkeys(IGNORED[endpoint], SENSELESS)) == (200, "")

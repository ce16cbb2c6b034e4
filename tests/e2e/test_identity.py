"""Requests are told apart by names that the service makes, never by what clients call them."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import orjson

from tests.e2e.processes import UpRing


def complete(ring: UpRing, prompt: str, request_id: str | None = None, **fields: object) -> httpx.Response:
    headers = {"X-Request-Id": request_id} if request_id else {}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(f"{ring.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def test_twenty_requests_under_one_id_get_their_own_answers(tiny_ring: UpRing):
    prompts = [f"prompt number {i} of twenty" for i in range(20)]
    expected = [complete(tiny_ring, prompt).json()["choices"][0]["text"] for prompt in prompts]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda prompt: complete(tiny_ring, prompt, "the-same"), prompts))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert {answer.headers["X-Request-Id"] for answer in answers} == {"the-same"}
    tiny_ring.wait_until_quiescent()


def test_three_samples_are_three_answers_streamed_and_not(tiny_ring: UpRing):
    sampling = {"n": 3, "temperature": 1.0, "seed": 7}
    whole = complete(tiny_ring, "once upon a time", **sampling).json()
    texts = [choice["text"] for choice in sorted(whole["choices"], key=lambda choice: choice["index"])]
    assert len(set(texts)) == 3
    parts = ["", "", ""]
    finals = [0, 0, 0]
    for line in complete(tiny_ring, "once upon a time", stream=True, **sampling).text.split("\n\n"):
        if line.startswith("data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                parts[choice["index"]] += choice["text"]
                finals[choice["index"]] += choice["finish_reason"] is not None
    assert (parts, finals) == (texts, [1, 1, 1])
    tiny_ring.wait_until_quiescent()


def test_a_first_token_that_completes_a_stop_string_ends_the_answer(tiny_ring: UpRing):
    first = complete(tiny_ring, "once upon", max_tokens=1).json()["choices"][0]["text"]
    assert first
    choice = complete(tiny_ring, "once upon", stop=[first]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", first)
    lines = complete(tiny_ring, "once upon", stop=[first], stream=True).text.split("\n\n")
    chunks = [orjson.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(chunk["text"] for chunk in chunks) == ""
    assert [chunk["finish_reason"] for chunk in chunks] == ["stop"]
    tiny_ring.wait_until_quiescent()


def test_usage_is_that_of_a_single_process_streamed_and_not(tiny_ring: UpRing):
    for length in (1, 3, 4, 5, 8, 9):
        prompt = list(range(10 * length, 11 * length))
        whole = complete(tiny_ring, prompt, max_tokens=2).json()["usage"]
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
        lines = complete(tiny_ring, prompt, **options).text.split("\n\n")
        streamed = orjson.loads([line for line in lines if line.startswith("data: {")][-1][6:])["usage"]
        for usage in (whole, streamed):
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
                length,
                2,
                length + 2,
            )
        cached = streamed["prompt_tokens_details"]["cached_tokens"]
        assert cached == (length - 1) // 4 * 4, "all full blocks but one token, as one engine would find"

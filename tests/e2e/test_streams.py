"""Sampled text of the demo model through a real ring: streamed, whole and cut by definition are one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.processes import UpRing, running_up

PROMPTS = (
    "Write a short greeting in French, with accents:",
    "Une phrase en français : été, naïve,",
    "Emoji for party, rocket and family: 🎉🚀👩‍👩‍👧‍👦",
    "日本語で短い文を書いてください。",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "한국어 문장입니다.",
    "1️⃣ 2️⃣ 🇫🇷 🇩🇪",
)
NUM_TOKENS = 12


def ask(ring: UpRing, chat: bool, prompt: str, **fields: Any) -> tuple[str, str, Any]:
    """Text, finish reason and stop reason."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 1.2, "top_k": 0, "ignore_eos": True, **fields}
    path = "chat/completions" if chat else "completions"
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    response = httpx.post(f"{ring.url}/v1/{path}", json=body, timeout=60).raise_for_status()
    choices = [event["choices"][0] for event in _events(response.content, bool(fields.get("stream")))]
    texts = [choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") for choice in choices]
    return "".join(text or "" for text in texts), choices[-1]["finish_reason"], choices[-1]["stop_reason"]


def _events(content: bytes, stream: bool) -> list[Any]:
    if not stream:
        return [orjson.loads(content)]
    *events, done, _ = content.split(b"\n\n")
    assert done == b"data: [DONE]"
    # Each must be UTF-8 by itself.
    return [orjson.loads(event.removeprefix(b"data: ")) for event in events]


def check(ring: UpRing, number: int) -> None:
    rng, chat, prompt, seed = Random(number), number % 2 == 0, PROMPTS[number], {"seed": number}
    text, *ends = ask(ring, chat, prompt, **seed)
    assert ends == ["length", None]
    assert ask(ring, chat, prompt, **seed, stream=True) == (text, *ends)
    start = rng.randrange(len(text) // 2)
    stop = text[start : start + rng.randint(1, 6)]
    included = number % 3 == 0
    cut = text[: text.find(stop) + len(stop) * included]
    for stream in (False, True):
        fields = {"stop": stop, "include_stop_str_in_output": included, "stream": stream}
        assert ask(ring, chat, prompt, **seed, **fields) == (cut, "stop", stop)


@pytest.mark.demo_model
def test_sampled_text_streamed_is_whole_with_and_without_stop_strings(tmp_path: Path):
    with running_up(tmp_path, "--dtype", "float32") as ring:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            list(pool.map(partial(check, ring), range(len(PROMPTS))))
        ring.wait_until_quiescent()

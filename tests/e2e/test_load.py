"""Many clients at once, some of whom leave: each gets one end, and afterwards nothing is held anywhere."""

import asyncio
import random

import httpx
import orjson

from tests.e2e.processes import UpRing

NUM_REQUESTS, CONCURRENCY = 200, 32


async def stream_one(client: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """(how it ended, number of final chunks)."""
    rng = random.Random(number)
    leaves_after = rng.randint(0, 6) if number % 5 == 0 else None
    body = {
        "model": "tiny",
        "prompt": rng.choices(range(256), k=rng.choice([1, 3, 4, 17, 64, 150, 300])),
        "max_tokens": rng.choice([1, 2, 8, 30]) if leaves_after is None else 300,
        "stream": True,
        "ignore_eos": True,
        "seed": number,
    }
    finals = chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if leaves_after is not None and chunks >= leaves_after:
                return "left", finals
            if line == "data: [DONE]":
                return "done", finals
            if line.startswith("data: "):
                chunk = orjson.loads(line[6:])
                assert "error" not in chunk, chunk
                chunks += 1
                finals += sum(choice["finish_reason"] is not None for choice in chunk["choices"])
    return "cut off", finals


def test_two_hundred_requests_a_fifth_of_which_leave(tiny_ring: UpRing):
    async def run() -> list[tuple[str, int]]:
        limit = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=tiny_ring.url, timeout=60, limits=httpx.Limits(max_connections=40)) as c:

            async def one(number: int) -> tuple[str, int]:
                async with limit:
                    return await stream_one(c, number)

            return await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))

    ends = asyncio.run(run())
    assert [end for end in ends if end[0] == "done"] == [("done", 1)] * (NUM_REQUESTS - NUM_REQUESTS // 5)
    assert [end[0] for end in ends].count("left") == NUM_REQUESTS // 5
    tiny_ring.wait_until_quiescent()
    decode = tiny_ring.metrics("decode-0")
    assert decode["pdserve_kv_bytes_received_total"] == tiny_ring.metrics("prefill-0")["pdserve_kv_bytes_sent_total"]
    assert decode["pdserve_kv_transfers_failed_total"] == 0

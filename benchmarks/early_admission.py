"""Early admission against waiting for the whole KV, on the same throttled link, alternated in one run.

Two decode nodes with a prefill node each, alike but for `--early-admission`; a few running streams on each, and long
prompts that arrive one by one. `python -m benchmarks.early_admission --help`.
"""

import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.nodes import Pair, Table, make_prompt, running_pair
from benchmarks.transfer_overlap import TWO_TOKENS, throttle
from benchmarks.transfer_overlap import Options as OverlapOptions
from engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2-135m"
    """Served in bfloat16."""
    prompt_tokens: int = 600
    """Length of each arriving prompt."""
    streams: int = 3
    """Streams that run all the time."""
    rounds: int = 8
    """Alternations."""
    json: Path | None = None
    """Also write the samples here."""


def one_round(pair: Pair, options: Options, seed: int) -> dict[str, float]:
    """A long prompt among running streams: seconds to its second token, and the streams' slowest gaps meanwhile."""
    running = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    streams = [pair.client.start(make_prompt(16, 1000 * seed + i), running)[0] for i in range(options.streams)]
    began = pair.client.wait_for_tokens(streams, 5)
    request_id, answer = pair.client.start(make_prompt(options.prompt_tokens, seed), TWO_TOKENS)
    assert answer.final.finish_reason == "length", answer.final.error
    ended = pair.client.times[request_id][1]
    pair.client.cancel(*streams)
    for stream in streams:
        assert pair.client.answers[stream].final.finish_reason == "abort"
    gaps = sorted(gap for stream in streams for gap in pair.client.gaps(stream, began, ended))
    return {
        "second token": ended - pair.client.started[request_id],
        "p99 gap of the streams": gaps[int(0.99 * (len(gaps) - 1))],
        "median gap of the streams": statistics.median(gaps),
    }


def main(options: Options) -> None:
    table = Table(f"early admission, prompts of {options.prompt_tokens} among {options.streams} streams")
    with ExitStack() as stack:
        ways = {"early": "--early-admission", "whole": "--no-early-admission"}
        pairs = {way: stack.enter_context(running_pair(options.model, flag)) for way, flag in ways.items()}
        for pair in pairs.values():
            throttle(pair, OverlapOptions(prompt_tokens=options.prompt_tokens))
        pairs["whole"].relay.bytes_per_second = pairs["early"].relay.bytes_per_second
        for number in range(options.rounds):
            for way, pair in pairs.items():
                table.add(way, **one_round(pair, options, 10 + number))
        early = pairs["early"].decode.counter("pdserve_early_admissions_total")
        longest = pairs["early"].decode.counter("pdserve_kv_longest_barrier_seconds")
    table.print()
    print(f"  {early:.0f} requests ran early; the longest wait at a barrier was {1000 * longest:.1f} ms")
    table.write(options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))

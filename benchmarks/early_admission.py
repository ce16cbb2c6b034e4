"""Early admission against waiting for the whole KV, on the same throttled link, alternated in one run.

Two decode nodes of one prefill node, alike but for `--early-admission`; a few running streams, and a long prompt that
arrives among them. `python -m benchmarks.early_admission --help`.

  second token     from the request's start to the client's second token, the decode node's first own
  after prefill    the same, from when the prefill's last layer was computed: what early admission can shorten
  p99 gap          of the running streams' inter-token times from the long prompt's start to its second token
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.nodes import FEW_TOKENS, Pair, Table, make_prompt, running_pairs
from engine.sampling_params import SamplingParams

WAYS = {"early": ("--early-admission",), "whole": ("--no-early-admission",)}
RUNNING = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2-135m"
    """Served in bfloat16."""
    prompt_tokens: int = 2000
    """Length of each arriving prompt."""
    streams: int = 3
    """Streams that run all the time."""
    rounds: int = 8
    """Alternations."""
    credit_bytes: int = 1 << 20
    """KV bytes under way at once. The first token waits behind them, so that on a slow link a smaller window than the
    default lets it come in time."""
    max_barrier_stall: float = 0.005
    """The longest that an early request may be expected to hold up a step, in seconds."""
    json: Path | None = None
    """Also write the samples here."""


def one_round(pair: Pair, options: Options, seed: int) -> tuple[dict[str, float], list[float]]:
    """A long prompt among running streams: what it took, and the streams' gaps meanwhile."""
    streams = [pair.client.start(make_prompt(16, 1000 * seed + i), RUNNING)[0] for i in range(options.streams)]
    began = pair.client.wait_for_tokens(streams, 5)
    request_id, answer = pair.client.start(make_prompt(options.prompt_tokens, seed), FEW_TOKENS)
    assert answer.final.finish_reason == "length", answer.final.error
    ended = pair.client.times[request_id][1]
    pair.client.cancel(*streams)
    for stream in streams:
        assert pair.client.answers[stream].final.finish_reason == "abort"
    gaps = sorted(gap for stream in streams for gap in pair.client.gaps(stream, began, ended))
    took = {
        "second token": ended - pair.client.started[request_id],
        "after prefill": ended - pair.last_transfer()["computed_at"],
        "p99 gap": gaps[int(0.99 * (len(gaps) - 1))],
        "median gap": statistics.median(gaps),
    }
    return took, gaps


def main(options: Options) -> None:
    table = Table(f"early admission, prompts of {options.prompt_tokens} among {options.streams} streams")
    common = ("--credit-bytes", str(options.credit_bytes), "--max-barrier-stall", str(options.max_barrier_stall))
    all_gaps: dict[str, list[float]] = {way: [] for way in WAYS}
    with running_pairs(options.model, {way: (*flags, *common) for way, flags in WAYS.items()}) as pairs:
        for number in range(options.rounds):
            seconds = pairs["whole"].throttle(options.prompt_tokens, seed=100 + number)
            pairs["early"].relay.bytes_per_second = pairs["whole"].relay.bytes_per_second
            for way, pair in sorted(pairs.items(), reverse=bool(number % 2)):
                took, gaps = one_round(pair, options, 200 + number)
                table.add(way, **took, **{"of the prefill's time": took["after prefill"] / seconds})
                all_gaps[way] += gaps
        early = pairs["early"].decode
        barriers = [early.counter(f"pdserve_kv_{name}") for name in ("barrier_waits_total", "longest_barrier_seconds")]
    for way, gaps in all_gaps.items():
        table.add(way, **{"p99 gap of all rounds": sorted(gaps)[int(0.99 * (len(gaps) - 1))]})
    table.print()
    print(f"  {barriers[0]:.0f} waits at barriers, the longest {1000 * barriers[1]:.1f} ms")
    table.write(options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))

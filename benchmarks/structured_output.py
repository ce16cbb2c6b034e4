"""What grammars cost the streams that have one, and those that have none.

`python -m benchmarks.structured_output --help`. One decode node on a core of its own, without a prefill node: each
comparison alternates its two ways on the same node in one run, because machines drift.

  step time    median time between tokens of a batch of streams, each following a schema, and none of them
  gaps         between tokens of running streams while a schema is being compiled that takes long, and while a plain
               request of the same length arrives; the schema goes straight to the node, whose compiler must not be in
               the forward's way
"""

import itertools
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from benchmarks.nodes import Table, TimedClient, make_prompt, running_alone
from engine.grammar import Grammar
from engine.sampling_params import SamplingParams

ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
ENDLESS = Grammar("json_schema", json.dumps({"type": "array", "items": ROW, "minItems": 10_000}))
"""Its documents are longer than any output here."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2-135m"
    """Served in bfloat16."""
    batch: int = 16
    """Streams at once, for the step time."""
    tokens: int = 100
    """Of each stream."""
    streams: int = 4
    """Running while a slow schema arrives."""
    properties: int = 1200
    """Of the slow schema."""
    rounds: int = 6
    """Alternations."""
    json: Path | None = None
    """Also write the samples here."""


def step_seconds(client: TimedClient, sampling: SamplingParams, options: Options) -> float:
    """Between the tokens of a full batch, prefill and the uneven ends left out."""
    started = [client.start(make_prompt(16, seed), replace(sampling, seed=seed)) for seed in range(options.batch)]
    for _, answer in started:
        assert answer.final.finish_reason == "length", answer.final.error
    began = max(client.times[request_id][1] for request_id, _ in started)
    ended = min(client.times[request_id][-1] for request_id, _ in started)
    gaps = itertools.chain.from_iterable(client.gaps(request_id, began, ended) for request_id, _ in started)
    return statistics.median(gaps)


def slow_grammar(number: int, num_properties: int) -> Grammar:
    """Another one for each number: compiled grammars are kept."""
    properties = {f"{number}_{i}": {"type": "string", "maxLength": i % 9 + 3} for i in range(num_properties)}
    return Grammar("json_schema", json.dumps({"type": "object", "properties": properties}, separators=(",", ":")))


def window(client: TimedClient, streams: list[str], sampling: SamplingParams, at_least: float) -> dict[str, float]:
    """Gaps of the streams from the arrival of one more request to its end, or for `at_least` seconds."""
    request_id, answer = client.start(make_prompt(4, 99), sampling)
    assert answer.final.error_kind is None, answer.final.error
    began = client.started[request_id]
    ended = max(client.times[request_id][-1], began + at_least)
    while any(client.times[name][-1] < ended for name in streams):
        client.wait_for_tokens(streams, max(len(client.times[name]) for name in streams) + 1)
    gaps = sorted(itertools.chain.from_iterable(client.gaps(name, began, ended) for name in streams))
    return {"window": ended - began, "median": statistics.median(gaps), "longest": gaps[-1]}


def compare_steps(client: TimedClient, options: Options) -> list[Table]:
    tables = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        plain = SamplingParams(temperature=temperature, max_tokens=options.tokens, ignore_eos=True)
        ways = {"masks": replace(plain, grammar=ENDLESS), "none": plain}
        table = Table(f"{name}: seconds per step at batch {options.batch}, masks on and off")
        step_seconds(client, ways["masks"], options)  # warms up
        for _ in range(options.rounds):
            for way, sampling in ways.items():
                table.add(way, **{"step": step_seconds(client, sampling, options)})
        tables.append(table)
    return tables


def compare_gaps(client: TimedClient, options: Options) -> Table:
    table = Table(f"gaps in seconds of {options.streams} streams while a slow schema is compiled, and while not")
    one = SamplingParams(temperature=0.0, max_tokens=1)
    running = SamplingParams(temperature=0.0, max_tokens=7000, ignore_eos=True)
    streams = [client.start(make_prompt(16, 50 + seed), running)[0] for seed in range(options.streams)]
    client.wait_for_tokens(streams, 8)
    for number in range(options.rounds):
        slow = window(client, streams, replace(one, grammar=slow_grammar(number, options.properties)), 0.0)
        table.add("slow schema", **slow)
        table.add("plain", **window(client, streams, one, slow["window"]))
    client.cancel(*streams)
    return table


def main(options: Options) -> None:
    with running_alone(options.model) as client:
        tables = [*compare_steps(client, options), compare_gaps(client, options)]
    for table in tables:
        table.print()
    if options.json is not None:
        options.json.write_text(json.dumps([{"title": table.title, "samples": table.samples} for table in tables]))


if __name__ == "__main__":
    main(tyro.cli(Options))

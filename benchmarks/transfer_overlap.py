"""How much of a KV transfer hides behind the prefill, on a link so slow that the transfer takes as long as the prefill.

Push (layer by layer while the prompt is computed) against the same bytes pulled after the prefill (held KV, two legs),
alternated in one run; the link is set anew in every round, because machines drift.
`python -m benchmarks.transfer_overlap --help`.

  hidden share    bytes that had arrived when the prefill's last layer was computed
  gap share       from the prefill's end to the decode node's first own token, as a share of the transfer's time: that
                  is the client's second token of a push, and the first of a pull, whose second leg samples it again
  link share      the transfer's time on the link, as a share of this round's prefill: what should be 1
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.nodes import FEW_TOKENS, Pair, Table, make_prompt, running_pairs
from connector.kv_transfer_params import KVTransferParams
from engine.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
HOLD = KVTransferParams(do_remote_decode=True)


@dataclass(frozen=True)
class Options:
    """What to run."""

    model: str = "smollm2-135m"
    """Served in bfloat16."""
    prompt_tokens: int = 2000
    """Length of each prompt."""
    rounds: int = 5
    """Alternations."""
    json: Path | None = None
    """Also write the samples here."""


def push(pair: Pair, prompt: list[int]) -> dict[str, float]:
    request_id, answer = pair.client.start(prompt, FEW_TOKENS)
    assert answer.final.finish_reason == "length", answer.final.error
    transfer = pair.last_transfer()
    gap = pair.client.times[request_id][1] - transfer["computed_at"]
    return {
        "hidden share": transfer["num_hidden_bytes"] / transfer["num_bytes"],
        "gap share": gap / link_seconds(pair),
        "gap seconds": gap,
        "link share": link_seconds(pair) / (transfer["computed_at"] - transfer["granted_at"]),
    }


def pull(pair: Pair, prompt: list[int]) -> dict[str, float]:
    first_id, first = pair.prefill_client.start(prompt, ONE_TOKEN, kv_transfer_params=HOLD)
    params = first.final.kv_transfer_params
    request_id, answer = pair.client.start(prompt, FEW_TOKENS, kv_transfer_params=params)
    assert answer.final.finish_reason == "length", answer.final.error
    transfer = pair.last_transfer()
    first_leg = pair.prefill_client.times[first_id][0]
    gap = pair.client.times[request_id][0] - first_leg
    return {
        "hidden share": transfer["num_hidden_bytes"] / transfer["num_bytes"],
        "gap share": gap / link_seconds(pair),
        "gap seconds": gap,
        "link share": link_seconds(pair) / (first_leg - pair.prefill_client.started[first_id]),
    }


def link_seconds(pair: Pair) -> float:
    assert pair.relay.bytes_per_second is not None
    num_bytes: int = pair.last_transfer()["num_bytes"]
    return num_bytes / pair.relay.bytes_per_second


def main(options: Options) -> None:
    table = Table(f"push, and pull after the prefill; prompts of {options.prompt_tokens} tokens")
    with running_pairs(options.model, {"pair": ()}) as pairs:
        pair = pairs["pair"]
        pair.throttle(options.prompt_tokens, seed=1)  # warms up
        for number in range(options.rounds):
            pair.throttle(options.prompt_tokens, seed=100 + number)
            for way, run in (("push", push), ("pull", pull)):
                table.add(way, **run(pair, make_prompt(options.prompt_tokens, 200 + number)))
    table.print()
    table.write(options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))

"""How much of a KV transfer hides behind the prefill, on a link so slow that the transfer takes as long as the prefill.

Push (layer by layer while the prompt is computed) against the same bytes pulled after the prefill (held KV, two legs),
alternated in one run. `python -m benchmarks.transfer_overlap --help`.

  hidden share    bytes that had arrived when the prefill's last layer was computed
  gap share       from the prefill's end to the decode node's first own token, as a share of the transfer's time
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.nodes import Pair, Table, make_prompt, running_pair
from connector.kv_transfer_params import KVTransferParams
from engine.sampling_params import SamplingParams

TWO_TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


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


def throttle(pair: Pair, options: Options) -> None:
    """Sets the link so that a transfer takes as long as a prefill."""
    for seed in (1, 2):
        pair.client.generate(make_prompt(options.prompt_tokens, seed), ONE_TOKEN)
    transfer = pair.last_transfer()
    seconds = transfer["computed_at"] - transfer["granted_at"]
    pair.relay.bytes_per_second = transfer["num_bytes"] / seconds
    print(f"prefill {seconds:.2f} s for {transfer['num_bytes'] / 1e6:.1f} MB: the link is as fast as that")


def push(pair: Pair, prompt: list[int]) -> dict[str, float]:
    request_id, answer = pair.client.start(prompt, TWO_TOKENS)
    assert answer.final.finish_reason == "length", answer.final.error
    transfer = pair.last_transfer()
    seconds = transfer["layer_complete_at"][-1] - min(transfer["layer_first_unit_at"])
    gap = pair.client.times[request_id][1] - transfer["computed_at"]
    hidden = transfer["num_hidden_bytes"] / transfer["num_bytes"]
    return {"hidden share": hidden, "gap share": gap / seconds, "gap seconds": gap}


def pull(pair: Pair, prompt: list[int]) -> dict[str, float]:
    hold = KVTransferParams(do_remote_decode=True)
    first_id, first = pair.prefill_client.start(prompt, ONE_TOKEN, kv_transfer_params=hold)
    params = first.final.kv_transfer_params
    request_id, answer = pair.client.start(prompt, ONE_TOKEN, kv_transfer_params=params)
    assert answer.final.finish_reason == "length", answer.final.error
    transfer = pair.last_transfer()
    seconds = max(transfer["layer_complete_at"]) - min(transfer["layer_first_unit_at"])
    gap = pair.client.times[request_id][0] - pair.prefill_client.times[first_id][0]
    return {"hidden share": 0.0, "gap share": gap / seconds, "gap seconds": gap}


def main(options: Options) -> None:
    table = Table("push against pull after the prefill")
    with running_pair(options.model, "--no-early-admission") as pair:
        throttle(pair, options)
        for number in range(options.rounds):
            for way, run in (("push", push), ("pull", pull)):
                table.add(way, **run(pair, make_prompt(options.prompt_tokens, 10 + number)))
    table.print()
    table.write(options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))

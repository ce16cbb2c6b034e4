"""What the digest of each KV unit costs over TCP: with it and without, alternated in one run.

One prefill node and two decode nodes, alike but for `--digest`. KV is held and then pulled, so that nothing else of
weight goes on; the model is a random one that is small but for its KV. `python -m benchmarks.digest_cost --help`.

  rate              from the order to the last layer's last unit, in GB/s
  sender CPU        CPU seconds of the prefill node's process for each GB, all threads
  receiver CPU      the same of the decode node's; its one token's forward included, in either way
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.nodes import Pair, Table, make_prompt, running_pairs
from connector.kv_transfer_params import KVTransferParams
from engine.sampling_params import SamplingParams
from tests.faults.processes import NodeProcess
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

WAYS = {"digest": ("--digest",), "bare": ("--no-digest",)}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
HOLD = KVTransferParams(do_remote_decode=True)
SHAPE = {"num_hidden_layers": 16, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
NODES = ("--dtype", "float32", "--num-blocks", "200")


@dataclass(frozen=True)
class Options:
    """What to run."""

    prompt_tokens: int = 2000
    """Length of the prompt whose KV travels: 64 KiB each."""
    rounds: int = 15
    """Alternations."""
    json: Path | None = None
    """Also write the samples here."""


def pull(pair: Pair, prompt: list[int]) -> dict[str, float]:
    _, first = pair.prefill_client.start(prompt, ONE_TOKEN, kv_transfer_params=HOLD)
    params = first.final.kv_transfer_params
    began = [cpu_seconds(node) for node in (pair.prefill, pair.decode)]
    _, answer = pair.client.start(prompt, ONE_TOKEN, kv_transfer_params=params)
    assert answer.final.finish_reason == "length", answer.final.error
    sender, receiver = (cpu_seconds(node) - at for node, at in zip((pair.prefill, pair.decode), began, strict=True))
    transfer = pair.last_transfer()
    gigabytes = transfer["num_bytes"] / 1e9
    seconds = max(transfer["layer_complete_at"]) - transfer["granted_at"]
    return {"rate": gigabytes / seconds, "sender CPU": sender / gigabytes, "receiver CPU": receiver / gigabytes}


def cpu_seconds(node: NodeProcess) -> float:
    """Of all the process's threads: Linux's CPU clock of another process, as clock_getcpuclockid(3) names it."""
    assert node.process is not None
    return time.clock_gettime((~node.process.pid << 3) | 2)


def main(options: Options) -> None:
    table = Table(f"digests of units over TCP, prompts of {options.prompt_tokens} tokens")
    prompt = [token % VOCAB_SIZE for token in make_prompt(options.prompt_tokens, seed=1)]
    ways = {way: (*flags, "--no-enable-prefix-caching") for way, flags in WAYS.items()}
    with tempfile.TemporaryDirectory() as directory:
        model = str(save_tiny_model(Path(directory), "llama", max_position_embeddings=4096, **SHAPE))
        # The prefill node finds the prompt in its cache; every pull is whole.
        both = (*NODES, "--enable-prefix-caching")
        with running_pairs(model, ways, both=both, is_relayed=False) as pairs:
            for pair in pairs.values():
                pull(pair, prompt)  # warms up
            for number in range(options.rounds):
                for way, pair in sorted(pairs.items(), reverse=bool(number % 2)):
                    table.add(way, **pull(pair, prompt))
    table.print()
    for name, ways_of_it in table.medians().items():
        if name != "rate":
            print(f"  the digest's share of the {name}: {1 - ways_of_it['bare'] / ways_of_it['digest']:.1%}")
    table.write(options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))

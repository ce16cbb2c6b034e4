"""The demo model in float32: the ring's greedy tokens are transformers'."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.model_source import cached_builtin
from engine.sampling_params import SamplingParams
from tests.ring import running_ring

pytestmark = pytest.mark.demo_model

NUM_TOKENS = 64
TOPICS = [
    "the capital of France",
    "why the sky is blue",
    "how to bake bread",
    "a prime number above 100",
    "the plot of Hamlet",
    "how TCP works",
    "what a monad is",
    "the boiling point of water on Mount Everest",
    "three uses of copper",
    "the rules of chess",
    "a poem about autumn",
    "how vaccines work",
    "the French revolution",
    "photosynthesis",
    "a recipe with lentils",
    "the difference between a list and a tuple in Python",
    "the moons of Jupiter",
    "how to change a bicycle tyre",
    "the meaning of entropy",
    "why leaves fall",
]


def chat(topic: str) -> str:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    return f"{system}<|im_start|>user\nTell me about {topic}.<|im_end|>\n<|im_start|>assistant\n"


def greedy_by_transformers(model: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """What greedy generation gives after `prompt`, as far as it agrees with `output`, and one token more.

    One forward over both instead of 64: position by position the argmax is the token that generation would append.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist()


def test_twenty_prompts_of_64_tokens_equal_transformers():
    from transformers import AutoModelForCausalLM

    directory = cached_builtin("smollm2-135m")
    assert directory is not None, "run `make model` first"
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    prompts = [tokenizer.encode(chat(topic), add_special_tokens=False).ids for topic in TOPICS]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with running_ring(directory, num_blocks=512, block_size=16, transfer_timeout=120.0, peer_timeout=30.0) as ring:
        answers = [ring.client.start(prompt, sampling)[1] for prompt in prompts]
        outputs = [answer.token_ids for answer in answers if answer.final.finish_reason == "length"]
        assert ring.decode.engine.scheduler.counters.prompt_tokens_computed == 0
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    assert [len(output) for output in outputs] == [NUM_TOKENS] * len(TOPICS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert greedy_by_transformers(model, prompt, output) == output

"""The decoder against transformers, in every family and variant, however the tokens are split over steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from engine.decoder import Decoder
from engine.kv_connector import LayerHooks
from engine.weights import load_weights
from tests.paged_model import PagedModel
from tests.tiny_models import VARIANTS, VOCAB_SIZE
from tests.unit.conftest import TinyModel

MakeModel = Callable[[str], TinyModel]

# Longer than every window, than two query runs and than the original context of the scaled RoPE variants.
PROMPT_LENGTH = 150
CHUNKS = [70, 1, 1, 3, 65, 9, 1]


def random_tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens


def oracle_logits(oracle: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([tokens])).logits[0]
    return logits


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
class TestEqualsTransformers:
    def test_whole_prompt_in_one_step(self, tiny_model: MakeModel, variant: str) -> None:
        model = tiny_model(variant)
        tokens = random_tokens(PROMPT_LENGTH)
        paged = PagedModel(model.decoder)

        logits = paged.run(paged.sequence(tokens), [PROMPT_LENGTH])

        assert_same_logits(logits, oracle_logits(model.oracle, tokens))

    def test_chunks_and_single_tokens(self, tiny_model: MakeModel, variant: str) -> None:
        model = tiny_model(variant)
        tokens = random_tokens(PROMPT_LENGTH)
        paged = PagedModel(model.decoder)

        logits = paged.run(paged.sequence(tokens), CHUNKS)

        assert_same_logits(logits, oracle_logits(model.oracle, tokens))

    def test_several_chunks_and_decodes_in_one_step(self, tiny_model: MakeModel, variant: str) -> None:
        model = tiny_model(variant)
        paged = PagedModel(model.decoder)
        prompts = [random_tokens(length, seed) for seed, length in enumerate((140, 31, 33, 6, 90, 2, 66))]
        last_shares = [1, 1, 33, 1, 25, 1, 66]
        sequences = [paged.sequence(prompt) for prompt in prompts]
        for sequence, share in zip(sequences, last_shares, strict=True):
            if len(sequence.token_ids) > share:
                paged.run(sequence, [len(sequence.token_ids) - share])

        logits = paged.step(list(zip(sequences, last_shares, strict=True)))

        for sequence, share in zip(sequences, last_shares, strict=True):
            assert_same_logits(logits[sequence.name], oracle_logits(model.oracle, sequence.token_ids)[-share:])


class TestGreedyOutput:
    """Token for token the same, whatever runs beside a sequence and however its prompt is split."""

    NUM_TOKENS = 30

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_transformers_own_and_wanders(self, tiny_model: MakeModel, variant: str) -> None:
        model = tiny_model(variant)
        prompt = random_tokens(40)
        paged = PagedModel(model.decoder)

        output = paged.generate(paged.sequence(prompt, room=self.NUM_TOKENS), self.NUM_TOKENS, chunk=1000)

        assert output == self._oracle_output(model.oracle, prompt)
        assert len(set(output)) >= 15

    @pytest.mark.parametrize("chunk", [1, 7, 16, 39])
    def test_does_not_depend_on_chunks(self, tiny_model: MakeModel, chunk: int) -> None:
        paged = PagedModel(tiny_model("llama").decoder)
        prompt = random_tokens(40)
        outputs = [
            paged.generate(paged.sequence(prompt, room=self.NUM_TOKENS), self.NUM_TOKENS, chunk=size)
            for size in (40, chunk)
        ]
        assert outputs[0] == outputs[1]

    def test_does_not_depend_on_a_prefix_hit(self, tiny_model: MakeModel) -> None:
        paged = PagedModel(tiny_model("qwen2-window").decoder)
        prompt = random_tokens(40)
        first = paged.sequence(prompt, room=self.NUM_TOKENS)
        alone = paged.generate(first, self.NUM_TOKENS, chunk=40)

        second = paged.sequence(prompt, shared=first.block_ids[:9], room=self.NUM_TOKENS)
        assert second.num_computed == 36

        assert paged.generate(second, self.NUM_TOKENS, chunk=40) == alone

    def test_does_not_depend_on_company(self, tiny_model: MakeModel) -> None:
        paged = PagedModel(tiny_model("llama").decoder)
        prompts = [random_tokens(length, seed) for seed, length in enumerate((5, 40, 90))]
        alone = [
            paged.generate(paged.sequence(prompt, room=self.NUM_TOKENS), self.NUM_TOKENS, chunk=64)
            for prompt in prompts
        ]
        together = [paged.sequence(prompt, room=self.NUM_TOKENS + 10) for prompt in prompts]
        while any(len(s.token_ids) < len(p) + self.NUM_TOKENS for s, p in zip(together, prompts, strict=True)):
            logits = paged.step([(s, min(24, len(s.token_ids) - s.num_computed)) for s in together])
            for sequence in together:
                if sequence.num_computed == len(sequence.token_ids):
                    sequence.token_ids.append(int(logits[sequence.name][-1].argmax()))
        for sequence, prompt, expected in zip(together, prompts, alone, strict=True):
            assert sequence.token_ids[len(prompt) :][: self.NUM_TOKENS] == expected

    def _oracle_output(self, oracle: Any, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + self.NUM_TOKENS:
            tokens.append(int(oracle_logits(oracle, tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", ["llama-biases", "qwen3-window-biases"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(tiny_model: MakeModel, variant: str) -> None:
    model = tiny_model(variant)
    tokens = random_tokens(PROMPT_LENGTH)
    exact = oracle_logits(model.oracle, tokens)
    decoder = Decoder(model.config, load_weights(model.directory, model.config, torch.bfloat16))
    paged = PagedModel(decoder)

    logits = paged.run(paged.sequence(tokens), CHUNKS)

    assert logits.dtype is torch.bfloat16
    ours = (logits.float() - exact).square().mean().sqrt()
    theirs = (oracle_logits(bfloat16_copy(model), tokens).float() - exact).square().mean().sqrt()
    assert ours < 1.2 * theirs


def bfloat16_copy(model: TinyModel) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.bfloat16)


class RecordingHooks(LayerHooks):
    """Notes the calls, and what the cache holds at `slot` of the layer when they come."""

    def __init__(self, paged: PagedModel, block_id: int) -> None:
        self.calls: list[tuple[str, int, bool]] = []
        self._paged = paged
        self._block_id = block_id

    def wait_for_layer_load(self, layer: int) -> None:
        self._note("wait", layer)

    def save_kv_layer(self, layer: int) -> None:
        self._note("save", layer)

    def _note(self, call: str, layer: int) -> None:
        written = self._paged.kv_cache.layers[layer][self._block_id, :, 0].isfinite().all()
        self.calls.append((call, layer, bool(written)))


def test_hooks_surround_the_write_of_each_layer(tiny_model: MakeModel) -> None:
    paged = PagedModel(tiny_model("llama").decoder)
    sequence = paged.sequence(random_tokens(6))
    hooks = RecordingHooks(paged, sequence.block_ids[0])

    paged.step([(sequence, 6)], hooks)

    expected = [(("wait", layer, False), ("save", layer, True)) for layer in range(3)]
    assert hooks.calls == [call for pair in expected for call in pair]


class LoadingHooks(LayerHooks):
    """Fills a layer's blocks from another sequence's, as late as a load may."""

    def __init__(self, paged: PagedModel, *, source: list[int], target: list[int], num_tokens: int) -> None:
        self._paged = paged
        self._source, self._target, self._num_tokens = source, target, num_tokens

    def wait_for_layer_load(self, layer: int) -> None:
        cache = self._paged.kv_cache.layers[layer]
        block_size = cache.shape[2]
        for index in range(-(-self._num_tokens // block_size)):
            valid = min(block_size, self._num_tokens - index * block_size)
            cache[self._target[index], :, :valid] = cache[self._source[index], :, :valid]

    def save_kv_layer(self, layer: int) -> None:
        pass


def test_kv_that_arrives_at_the_barrier_is_used(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    paged = PagedModel(model.decoder)
    tokens = random_tokens(35)
    source = paged.sequence(tokens)
    expected = paged.run(source, [35])[-1:]

    target = paged.sequence(tokens)
    target.num_computed = 34
    hooks = LoadingHooks(paged, source=source.block_ids, target=target.block_ids, num_tokens=34)

    assert_same_logits(paged.step([(target, 1)], hooks)[target.name], expected)

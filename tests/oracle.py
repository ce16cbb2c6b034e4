"""The oracle: transformers, one request at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Oracle:
    """Greedy generation by the transformers model of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
        self.model.eval()
        self._logprobs: dict[tuple[int, ...], Any] = {}
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def logprobs(self, token_ids: Sequence[int]) -> Any:
        """`[len(token_ids), vocab_size]`: row i is about the token after `token_ids[i]`."""
        import torch

        key = tuple(token_ids)
        if key not in self._logprobs:
            with torch.inference_mode():
                self._logprobs[key] = self.model(torch.tensor([list(key)])).logits[0].float().log_softmax(-1)
        return self._logprobs[key]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """`num_tokens` output tokens; end tokens do not end it."""
        import torch

        key = (tuple(prompt), num_tokens)
        if key not in self._known:
            with torch.inference_mode():
                output = self.model.generate(
                    torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=num_tokens,
                    min_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._known[key] = output[0, len(prompt) :].tolist()
        return self._known[key]

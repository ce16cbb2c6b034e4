"""The model: a decoder of the llama lineage over the paged KV cache, with two calls around each layer's attention.

One layer:  norm, qkv, rotate | wait_for_layer_load, write KV, save_kv_layer | attention, output, norm, feed-forward.
The wait comes before the write: a late transfer may still touch the block that this step's first token goes into.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import PagedAttention
from engine.forward_inputs import ForwardInputs
from engine.kv_cache import KVCache
from engine.kv_connector import LayerHooks
from engine.model_config import ModelConfig
from engine.rope import RotaryEmbedding, Rotation
from engine.weights import DecoderWeights, LayerWeights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Every matrix product with weights goes through here: `x` `[n, in]`, `weight` `[out, in]`, result `[n, out]`."""
    return F.linear(x, weight, bias)


class Decoder:
    """Weights and how to run them. Keeps no state between steps; KV is the caller's."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self._weights = weights
        self._qk_norms = [_stacked_qk_norm(config, layer) for layer in weights.layers]
        self._rotary = RotaryEmbedding(config.rope, config.head_dim)
        self._attention = PagedAttention(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        """Writes the step's KV and returns logits `[len(inputs.sample_rows), vocab_size]`."""
        return self.head(self.hidden(inputs, kv_cache, hooks)[: len(inputs.sample_rows)])

    @torch.inference_mode()
    def hidden(self, inputs: ForwardInputs, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        """Writes the step's KV and returns what the head reads of `inputs.output_rows`, `[n, hidden_size]`."""
        hidden = F.embedding(inputs.token_ids, self._weights.embedding)
        rotation = self._rotary.rotation(inputs.positions, self.dtype)
        last = self.config.num_layers - 1
        for index, layer in enumerate(self._weights.layers):
            qkv = self._project_qkv(index, layer, hidden, rotation)
            self._store_kv(index, qkv, inputs, kv_cache, hooks)
            attended = self._attend(index, qkv, inputs, kv_cache)
            if index == last:
                # Beyond here rows no longer meet, and few are wanted.
                hidden, attended = hidden[inputs.output_rows], attended[inputs.output_rows]
            hidden.add_(linear(attended, layer.o, layer.o_bias))
            hidden.add_(self._feed_forward(layer, hidden))
        return self._norm(hidden, self._weights.norm)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits `[n, vocab_size]`."""
        return linear(hidden, self._weights.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _project_qkv(self, index: int, layer: LayerWeights, hidden: Tensor, rotation: Rotation) -> Tensor:
        """`[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`: rotated queries, rotated keys, values."""
        config = self.config
        qkv = linear(self._norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(hidden.shape[0], -1, config.head_dim)
        queries_and_keys = qkv[:, : config.num_heads + config.num_kv_heads]
        norm = self._qk_norms[index]
        if norm is not None:
            normed = F.rms_norm(queries_and_keys, (config.head_dim,), eps=config.rms_norm_eps)
            torch.mul(normed, norm, out=queries_and_keys)
        rotation.apply_(queries_and_keys)
        return qkv

    def _store_kv(
        self, index: int, qkv: Tensor, inputs: ForwardInputs, kv_cache: KVCache, hooks: LayerHooks | None
    ) -> None:
        if hooks is not None:
            hooks.wait_for_layer_load(index)
        width = self.config.num_kv_heads * self.config.head_dim
        kv_cache.write(index, inputs.kv_rows, qkv[:, self.config.num_heads :].reshape(-1, width))
        if hooks is not None:
            hooks.save_kv_layer(index)

    def _attend(self, index: int, qkv: Tensor, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        plan = inputs.attention[self.config.layer_windows[index]]
        return self._attention(qkv[:, : self.config.num_heads], kv_cache, index, plan)

    def _feed_forward(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, layer.post_attention_norm)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)


def _stacked_qk_norm(config: ModelConfig, layer: LayerWeights) -> Tensor | None:
    """The query norm's weight for each query head, then the key norm's: both norms are one product."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    per_head = (layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1))
    return torch.cat(per_head)

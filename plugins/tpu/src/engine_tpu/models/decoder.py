"""Decoders in JAX: all models are forms of one.

A model is a tree of arrays and a function over them, which computes on one device's part of it: heads, inner sizes,
experts and the vocabulary are divided over the mesh, and `jax.lax.psum` adds up what the parts give (Shoeybi et al.
2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from engine.types.model import ModelDescription
from engine_kit import rotary_table
from engine_tpu.models.experts import load_experts, routed
from engine_tpu.models.forms import form_of
from engine_tpu.models.layers import gated, linear, product, rms_norm, rotate, widened
from engine_tpu.weights import AXIS, Matrices, Params, Tensors, padded, rows

Attend = Callable[[int, jax.Array, jax.Array], jax.Array]
"""(layer, q [T, Hq, D], keys and values [T, 2 * Hkv, D], both of this device) -> [T, Hq * D]; they are stored first."""


class Decoder:
    """A model on a mesh.

    Args:
        model: the description.
        matrices: the mesh, and how its weights lie there.
        max_model_len: positions.

    Attributes:
        kv_heads: of keys, on each device.
        scale: of attention's scores.
        num_parameters: of the weights, once they are loaded.
    """

    def __init__(self, model: ModelDescription, matrices: Matrices, max_model_len: int) -> None:
        self._model = model
        self._matrices = matrices
        self._shards = matrices.shards
        self._form = form_of(model)
        self._heads = model.num_q_heads
        self._kv_heads = model.kv_specs[0].num_kv_heads
        self._head_size = model.kv_specs[0].head_size
        self._vocab = -(-model.vocab_size // self._shards.size) * self._shards.size
        self._length = max_model_len
        self.kv_heads = max(1, self._kv_heads // self._shards.size)
        self.scale = self._form.scale

    @property
    def num_parameters(self) -> int:
        """Elements of the checkpoint's tensors that were taken."""
        return self._matrices.elements

    # -- weights -----------------------------------------------------------------------------------------------------
    def load(self, tensors: Tensors) -> Params:
        """The model's arrays. Raises CheckpointError as `Tensors.check`."""
        model, tied = self._model, self._form.tied
        params: Params = {
            "embed": self._vocabulary(tensors, "model.embed_tokens.weight"),
            "norm": self._norm(tensors, "model.norm.weight", model.hidden_size),
            "ropes": [self._table(index) for index in range(len(self._form.ropes))],
            "layers": [self._layer(tensors, index, f"model.layers.{index}") for index in range(model.num_layers)],
        }
        if not tied:
            params["head"] = self._head(tensors, "lm_head.weight")
        tensors.check(("lm_head.weight",) if tied else ())
        return params

    def _table(self, index: int) -> jax.Array:
        wide = np.dtype(np.float64 if self._shards.dtype == np.float64 else np.float32)
        rope = self._form.ropes[index]
        rotary_table.check_length(rope, self._length)
        return self._shards.whole(rotary_table.cos_sin_table(np, rope, self._length, np.float64), wide)

    def _norm(self, tensors: Tensors, name: str, size: int) -> jax.Array:
        weight = self._matrices.take(tensors, name, (size,))
        return self._shards.whole(weight.astype(np.float64) + 1 if self._form.offset_norms else weight)

    def _rows_of_vocabulary(self, tensors: Tensors, name: str) -> Callable[[int], np.ndarray]:
        """Each device's, filled up with zeros to whole parts."""
        tensor = self._matrices.take(tensors, name, (self._model.vocab_size, self._model.hidden_size))
        each = self._vocab // self._shards.size
        return lambda part: padded(rows(tensor, part, self._shards.size), each)

    def _vocabulary(self, tensors: Tensors, name: str) -> jax.Array:
        shape = self._vocab, self._model.hidden_size
        return self._shards.divided(shape, self._rows_of_vocabulary(tensors, name))

    def _head(self, tensors: Tensors, name: str) -> Params:
        shape = self._vocab, self._model.hidden_size
        return self._matrices.outputs_divided(shape, self._rows_of_vocabulary(tensors, name))

    def _layer(self, tensors: Tensors, index: int, name: str) -> Params:
        form, size, make = self._form, self._model.hidden_size, self._matrices
        attention = f"{name}.self_attn"
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if form.sandwich else []
        layer: Params = {norm: self._norm(tensors, f"{name}.{norm}.weight", size) for norm in norms}
        layer["qkv"] = self._qkv(tensors, attention)
        inputs = self._heads * self._head_size
        layer["o"] = make.summed(tensors, f"{attention}.o_proj", size, inputs, form.o_bias)
        if form.qk_norm:
            for part in ("q_norm", "k_norm"):
                layer[part] = self._norm(tensors, f"{attention}.{part}.weight", self._head_size)
        if form.experts is not None and form.sparse[index]:
            layer["experts"] = load_experts(make, tensors, form.experts, size, f"{name}.{form.experts.block}")
            return layer
        gate_up = [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"]
        layer["gate_up"] = make.joined(tensors, gate_up, form.inner, size, form.mlp_bias)
        layer["down"] = make.summed(tensors, f"{name}.mlp.down_proj", size, form.inner, form.mlp_bias)
        return layer

    def _qkv(self, tensors: Tensors, name: str) -> Params:
        """One matrix; each device's part has its heads of queries, of keys and of values."""
        shards, dim, hidden = self._shards, self._head_size, self._model.hidden_size
        counts = {"q": self._heads, "k": self._kv_heads, "v": self._kv_heads}

        def part(whole: Sequence[np.ndarray]) -> Callable[[int], np.ndarray]:
            def of(number: int) -> np.ndarray:
                first = number * self._kv_heads // shards.size * dim
                mine = [kv[first : first + self.kv_heads * dim] for kv in whole[1:]]
                return np.concatenate([rows(whole[0], number, shards.size), *mine])

            return of

        total = (self._heads + 2 * self.kv_heads * shards.size) * dim
        matrices = [
            self._matrices.take(tensors, f"{name}.{one}_proj.weight", (count * dim, hidden))
            for one, count in counts.items()
        ]
        packed = self._matrices.outputs_divided((total, hidden), part(matrices))
        if self._form.qkv_bias:
            biases = [
                self._matrices.take(tensors, f"{name}.{one}_proj.bias", (count * dim,)) for one, count in counts.items()
            ]
            packed["b"] = shards.divided((total,), part(biases))
        return packed

    # -- computing ---------------------------------------------------------------------------------------------------
    def hidden(self, params: Params, ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """The final, normed hidden states [T, H] of tokens int32 [T] at their positions int32 [T]."""
        form, specs_ = self._form, self._model.kv_specs
        x = self._embed(params["embed"], ids)
        if form.embed_scale != 1:
            x = x * jnp.asarray(form.embed_scale, x.dtype)
        tables = [jnp.split(table[positions][:, None], 2, axis=-1) for table in params["ropes"]]
        for index, layer in enumerate(params["layers"]):
            cos, sin = tables[0 if specs_[index].sliding_window is None else -1]
            mixed = self._attention(layer, index, self._normed(x, layer["input_layernorm"]), cos, sin, attend)
            if form.sandwich:
                x = x + self._normed(mixed, layer["post_attention_layernorm"])
                given = self._feed_forward(layer, self._normed(x, layer["pre_feedforward_layernorm"]))
                x = x + self._normed(given, layer["post_feedforward_layernorm"])
            else:
                x = x + mixed
                x = x + self._feed_forward(layer, self._normed(x, layer["post_attention_layernorm"]))
        return self._normed(x, params["norm"])

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, H] -> [R, vocab_size], in float32 at least."""
        part = product(hidden, params["head"] if "head" in params else {"w": params["embed"]})
        if self._shards.size > 1:
            part = lax.all_gather(part, AXIS, axis=1, tiled=True)
        found = part[:, : self._model.vocab_size]
        if (cap := self._form.logits_cap) is not None:
            found = (jnp.tanh(widened(found) / cap) * cap).astype(found.dtype)
        return widened(found)

    def _normed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self._form.eps)

    def _embed(self, weight: jax.Array, ids: jax.Array) -> jax.Array:
        if self._shards.size == 1:
            return weight[ids]
        local = ids - lax.axis_index(AXIS).astype(jnp.int32) * len(weight)
        here = (local >= 0) & (local < len(weight))
        found = jnp.where(here[:, None], weight[jnp.where(here, local, 0)], 0)
        return lax.psum(found, AXIS)

    def _attention(
        self, layer: Params, index: int, x: jax.Array, cos: jax.Array, sin: jax.Array, attend: Attend
    ) -> jax.Array:
        qkv = linear(x, layer["qkv"]).reshape(len(x), -1, self._head_size)
        keys, values = -2 * self.kv_heads, -self.kv_heads
        q, k, v = qkv[:, :keys], qkv[:, keys:values], qkv[:, values:]
        if self._form.qk_norm:
            q, k = self._normed(q, layer["q_norm"]), self._normed(k, layer["k_norm"])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self._sum(layer["o"], attend(index, q, jnp.concatenate((k, v), axis=1)))

    def _feed_forward(self, layer: Params, x: jax.Array) -> jax.Array:
        form = self._form
        if "experts" in layer:
            assert form.experts is not None
            return self._added(routed(layer["experts"], x, form.experts))
        return self._sum(layer["down"], gated(linear(x, layer["gate_up"]), form.act))

    def _sum(self, packed: Params, x: jax.Array) -> jax.Array:
        """A product whose inputs are divided."""
        out = self._added(product(x, packed))
        return out + packed["b"] if "b" in packed else out

    def _added(self, part: jax.Array) -> jax.Array:
        return lax.psum(part, AXIS) if self._shards.size > 1 else part


def specs(params: Params) -> Any:
    """How each array of a tree is divided, for `jax.shard_map`."""
    return jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", PartitionSpec()), params)

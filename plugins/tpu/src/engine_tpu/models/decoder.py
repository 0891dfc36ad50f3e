"""Decoders in JAX: Llama, Mistral, Qwen2 and Qwen3 are forms of one.

A model is a tree of arrays and a function over them, which computes on one device's part of it: heads, inner dimensions
and the vocabulary are divided over the mesh, and `jax.lax.psum` adds up what the parts give (Shoeybi et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from engine.types.model import ModelDescription
from engine_kit.model_config import flag, integer, number, read_rope
from engine_tpu.rotary import cos_sin_table
from engine_tpu.weights import AXIS, Shards, Tensors, padded, rows

Attend = Callable[[int, jax.Array, jax.Array], jax.Array]
"""(layer, q [T, Hq, D], keys and values [T, 2 * Hkv, D], both of this device) -> [T, Hq * D]; they are stored first."""
Params = dict[str, Any]


@dataclass(frozen=True)
class DecoderForm:
    """Where models differ.

    Attributes:
        qkv_bias, o_bias, mlp_bias: whether projections have biases.
        qk_norm: each head's queries and keys are normed.
        tied: the embedding is the head.
        scale: of attention's scores.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    scale: float = 1.0


def form_of(model: ModelDescription) -> DecoderForm:
    """The form of a described model."""
    config, name = model.config, model.architecture
    bias = flag(config, "attention_bias", False) if name in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    return DecoderForm(
        qkv_bias=bias or name == "Qwen2ForCausalLM",
        o_bias=bias,
        mlp_bias=name == "LlamaForCausalLM" and flag(config, "mlp_bias", False),
        qk_norm=name == "Qwen3ForCausalLM",
        tied=flag(config, "tie_word_embeddings", False),
        scale=model.kv_specs[0].head_size ** -0.5,
    )


class Decoder:
    """A model of this form on a mesh.

    Args:
        model: the description.
        shards: the mesh, and the dtype.
        max_model_len: positions.
    """

    def __init__(self, model: ModelDescription, shards: Shards, max_model_len: int) -> None:
        spec, config = model.kv_specs[0], model.config
        self._model = model
        self._shards = shards
        self._form = form_of(model)
        self._eps = number(config, "rms_norm_eps", 1e-6)
        self._heads = model.num_q_heads
        self._kv_heads = spec.num_kv_heads
        self._head_size = spec.head_size
        self._inner = integer(config, "intermediate_size")
        self._vocab = -(-model.vocab_size // shards.size) * shards.size
        self._length = max_model_len
        self.kv_heads = max(1, self._kv_heads // shards.size)
        """On each device."""
        self.num_parameters = 0

    @property
    def scale(self) -> float:
        """Of attention's scores."""
        return self._form.scale

    # -- weights -----------------------------------------------------------------------------------------------------
    def load(self, tensors: Tensors) -> Params:
        """The model's arrays. Raises CheckpointError as `Tensors.check`."""
        model = self._model
        embed = self._vocabulary(tensors, "model.embed_tokens.weight")
        params: Params = {
            "embed": embed,
            "norm": self._vector(tensors, "model.norm.weight", model.hidden_size),
            "rope": self._rope(),
            "layers": [self._layer(tensors, f"model.layers.{index}") for index in range(model.num_layers)],
        }
        if not self._form.tied:
            params["head"] = self._vocabulary(tensors, "lm_head.weight")
        tensors.check(("lm_head.weight",) if self._form.tied else ())
        return params

    def _rope(self) -> jax.Array:
        wide = np.dtype(np.float64 if self._shards.dtype == np.float64 else np.float32)
        rope = read_rope(self._model.config, self._head_size)
        return self._shards.whole(cos_sin_table(rope, self._length), wide)

    def _take(self, tensors: Tensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
        tensor = tensors.take(name, shape)
        self.num_parameters += tensor.size
        return tensor

    def _vector(self, tensors: Tensors, name: str, size: int) -> jax.Array:
        return self._shards.whole(self._take(tensors, name, (size,)))

    def _vocabulary(self, tensors: Tensors, name: str) -> jax.Array:
        """[vocabulary, hidden], filled up with zeros to whole parts."""
        size, shards = self._model.hidden_size, self._shards
        tensor = self._take(tensors, name, (self._model.vocab_size, size))
        each = self._vocab // shards.size
        return shards.divided((self._vocab, size), lambda part: padded(rows(tensor, part, shards.size), each))

    def _layer(self, tensors: Tensors, name: str) -> Params:
        form, size = self._form, self._model.hidden_size
        attention = f"{name}.self_attn"
        layer: Params = {
            "input_norm": self._vector(tensors, f"{name}.input_layernorm.weight", size),
            "post_norm": self._vector(tensors, f"{name}.post_attention_layernorm.weight", size),
            "qkv": self._qkv(tensors, attention),
            "o": self._inputs_divided(tensors, f"{attention}.o_proj", size, self._heads * self._head_size, form.o_bias),
            "gate_up": self._outputs_divided(
                tensors, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], self._inner, size, form.mlp_bias
            ),
            "down": self._inputs_divided(tensors, f"{name}.mlp.down_proj", size, self._inner, form.mlp_bias),
        }
        if form.qk_norm:
            for part in ("q_norm", "k_norm"):
                layer[part] = self._vector(tensors, f"{attention}.{part}.weight", self._head_size)
        return layer

    def _qkv(self, tensors: Tensors, name: str) -> Params:
        """One matrix; each device's part has its heads of queries, of keys and of values."""
        shards, dim = self._shards, self._head_size
        heads = self._heads, self._kv_heads, self._kv_heads
        hidden = self._model.hidden_size
        names = [f"{name}.{part}_proj" for part in "qkv"]

        def part(whole: list[np.ndarray]) -> Callable[[int], np.ndarray]:
            def of(number: int) -> np.ndarray:
                q = rows(whole[0], number, shards.size)
                first = number * self._kv_heads // shards.size * dim
                return np.concatenate([q, *(kv[first : first + self.kv_heads * dim] for kv in whole[1:])])

            return of

        total = self._heads * dim + 2 * self.kv_heads * shards.size * dim
        pairs = list(zip(names, heads, strict=True))
        matrices = [self._take(tensors, f"{one}.weight", (count * dim, hidden)) for one, count in pairs]
        packed: Params = {"w": shards.divided((total, hidden), part(matrices))}
        if self._form.qkv_bias:
            biases = [self._take(tensors, f"{one}.bias", (count * dim,)) for one, count in pairs]
            packed["b"] = shards.divided((total,), part(biases))
        return packed

    def _outputs_divided(self, tensors: Tensors, names: list[str], out: int, size: int, bias: bool) -> Params:
        """Matrices of equal shapes as one, whose rows are divided: each device's part has its rows of all of them."""
        shards = self._shards

        def part(whole: list[np.ndarray]) -> Callable[[int], np.ndarray]:
            return lambda number: np.concatenate([rows(one, number, shards.size) for one in whole])

        matrices = [self._take(tensors, f"{name}.weight", (out, size)) for name in names]
        packed: Params = {"w": shards.divided((out * len(names), size), part(matrices))}
        if bias:
            biases = [self._take(tensors, f"{name}.bias", (out,)) for name in names]
            packed["b"] = shards.divided((out * len(names),), part(biases))
        return packed

    def _inputs_divided(self, tensors: Tensors, name: str, out: int, size: int, bias: bool) -> Params:
        """A matrix whose columns are divided: what the parts give is added up, and the bias after that."""
        shards, each = self._shards, size // self._shards.size
        matrix = self._take(tensors, f"{name}.weight", (out, size))
        packed: Params = {
            "w": shards.divided((out, size), lambda number: matrix[:, number * each : (number + 1) * each], dim=1)
        }
        if bias:
            packed["b"] = self._vector(tensors, f"{name}.bias", out)
        return packed

    # -- computing ---------------------------------------------------------------------------------------------------
    def hidden(self, params: Params, ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """The final, normed hidden states [T, H] of tokens int32 [T] at their positions int32 [T]."""
        x = self._embed(params["embed"], ids)
        cos, sin = jnp.split(params["rope"][positions][:, None], 2, axis=-1)
        for index, layer in enumerate(params["layers"]):
            normed = rms_norm(x, layer["input_norm"], self._eps)
            x = x + self._attention(layer, index, normed, cos, sin, attend)
            normed = rms_norm(x, layer["post_norm"], self._eps)
            x = x + self._sum(layer["down"], silu_mul(linear(normed, layer["gate_up"])))
        return rms_norm(x, params["norm"], self._eps)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden [R, H] -> [R, vocab_size], in float32 at least."""
        part = linear(hidden, {"w": params.get("head", params["embed"])})
        if self._shards.size > 1:
            part = lax.all_gather(part, AXIS, axis=1, tiled=True)
        return widened(part[:, : self._model.vocab_size])

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
        dim, kv_heads = self._head_size, self.kv_heads
        qkv = linear(x, layer["qkv"]).reshape(len(x), -1, dim)
        q, k, v = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
        if self._form.qk_norm:
            q, k = rms_norm(q, layer["q_norm"], self._eps), rms_norm(k, layer["k_norm"], self._eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self._sum(layer["o"], attend(index, q, jnp.concatenate((k, v), axis=1)))

    def _sum(self, packed: Params, x: jax.Array) -> jax.Array:
        """A product whose inputs are divided."""
        out = product(x, packed)
        if self._shards.size > 1:
            out = lax.psum(out, AXIS)
        return out + packed["b"] if "b" in packed else out


def specs(params: Params) -> Any:
    """How each array of a tree is divided, for `jax.shard_map`."""
    return jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", PartitionSpec()), params)


def widened(x: jax.Array) -> jax.Array:
    """x in float32, or in float64 if it is that already."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def product(x: jax.Array, packed: Mapping[str, jax.Array]) -> jax.Array:
    """x [T, I] @ w [O, I] transposed."""
    return lax.dot_general(x, packed["w"], (((1,), (1,)), ((), ())))


def linear(x: jax.Array, packed: Mapping[str, jax.Array]) -> jax.Array:
    """x [T, I] -> [T, O], with the bias if there is one."""
    out = product(x, packed)
    return out + packed["b"] if "b" in packed else out


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., H] / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight [H] (Zhang, Sennrich 2019)."""
    wide = widened(x)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [T, heads, D] by cos, sin [T, 1, D / 2], in two halves."""
    first, second = jnp.split(widened(x), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


def silu_mul(gate_up: jax.Array) -> jax.Array:
    """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
    gate, up = jnp.split(widened(gate_up), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)

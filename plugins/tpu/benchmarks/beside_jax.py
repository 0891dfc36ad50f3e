"""One stream through the engine's JAX worker beside a plain decode loop in JAX over the same weights.

`python plugins/tpu/benchmarks/beside_jax.py` makes a random Llama (120 million parameters by default), writes it to a
temporary folder, and lets both write tokens greedily, in turn. The plain loop is the best that one can write without an
engine: a jitted step over a contiguous cache that is donated, whose token stays on the device, where all are left until
the last is there. It prints tokens per second of each, what a token takes of all processors together, which says more
on a machine that others use, the ratios of each pair, and their medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors.numpy import load_file, save_file

from engine import LLM, SamplingParams
from engine_kit.model_config import RopeConfig
from engine_kit.rotary_table import cos_sin_table
from engine_tpu.models.layers import gated, linear, rms_norm, rotate

VOCAB_SIZE = 32_000


def config_of(hidden: int, layers: int) -> dict[str, Any]:
    """A Llama's config.json: heads of 64, one of keys for each two of queries."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }


def save(folder: Path, config: dict[str, Any]) -> None:
    """Write a random checkpoint, with a tokenizer of numbered words."""
    rng, hidden, inner = np.random.default_rng(0), config["hidden_size"], config["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden), "lm_head.weight": (VOCAB_SIZE, hidden)}
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (hidden // 2, hidden) for part in "kv"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (hidden, inner)}
    tensors = {name: (rng.standard_normal(shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{part}_layernorm" for n in range(config["num_hidden_layers"]) for part in _NORMS]
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in (*norms, "model.norm")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    tokenizer["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


_NORMS = ("input", "post_attention")


class Took(NamedTuple):
    """What some tokens took: seconds, and those of all processors together."""

    seconds: float
    processors: float

    @classmethod
    def since(cls, began: Took) -> Took:
        """From then on."""
        now = cls.now()
        return cls(now.seconds - began.seconds, now.processors - began.processors)

    def of_each(self, count: int) -> Took:
        """Of so many tokens."""
        return Took(self.seconds / count, self.processors / count)

    @classmethod
    def now(cls) -> Took:
        """The clocks."""
        return cls(time.perf_counter(), time.process_time())


class PlainLoop:
    """The same model, and one sequence."""

    def __init__(self, folder: Path, config: dict[str, Any], length: int) -> None:
        self._heads = config["num_attention_heads"]
        self._kv_heads = config["num_key_value_heads"]
        self._length = length
        found = load_file(folder / "model.safetensors")

        def joined(*names: str) -> dict[str, jax.Array]:
            return {"w": jnp.asarray(np.concatenate([found[f"{name}.weight"] for name in names]))}

        layers = []
        for index in range(config["num_hidden_layers"]):
            name = f"model.layers.{index}"
            layers.append(
                {
                    "norms": [jnp.asarray(found[f"{name}.{part}_layernorm.weight"]) for part in _NORMS],
                    "qkv": joined(*(f"{name}.self_attn.{part}_proj" for part in "qkv")),
                    "o": joined(f"{name}.self_attn.o_proj"),
                    "gate_up": joined(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
                    "down": joined(f"{name}.mlp.down_proj"),
                }
            )
        rope = RopeConfig(
            rope_type="default", theta=10000.0, rotary_dim=64, max_position=2048, original_max_position=2048
        )
        self._params = {
            "embed": jnp.asarray(found["model.embed_tokens.weight"]),
            "norm": jnp.asarray(found["model.norm.weight"]),
            "head": joined("lm_head"),
            "rope": jnp.asarray(cos_sin_table(np, rope, length, np.float64), jnp.float32),
            "layers": layers,
        }
        self._shape = len(layers), 2, length, self._kv_heads, 64
        self._step = jax.jit(self._forward, donate_argnums=1)

    def _forward(
        self, params: Any, cache: jax.Array, token: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = params["embed"][token][None]
        cos, sin = jnp.split(params["rope"][position][None, None], 2, axis=-1)
        seen = jnp.arange(self._length) <= position
        for index, layer in enumerate(params["layers"]):
            qkv = linear(rms_norm(x, layer["norms"][0], 1e-6), layer["qkv"]).reshape(1, -1, 64)
            q, k, v = jnp.split(qkv, (self._heads, self._heads + self._kv_heads), axis=1)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            new = jnp.stack((k, v))[None]
            zero = jnp.int32(0)
            cache = lax.dynamic_update_slice(cache, new, (jnp.int32(index), zero, position, zero, zero))
            grouped = q.reshape(self._kv_heads, -1, 64)
            scores = jnp.einsum("hgd,shd->hgs", grouped, cache[index, 0]) / 8
            weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
            mixed = jnp.einsum("hgs,shd->hgd", weights, cache[index, 1]).reshape(1, -1)
            x = x + linear(mixed, layer["o"])
            normed = rms_norm(x, layer["norms"][1], 1e-6)
            x = x + linear(gated(linear(normed, layer["gate_up"]), "silu"), layer["down"])
        logits = linear(rms_norm(x, params["norm"], 1e-6), params["head"])
        return cache, jnp.argmax(logits[0]).astype(jnp.int32), position + 1

    def __call__(self, prompt: list[int], tokens: int) -> tuple[list[int], Took]:
        """So many tokens after the prompt, and what they took, the prompt's not counted."""
        cache = jnp.zeros(self._shape, jnp.float32)
        position = jnp.int32(0)
        for token in prompt:
            cache, drawn, position = self._step(self._params, cache, jnp.int32(token), position)
        drawn.block_until_ready()
        found, began = [drawn], Took.now()
        for _ in range(tokens - 1):
            cache, drawn, position = self._step(self._params, cache, drawn, position)
            found.append(drawn)
        drawn.block_until_ready()
        took = Took.since(began)
        return [int(one) for one in found], took


def through_the_engine(llm: LLM, prompt: list[int], tokens: int) -> tuple[list[int], Took]:
    """The same through the engine: from its first token on."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request(str(time.monotonic_ns()), {"prompt_token_ids": prompt}, params)
    began, done = None, None
    while done is None:
        for output in llm.llm_engine.step():
            began = began or Took.now()
            done = output if output.finished else None
    assert began is not None
    return list(done.outputs[0].token_ids), Took.since(began)


def compared(loop: Callable[..., Any], engine: Callable[..., Any], tokens: int, pairs: int) -> list[tuple[Took, Took]]:
    """What a token takes both, pair by pair; tells where they write something else."""
    rng, found = np.random.default_rng(1), []
    for number in range(pairs + 1):
        prompt = rng.integers(1, VOCAB_SIZE, 16).tolist()
        (plain, plain_took), (mine, took) = loop(prompt, tokens), engine(prompt, tokens)
        same = next((n for n, (a, b) in enumerate(zip(plain, mine, strict=True)) if a != b), tokens)
        if same < tokens:
            print(f"(the texts differ from token {same} on: two products in float32)")
        if number:  # the first warms up
            found.append((plain_took.of_each(tokens - 1), took.of_each(tokens - 1)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    config = config_of(given.hidden, given.layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, config)
        length = 16 + given.tokens
        settings: dict[str, Any] = {"max_model_len": length + 16, "max_num_seqs": 1, "max_num_batched_tokens": 16}
        options = {"platform": {"device": "cpu", "cache_dir": ""}}
        with LLM(
            name,
            platform="tpu",
            options=options,
            dtype="float32",
            num_kv_pages=64,
            enable_prefix_caching=False,
            **settings,
        ) as llm:
            size = llm.llm_engine.client.worker.num_parameters
            pairs = compared(
                PlainLoop(folder, config, length), partial(through_the_engine, llm), given.tokens, given.pairs
            )
    print(f"{size / 1e6:.0f} million parameters, float32, {given.tokens} tokens after 16, one stream")
    print("| plain loop, tokens/s | engine, tokens/s | ratio | plain loop, processors' ms | engine | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = [[plain_spent / spent for plain_spent, spent in zip(plain, mine, strict=True)] for plain, mine in pairs]
    for (plain, mine), (by_time, by_work) in zip(pairs, ratios, strict=True):
        print(
            f"| {1 / plain.seconds:.2f} | {1 / mine.seconds:.2f} | {by_time:.3f} "
            f"| {plain.processors * 1e3:.2f} | {mine.processors * 1e3:.2f} | {by_work:.3f} |"
        )
    by_time, by_work = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median ratios {by_time:.3f} and {by_work:.3f}")


if __name__ == "__main__":
    main()

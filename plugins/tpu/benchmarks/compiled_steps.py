"""Whole steps, compiled by the TPU's own compiler, which needs no TPU: what it says of their memory and operations.

`pip install libtpu` brings the compiler. Weights are told by their shapes, so a model of any size can be compiled
anywhere. `python plugins/tpu/benchmarks/compiled_steps.py` prints the table of docs/users/tpu.md; a step takes a
minute.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.interfaces.model import ModelCard
from engine.kv.layout import make_layout
from engine_tpu import attention, attention_pallas
from engine_tpu.attention import Form
from engine_tpu.buckets import Bucket, drawing_sizes
from engine_tpu.device import set_numbers
from engine_tpu.models import cards
from engine_tpu.models.decoder import Decoder
from engine_tpu.platform import TpuPlatform
from engine_tpu.sampling import Masks
from engine_tpu.steps import Steps, jit_draw, sites_of
from engine_tpu.weights import AXIS, Matrices, Rows, Shards

BFLOAT16 = np.dtype(jax.numpy.bfloat16)
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B's config.json."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
"""Llama-3.1-8B's, its long contexts apart."""


class Told(NamedTuple):
    """What the compiler says of a step, on each device.

    Args:
        kept: bytes of weights, cache and tables.
        in_place: bytes of cache and tables that the step gives back where they lay.
        besides: bytes that it needs while it runs.
        operations: of floating point; the attention kernel's are not among them.
    """

    kept: int
    in_place: int
    besides: int
    operations: float


class Shapes(Shards):
    """A mesh's arrays, told by their shapes."""

    def whole(self, array: np.ndarray, dtype: np.dtype | None = None) -> Any:
        return jax.ShapeDtypeStruct(
            array.shape, dtype or self.dtype, sharding=NamedSharding(self.mesh, PartitionSpec())
        )

    def divided(self, shape: tuple[int, ...], part: Rows, dim: int = 0, dtype: np.dtype | None = None) -> Any:
        spec = PartitionSpec(*(AXIS if at == dim else None for at in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype, sharding=NamedSharding(self.mesh, spec))


class AnyTensors:
    """A checkpoint that has every tensor, in the place of `engine_tpu.weights.Tensors`."""

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Zeros, which take no memory."""
        return np.broadcast_to(np.zeros((), BFLOAT16), shape)

    def check(self, tolerated: Any = ()) -> None:
        """Nothing is missing."""


def devices_of(topology: str) -> list[Any]:
    """Of a TPU that is not there, e.g. "v5e:2x2"."""
    told = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    with patch.dict(os.environ, told):
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def steps_of(
    config: Mapping[str, Any], devices: list[Any], slots: int, length: int, dtype: np.dtype, kernel: bool = True
) -> Steps:
    """A model's steps on a mesh of these devices, as the worker makes them; attention by the kernel, or by XLA."""
    set_numbers()
    card: type[ModelCard] = getattr(cards, config["architectures"][0].removesuffix("ForCausalLM"))
    model = card.describe(dict(config))
    shards = Shapes(Mesh(np.array(devices), (AXIS,)), len(devices), dtype)
    decoder = Decoder(model, Matrices(shards), length)
    pages = {spec.kind: TpuPlatform.tokens_per_page(spec.kind, 16) for spec in model.sites}
    layout = make_layout(model.sites, block_size=16, kv_itemsize=dtype.itemsize, tokens_per_page=pages)
    sites = sites_of(
        layout,
        model.num_layers,
        lambda layer: Form(decoder.scale, model.sites[layer].sliding_window, model.sites[layer].soft_cap),
    )
    attend = attention_pallas.attend if kernel else attention.attend
    params = decoder.load(AnyTensors())  # type: ignore[arg-type]
    return Steps(decoder, params, shards, layout, sites, slots, length, dtype, attend)


def compiled(steps: Steps, bucket: Bucket, pages: int) -> Told:
    """Compile a bucket's step, over a cache of so many pages."""
    packed = _numbers(steps, (steps.packing(bucket).drawing.stop,))
    arguments = steps.params, *steps.memory_shapes(pages), packed
    step = steps.jit_forward(bucket).lower(*arguments).compile()
    memory = step.memory_analysis()
    return Told(
        kept=memory.argument_size_in_bytes,
        in_place=memory.alias_size_in_bytes,
        besides=memory.temp_size_in_bytes,
        operations=step.cost_analysis()["flops"],
    )


def compiled_draws(steps: Steps, count: int, vocab: int) -> int:
    """Compile the draw of so many of a vocabulary's tokens, without masks and with: bytes that it needs while it
    runs."""
    logits, words = (
        jax.ShapeDtypeStruct((count, width), dtype, sharding=steps.whole)
        for width, dtype in ((vocab, np.float32), (-(-vocab // 32), np.uint32))
    )
    _, _, tokens = steps.memory_shapes(2)
    given = logits, tokens, _numbers(steps, (count,)), _numbers(steps, (sum(drawing_sizes(count).values()),))
    draws = (jit_draw(steps.whole).lower(*given, masks).compile() for masks in (None, Masks(words, words, logits)))
    return max(draw.memory_analysis().temp_size_in_bytes for draw in draws)


def _numbers(steps: Steps, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, np.int32, sharding=steps.whole)


CASES = (
    ("Qwen3-0.6B", QWEN3, 1, "decode, 32 rows", Bucket(32, 32, 32, True)),
    ("Qwen3-0.6B", QWEN3, 1, "prompt of 2,048 tokens", Bucket(16, 2048, 16, False)),
    ("Llama-3.1-8B", LLAMA, 4, "decode, 32 rows", Bucket(32, 32, 32, True)),
)


def main() -> None:
    """Print the table, row by row, and what the draw takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(CASES)), help="of the table, from 0 on")
    parser.add_argument("--draws", action="store_true", help="compile draws of 32 tokens too, which takes longest")
    given = parser.parse_args()
    devices = devices_of("v5e:2x2")
    print("| model | v5e chips | step | weights | memory besides | operations |\n|---|---|---|---|---|---|")
    for name, config, count, said, bucket in (CASES[row] for row in given.rows):
        steps = steps_of(config, devices[:count], 32, 2048, BFLOAT16)
        told = compiled(steps, bucket, 2)
        print(
            f"| {name} | {count} | {said} | {(told.kept - told.in_place) / 1e9:.2f} GB | {told.besides / 1e6:,.0f} MB "
            f"| {told.operations / 1e9:,.0f} G |",
            flush=True,
        )
        if given.draws:
            draws = compiled_draws(steps, 32, config["vocab_size"])
            print(f"(the draw of 32 tokens: {draws / 1e6:,.0f} MB)", flush=True)


if __name__ == "__main__":
    main()

"""Whole steps, compiled by the TPU's own compiler, which needs no TPU: what it says of their memory and operations.

`pip install libtpu` brings the compiler. Weights are told by their shapes, so a model of any size can be compiled
anywhere. `python plugins/tpu/benchmarks/compiled_steps.py` prints the table of docs/users/tpu.md; a step takes a
minute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
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
from engine_tpu.steps import Steps, _jit_draw, sites_of
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
        moved: bytes that it reads and writes. Of the cache all is counted at each write and each kernel, so a small
            one tells more.
        operations: of floating point; the attention kernel's are not among them.
        draw_besides: bytes that the draw needs while it runs.
    """

    kept: int
    in_place: int
    besides: int
    moved: float
    operations: float
    draw_besides: int


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
    """Compile a bucket's step, and its draw."""
    pools, blocks, tokens = steps.memory_shapes(pages)
    numbers = partial(jax.ShapeDtypeStruct, dtype=np.int32, sharding=steps._whole)
    packed = numbers((steps.packing(bucket).drawing.stop,))
    step = steps._jit_forward(bucket).lower(steps._params, pools, blocks, tokens, packed).compile()
    vocab = steps._model._model.vocab_size
    logits = jax.ShapeDtypeStruct((bucket.draws, vocab), np.float32, sharding=steps._whole)
    drawing = numbers((sum(drawing_sizes(bucket.draws).values()),))
    draw = _jit_draw(steps._whole).lower(logits, tokens, numbers((bucket.draws,)), drawing, None).compile()
    memory, cost = step.memory_analysis(), step.cost_analysis()
    return Told(
        kept=memory.argument_size_in_bytes,
        in_place=memory.alias_size_in_bytes,
        besides=memory.temp_size_in_bytes,
        moved=cost["bytes accessed"],
        operations=cost["flops"],
        draw_besides=draw.memory_analysis().temp_size_in_bytes,
    )


CASES = (
    ("Qwen3-0.6B", QWEN3, 1),
    ("Llama-3.1-8B", LLAMA, 4),
)
STEPS = (
    ("decode, 32 rows", Bucket(32, 32, 32, True)),
    ("prompt of 2,048 tokens", Bucket(16, 2048, 16, False)),
)


def main() -> None:
    """Print the table, row by row."""
    devices = devices_of("v5e:2x2")
    print("| model | v5e chips | step | weights | memory besides, of the draw | moved | operations |")
    print("|---|---|---|---|---|---|---|")
    for name, config, count in CASES:
        steps = steps_of(config, devices[:count], 32, 2048, BFLOAT16)
        for said, bucket in STEPS:
            began = time.monotonic()
            told = compiled(steps, bucket, 2)
            print(
                f"| {name} | {count} | {said} | {(told.kept - told.in_place) / 1e9:.2f} GB "
                f"| {told.besides / 1e6:,.0f} MB, {told.draw_besides / 1e6:,.0f} MB | {told.moved / 1e9:.2f} GB "
                f"| {told.operations / 1e9:,.1f} G |",
                flush=True,
            )
            print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()

"""The attention beside the reference driver's and torch's own: `python plugins/cpu/benchmarks/attention.py`.

Decode steps go through the caches of as many layers as the processor's caches cannot hold, prefills through one layer.
All compute the same in turn (A B C A B C); torch's scaled_dot_product_attention gets dense keys and values, with
the heads of a group folded into the query length where that is faster (decodes). Printed are the medians of five turns:
gigabytes of keys and values a second beside what a plain sum reads, and for prefills floating point operations a second
(those above the diagonal are not counted) beside what torch's matrix product reaches. Keys that rows share, 512 in
"512 + 48", count for each row. With one thread processor time counts, so that other work on the machine does not; with
several, time on the clock. `--kv` compares caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed
from engine.plugin import Registry
from engine.plugin.loading import load_body
from engine.types.kv import KVGroup

KV_HEADS, SIZE, BLOCK = 8, 128, 16
CACHED = 160 << 20
"""Bytes of keys and values that decode steps go through."""
TURNS = 5
DECODES = ((1, 4096), (16, 4096), (16, 256), (64, 1024))


class Subject:
    """A driver with caches of several layers, filled.

    Args:
        name: the driver's. level: its option, where it has one. kv_dtype: of its cache.
        lengths: keys of each row. counts: its queries in this step, its last tokens.
        shared: how many of each row's first keys lie in the first row's pages.
    """

    def __init__(
        self, registry: Registry, name: str, level: str, dtype: torch.dtype, kv_dtype: str, lengths: list[int],
        counts: list[int], group_size: int, layers: int, keys: torch.Tensor, shared: int,
    ) -> None:  # fmt: skip
        candidate = registry.find("attention", name)
        card: Any = registry.card(candidate)
        options = card.Options(level=level) if card.Options is not None else None
        self.body: Any = load_body(card, candidate=candidate)(SimpleNamespace(options=options))
        blocks = [-(-n // BLOCK) for n in lengths]
        need = AttentionNeed(
            kind="full", head_size=SIZE, num_q_heads=KV_HEADS * group_size, num_kv_heads=KV_HEADS,
            dtype=str(dtype).removeprefix("torch."), kv_dtype=kv_dtype, device="cpu", block_size=BLOCK,
        )  # fmt: skip
        token_bytes = 2 * KV_HEADS * (SIZE * getattr(torch, kv_dtype).itemsize + card.scale_bytes(need))
        layer_bytes = BLOCK * token_bytes
        self.bytes = sum(lengths) * layers * token_bytes
        group = KVGroup(
            index=0, kind="full", sites=tuple(range(layers)), num_kv_heads=KV_HEADS, head_size=SIZE,
            sliding_window=None, tokens_per_block=BLOCK, layer_bytes=layer_bytes,
        )  # fmt: skip
        self.layers = [AttentionLayer(index=i, group=group, need=need, scale=SIZE**-0.5) for i in range(layers)]
        pool = torch.zeros(sum(blocks) + 1, layers * layer_bytes, dtype=torch.uint8)
        self.caches = [
            self.body.cache(need, group, pool[:, i * layer_bytes : (i + 1) * layer_bytes]) for i in range(layers)
        ]
        first = np.cumsum(blocks) - blocks + 1
        table = first[:, None] + np.arange(max(blocks))
        whole = self._batch(table, first, lengths, lengths)
        plan = self.body.plan(whole, group)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            self.body.write(layer, keys, keys, cache, plan)
        table[:, : shared // BLOCK] = table[0, : shared // BLOCK]
        self.plan = self.body.plan(self._batch(table, first, lengths, counts), group)

    @staticmethod
    def _batch(table: np.ndarray, first: np.ndarray, lengths: list[int], counts: list[int]) -> AttentionBatch:
        start = np.append(0, np.cumsum(counts)).astype(np.int32)
        index = np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, counts, strict=True)])
        slots = index + np.repeat(first, counts) * BLOCK
        bound = np.array(lengths, np.int32)
        return AttentionBatch(
            num_rows=len(lengths), num_tokens=len(index), num_decodes=sum(n == 1 for n in counts),
            query_start_loc=torch.from_numpy(start), query_start_loc_host=start, seq_lens=torch.from_numpy(bound),
            seq_lens_bound=bound, block_table=torch.from_numpy(table.astype(np.int32)),
            slot_mapping=torch.from_numpy(slots), kv_index=torch.from_numpy(index),
        )  # fmt: skip

    def __call__(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """One step of all layers."""
        for layer, cache in zip(self.layers, self.caches, strict=True):
            self.body.forward(layer, q, q, q, cache, self.plan, out)


def dense(q: torch.Tensor, keys: torch.Tensor, rows: int, layers: int, prefill: bool) -> Callable[[], None]:
    """torch's own, on dense keys of each layer: [rows, heads, length, size]."""
    length = len(keys) // rows
    stored = [keys.view(rows, length, KV_HEADS, SIZE).transpose(1, 2).contiguous() for _ in range(layers)]
    heads = q.shape[1]
    if prefill:
        turned = q.view(rows, -1, heads, SIZE).transpose(1, 2).contiguous()
        repeated = [k.repeat_interleave(heads // KV_HEADS, dim=1) for k in stored]
        return lambda: [F.scaled_dot_product_attention(turned, k, k, is_causal=True) for k in repeated] and None
    folded = q.view(rows, KV_HEADS, heads // KV_HEADS, SIZE)
    return lambda: [F.scaled_dot_product_attention(folded, k, k) for k in stored] and None


def in_turn(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Medians of seconds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


def read_bandwidth() -> float:
    """Gigabytes a second that summing reads."""
    data = torch.ones(256 << 20, dtype=torch.int8).view(torch.int64)
    return data.nbytes / 1e9 / in_turn({"": lambda: data.sum() and None})[""]


def matrix_peak(dtype: torch.dtype) -> float:
    """Billions of floating point operations a second of a matrix product."""
    a = torch.randn(2048, 2048).to(dtype)
    return 2 * 2048**3 / 1e9 / in_turn({"": lambda: torch.mm(a, a) is None or None})[""]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--level", default="auto")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--group", type=int, default=2, help="query heads of a KV head")
    parser.add_argument("--only", action="store_true", help="the driver `cpu` alone")
    parser.add_argument(
        "--kv", action="store_true", help="the driver `cpu` alone, with caches of 8 bits beside --dtype's"
    )
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype: torch.dtype = getattr(torch, asked.dtype)
    registry = Registry.discover()
    names = ["cpu"] if asked.only or asked.kv else ["cpu", "torch"]
    caches = [asked.dtype, *(["int8", "float8_e4m3fn"] if asked.kv else [])]
    cases = [
        *((f"decode, {rows} x {length:,}", [length] * rows, 1, 0) for rows, length in DECODES),
        ("decode, 32 x (512 + 48)", [560] * 32, 1, 512),
        ("1 + 4 drafts, 4 x 4,096", [4096] * 4, 5, 0),
        ("prefill, 1 x 1,024", [1024], 1024, 0),
        ("prefill, 8 x 1,024", [1024] * 8, 1024, 0),
        ("prefill, 1 x 8,192", [8192], 8192, 0),
    ]
    for title, lengths, count, shared in cases:
        rows, prefill = len(lengths), count == lengths[0]
        bytes_a_layer = sum(lengths) * 2 * KV_HEADS * SIZE * dtype.itemsize
        layers = 1 if prefill else max(1, CACHED // bytes_a_layer)
        keys = (torch.randn(sum(lengths), KV_HEADS, SIZE) / 4).to(dtype)
        q = torch.randn(rows * count, KV_HEADS * asked.group, SIZE).to(dtype)
        out = torch.empty_like(q)
        runs: dict[str, Callable[[], None]] = {}
        read: dict[str, float] = {}
        for name in names:
            for kv_dtype in caches:
                subject = Subject(
                    registry, name, asked.level, dtype, kv_dtype, lengths, [count] * rows, asked.group, layers, keys,
                    shared,
                )  # fmt: skip
                named = f"{name}, {kv_dtype}" if asked.kv else name
                runs[named], read[named] = partial(subject, q, out), subject.bytes / 1e9
        if len(names) > 1 and (prefill or count == 1):
            runs["sdpa"] = dense(q, keys, rows, layers, prefill)
        if prefill:
            limit, unit = matrix_peak(dtype), "GFLOP/s"
            pairs = sum(n * (n + 1) / 2 for n in lengths)
            work = 4 * pairs * KV_HEADS * asked.group * SIZE / 1e9
        else:
            limit, unit, work = read_bandwidth(), "GB/s", layers * bytes_a_layer / 1e9
        found = in_turn(runs)
        parts = "   ".join(
            f"{name} {(work if prefill else read.get(name, work)) / seconds:6.1f}" for name, seconds in found.items()
        )
        if asked.kv:
            first, *others = found.values()
            parts += "   (" + ", ".join(f"{first / seconds:.2f}" for seconds in others) + " times as fast)"
        print(f"{title:26} {parts}   {unit}, of {limit:.0f}", flush=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

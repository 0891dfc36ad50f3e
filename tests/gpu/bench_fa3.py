"""Attention kernels alone, at the shapes of a Llama 8B's layer: our Triton driver beside FlashAttention 3.

python -m tests.gpu.bench_fa3

Each form's keys lie in pages in random order, in pools that were NaN before the driver wrote them, and are checked
against float64 where the output was NaN before. Times are the median of replays of one graph over several layers, whose
pages no cache holds together. Variants differ by where pages lie (a layer's own pool, or all 32 layers of a page
together, as the engine has it), by their size, and by who divides the work: FlashAttention 3 in each layer, or once a
pass. The two libraries run in processes of their own: an error that ends one leaves the other's rows.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed
from engine.interfaces.context import WorkerContext
from engine.types.kv import KVGroup
from tests.gpu.rows import Row, tell

HEADS, KV_HEADS, SIZE, LAYERS = 32, 8, 128, 32
KB, MB = 1 << 10, 1 << 20
ELEMENT = 2
COLD_BYTES = 256 * MB
"""Of keys and values that a pass over the layers reads at least: several times a cache."""
ROUNDS = 20
TOLERANCE = 3e-2
"""Of bfloat16, beside float64: of a number, and of a row's numbers as they are on average."""
CHECKED_HEADS = (0, 13, 31)
"""Of rows of many queries, whose scores are too many for all heads."""


class Work(NamedTuple):
    """A step: (queries, keys) of each row."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.rows)

    @property
    def read(self) -> int:
        """Bytes of keys and values."""
        return sum(keys for _, keys in self.rows) * 2 * KV_HEADS * SIZE * ELEMENT

    @property
    def operations(self) -> float:
        """Of the two products, for what queries see."""
        return sum(4.0 * HEADS * SIZE * n * (keys - (n - 1) / 2) for n, keys in self.rows)


@dataclass(frozen=True)
class Variant:
    """How a step is computed.

    Args:
        family: "triton" or "fa3".
        per_page: tokens.
        stride: bytes from a page of a layer to its next page; 0: the layer's own pool.
        metadata: of FlashAttention 3: the work is divided once a pass.
    """

    family: str
    per_page: int = 16
    stride: int = 0
    metadata: bool = True

    @property
    def layer_bytes(self) -> int:
        return 2 * self.per_page * KV_HEADS * SIZE * ELEMENT

    def __str__(self) -> str:
        where = "own pools" if not self.stride else f"{self.stride / KB:,.0f} KiB apart"
        how = "" if self.family == "triton" else ", metadata once" if self.metadata else ", metadata in each layer"
        return f"{self.family}, pages of {self.per_page}, {where}{how}"


def works(divide: int) -> list[Work]:
    """divide: lengths by this, for a try without a GPU."""
    long, short, prompt = (max(1, n // divide) for n in (8000, 1000, 8192))
    many = max(8, 256 // divide)
    few = many // 4
    return [
        Work(f"decode 1 x {long}", ((1, long),)),
        Work(f"decode {many} x {short}", ((1, short),) * many),
        Work(f"prompt of {prompt}", ((prompt, prompt),)),
        Work(
            f"mixed: {prompt // 4} of {prompt // 2}, {few} decodes x {short}",
            (*(((1, short),) * few), (prompt // 4, prompt // 2)),
        ),
    ]


def variants(family: str, work: Work) -> list[Variant]:
    """The engine's own form first. A page of an 8B model's 32 layers is 2 MiB."""
    apart = LAYERS * Variant(family).layer_bytes
    decodes = work.tokens == len(work.rows)
    found = [Variant(family, stride=apart)]
    if family == "triton":
        if decodes:
            found += [Variant(family), Variant(family, stride=apart + 64 * KB)]
        return found
    if decodes:
        return [*found, Variant(family, stride=apart, metadata=False), Variant(family)]
    return [*found, Variant(family, per_page=128, stride=LAYERS * Variant(family, per_page=128).layer_bytes)]


class Step:
    """A step over pages of several layers, all of the same keys and values."""

    def __init__(self, work: Work, variant: Variant, device: str, cold_bytes: int) -> None:
        self.work = work
        self.variant = variant
        self.device = device
        self.layers = min(LAYERS, max(1, -(-cold_bytes // work.read)))
        random = torch.Generator(device).manual_seed(len(work.rows))
        self.lengths = [keys for _, keys in work.rows]
        blocks = [-(-keys // variant.per_page) for keys in self.lengths]
        num_pages = sum(blocks) + 1
        order = torch.randperm(num_pages - 1, generator=random, device=device) + 1  # page 0 is the null page
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32, device=device)
        slots, first = [], 0
        for row, (count, keys) in enumerate(zip(blocks, self.lengths, strict=True)):
            pages = order[first : first + count]
            table[row, :count] = pages.int()
            places = torch.arange(keys, device=device)
            slots.append(pages[places // variant.per_page] * variant.per_page + places % variant.per_page)
            first += count
        self.slots = torch.cat(slots)
        shape = (sum(self.lengths), KV_HEADS, SIZE)
        self.k, self.v = (self._draw(shape, random) for _ in range(2))
        self.q = self._draw((work.tokens, HEADS, SIZE), random)
        self.pools = self._pools(num_pages)
        self.need = AttentionNeed(
            kind="full", head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16",
            kv_dtype="bfloat16", device=device, block_size=variant.per_page,
        )  # fmt: skip
        self.group = KVGroup(
            index=0, kind="full", sites=tuple(range(self.layers)), num_kv_heads=KV_HEADS, head_size=SIZE,
            sliding_window=None, tokens_per_block=variant.per_page, layer_bytes=variant.layer_bytes, num_q_heads=HEADS,
        )  # fmt: skip
        self.batch = self._batch(table)

    def _draw(self, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=self.device, dtype=torch.bfloat16)

    def _pools(self, num_pages: int) -> list[torch.Tensor]:
        """Each layer's pages, uint8 [num_pages, layer_bytes], NaN."""
        size, stride = self.variant.layer_bytes, self.variant.stride
        if stride:
            pool = torch.empty(num_pages, stride, dtype=torch.uint8, device=self.device)
            found = [pool[:, i * size : (i + 1) * size] for i in range(self.layers)]
        else:
            found = [torch.empty(num_pages, size, dtype=torch.uint8, device=self.device) for _ in range(self.layers)]
        for pages in found:
            pages.view(torch.bfloat16).fill_(torch.nan)
        return found

    def _batch(self, table: torch.Tensor) -> AttentionBatch:
        counts = torch.tensor([0, *(queries for queries, _ in self.work.rows)], dtype=torch.int32)
        starts = counts.cumsum(0).to(torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        ends = lengths.cumsum(0)
        last = [torch.arange(keys - n, keys) for n, keys in self.work.rows]
        index = torch.cat(last).to(self.device)
        ahead = torch.repeat_interleave(ends - lengths, counts[1:].long()).to(self.device)
        return AttentionBatch(
            num_rows=len(self.lengths),
            num_tokens=self.work.tokens,
            num_decodes=sum(queries == 1 for queries, _ in self.work.rows),
            query_start_loc=starts.to(self.device),
            query_start_loc_host=starts.numpy(),
            seq_lens=lengths.to(self.device),
            seq_lens_bound=lengths.numpy(),
            block_table=table,
            slot_mapping=self.slots[ahead + index],
            kv_index=index,
            bounds_are_exact=True,
        )

    def bind(self, body: Any) -> Callable[[torch.Tensor], None]:
        """Write all keys and values, and give what computes all layers, each of which writes `out`."""
        caches = [body.cache(self.need, self.group, pages) for pages in self.pools]
        layers = [
            AttentionLayer(index=i, group=self.group, need=self.need, scale=SIZE**-0.5) for i in range(self.layers)
        ]
        written: Any = SimpleNamespace(slot_mapping=self.slots, batch=SimpleNamespace(slot_mapping=self.slots))
        for layer, cache in zip(layers, caches, strict=True):
            body.write(layer, self.k, self.v, cache, written)
        plan = body.plan(self.batch, self.group)
        new_k, new_v = (x[: self.work.tokens] for x in (self.k, self.v))  # drivers read those of the pages

        def launch(out: torch.Tensor) -> None:
            for layer, cache in zip(layers, caches, strict=True):
                body.forward(layer, self.q, new_k, new_v, cache, plan, out)

        return launch

    def error(self, out: torch.Tensor) -> float:
        """The largest distance from float64, in tolerances: of the first row, the last and two between, and of all
        rows whether they are numbers. Above 1 is wrong."""
        if not bool(out.isfinite().all()):
            return float("inf")
        starts, found = self.batch.query_start_loc_host.tolist(), 0.0
        before = [sum(self.lengths[:row]) for row in range(len(self.lengths))]
        for row in sorted({0, len(self.lengths) // 3, len(self.lengths) // 2, len(self.lengths) - 1}):
            queries, keys = self.work.rows[row]
            for head in range(HEADS) if queries == 1 else CHECKED_HEADS:
                tokens, places = slice(starts[row], starts[row + 1]), slice(before[row], before[row] + keys)
                k, v = (x[places, head * KV_HEADS // HEADS].double() for x in (self.k, self.v))
                scores = self.q[tokens, head].double() @ k.T * SIZE**-0.5
                hidden = torch.ones(queries, keys, dtype=torch.bool, device=self.device).triu(keys - queries + 1)
                expected = scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ v
                near = TOLERANCE * (expected.square().mean().sqrt() + expected.abs())
                found = max(found, float(((out[tokens, head].double() - expected).abs() / near).max()))
        return found


def body_of(variant: Variant, device: str) -> Any:
    """A driver's body; start is nothing that these two look at."""
    place: dict[str, Any] = {"start": None, "device": torch.device(device), "dtype": torch.bfloat16}
    if variant.family == "triton":
        from engine_cuda.attention_triton.body import TritonAttentionBody
        from engine_cuda.attention_triton.card import TritonAttentionOptions

        return TritonAttentionBody(WorkerContext(options=TritonAttentionOptions(), **place))
    from engine_flashattn.body import FlashAttentionBody
    from engine_flashattn.card import FlashAttentionOptions
    from engine_flashattn.implementations import fa3

    class Body(FlashAttentionBody):
        def load(self, implementation: Any) -> Any:
            attend = super().load(implementation)
            if variant.metadata:
                return attend
            operator = torch.ops.flash_attn_3.fwd.default
            return fa3.bind(operator, operator._schema, None, torch.cuda.get_device_properties().multi_processor_count)

    return Body(WorkerContext(options=FlashAttentionOptions(implementation="fa3"), **place))


def median_seconds(launch: Callable[[], object]) -> float:
    """Of a launch, by the device's clock; launches follow one another without a wait."""
    for _ in range(3):
        launch()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3


def seconds_a_layer(step: Step, launch: Callable[[torch.Tensor], None], out: torch.Tensor) -> float:
    """Replayed from a graph, whose output is checked too."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        launch(out)
    out.fill_(torch.nan)
    found = median_seconds(graph.replay)
    if step.error(out) > 1:
        raise ArithmeticError("the replayed graph gave other numbers than the launch")
    return found / step.layers


def measure(work: Work, variant: Variant, device: str, cold_bytes: int) -> Row:
    """A row. Raises whatever a driver raises, and ArithmeticError where its numbers are wrong."""
    step = Step(work, variant, device, cold_bytes)
    launch = step.bind(body_of(variant, device))
    out = torch.full_like(step.q, torch.nan)
    launch(out)
    error = step.error(out)
    if error > 1:
        raise ArithmeticError(f"{error:.3g} tolerances from float64")
    what = f"attention alone, {work.name}: {variant}"
    if device == "cpu":
        return Row(what=what, result=f"{error:.2f} tolerances from float64; no time without a GPU")
    seconds = seconds_a_layer(step, launch, out)
    row = Row(what=what, result=f"{seconds * 1e6:,.1f} us a layer ({step.layers}), {error:.2f} tolerances from float64")
    if work.tokens == len(work.rows):
        row.gb_s = work.read / seconds / 1e9
        row.share = "gb_s"
    else:
        row.tflop_s = work.operations / seconds / 1e12
        row.share = "tflop_s"
    row.figures["us"] = seconds * 1e6
    return row


def measure_family(family: str, asked: argparse.Namespace) -> None:
    """Rows of one library, as far as time allows. A device that was lost ends them."""
    end = time.monotonic() + asked.seconds
    for work in works(asked.divide):
        for variant in variants(family, work):
            what = f"attention alone, {work.name}: {variant}"
            if time.monotonic() > end:
                tell(Row(what=what, result="not run: no time was left"))
                continue
            try:
                tell(measure(work, variant, asked.device, asked.cold_bytes))
            except Exception as error:  # one form's fault is not the others'
                tell(Row(what=what, result=f"failed: {type(error).__name__}: {error}"[:240]))
            if asked.device != "cpu":
                torch.cuda.synchronize()  # raises where an error lost the device
                torch.cuda.empty_cache()


def commands(asked: argparse.Namespace) -> Iterator[list[str]]:
    """A process for each library."""
    for family in asked.families.split(","):
        yield [
            sys.executable, "-m", "tests.gpu.bench_fa3", "--family", family, "--device", asked.device,
            "--seconds", str(asked.seconds), "--cold-bytes", str(asked.cold_bytes), "--divide", str(asked.divide),
        ]  # fmt: skip


def main() -> None:
    """A row for each library, step and variant; each library ends by itself, or is ended."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_fa3", description=__doc__)
    flags.add_argument("--families", default="fa3,triton")
    flags.add_argument("--family", help="measure it in this process")
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--seconds", type=float, default=9.0, help="after which a library's next form is not begun")
    flags.add_argument("--cold-bytes", type=int, default=COLD_BYTES)
    flags.add_argument("--divide", type=int, default=1, help="lengths by this: for a try without a GPU")
    asked = flags.parse_args()
    if asked.family:
        measure_family(asked.family, asked)
        return
    for command in commands(asked):
        family, limit = command[4], asked.seconds + 8
        try:
            done = subprocess.run(command, timeout=limit)
        except subprocess.TimeoutExpired:
            tell(
                Row(what=f"attention alone, {family}", result=f"stopped after {limit:.0f} s: the rows above are whole")
            )
            continue
        if done.returncode:
            tell(Row(what=f"attention alone, {family}", result=f"its process ended with {done.returncode}"))


if __name__ == "__main__":
    main()

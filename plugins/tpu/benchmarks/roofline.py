"""What a step should take on a TPU, by bytes and operations alone: a forecast, not a measurement.

A step moves all weights and the keys and values that its rows see once through the chip's memory, and multiplies each
token with all weights: it takes at least the longer of the two, on one chip. Figures of the chips are Google's
(https://cloud.google.com/tpu/docs/v5e and v6e). `python plugins/tpu/benchmarks/roofline.py` prints the table of
docs/users/tpu.md.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """A chip's peaks: bytes of memory, bytes a second, operations a second in bfloat16."""

    name: str
    memory: float
    bandwidth: float
    bfloat16: float


class Decoder(NamedTuple):
    """A dense model's sizes."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = False

    @property
    def matrices(self) -> int:
        """Elements that every token is multiplied with, the head's among them."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    def stored(self, weight_bytes: int) -> int:
        """Bytes of the matrices; a head that is the embedding too is not rounded."""
        head = self.vocab * self.hidden
        return (self.matrices - head) * weight_bytes + head * (2 if self.tied else weight_bytes)

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


class Step(NamedTuple):
    """So many tokens, of rows that see so many tokens each."""

    name: str
    tokens: int
    rows: int
    context: int


CHIPS = (
    Chip("v5e", 16e9, 819e9, 197e12),
    Chip("v6e", 32e9, 1640e9, 918e12),
)
MODELS = (
    Decoder("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    Decoder("Llama-3.1-8B", 32, 4096, 14_336, 32, 8, 128, 128_256),
)
STEPS = (
    Step("decode, 1 row of 1k tokens", 1, 1, 1024),
    Step("decode, 32 rows of 1k", 32, 32, 1024),
    Step("decode, 128 rows of 1k", 128, 128, 1024),
    Step("prompt of 2,048 tokens", 2048, 1, 2048),
)


def seconds(chip: Chip, model: Decoder, step: Step, weight_bytes: int) -> float:
    """At least. Rounded weights are converted on the chip, so operations are bfloat16's."""
    weights = model.stored(weight_bytes)
    cache = step.rows * step.context * model.kv_bytes
    seen = step.context if step.tokens == step.rows else step.context / 2
    head = model.vocab * model.hidden
    products = 2 * (model.matrices - head) * step.tokens + 2 * head * step.rows
    attention = 4 * step.tokens * seen * model.heads * model.head_size * model.layers
    return max((weights + cache) / chip.bandwidth, (products + attention) / chip.bfloat16)


def fits(chip: Chip, model: Decoder, step: Step, weight_bytes: int) -> bool:
    """Whether weights and cache find room."""
    embeddings = 0 if model.tied else model.vocab * model.hidden * 2
    cache = step.rows * step.context * model.kv_bytes
    return model.stored(weight_bytes) + embeddings + cache < 0.9 * chip.memory


def table() -> str:
    """In Markdown."""
    columns = [(chip, size) for chip in CHIPS for size in (2, 1)]
    names = [f"{chip.name}, {'bfloat16' if size == 2 else 'int8 weights'}" for chip, size in columns]
    lines = ["| model | step | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for model in MODELS:
        for step in STEPS:
            cells = []
            for chip, size in columns:
                least = seconds(chip, model, step, size)
                cells.append(
                    f"{least * 1e3:.2f} ms, {step.tokens / least:,.0f} tokens/s"
                    if fits(chip, model, step, size)
                    else "no room"
                )
            lines.append(f"| {model.name} | {step.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

"""The draw of a decode step from the logits that its head leaves: as they are, and from a checked copy in float32.

python -m tests.gpu.bench_draw

Both as one graph, over as many logits, one after the other, as no cache holds. Both ways have to draw the same tokens.
"""

from __future__ import annotations

import argparse

import torch

from engine.interfaces.ops import SamplingRows
from engine_cuda.ops_triton.body import TritonOpsBody
from tests.gpu.bench_linear import CACHED, MODELS
from tests.gpu.bench_small_rows import timed
from tests.gpu.rows import Row, tell

Drawn = tuple[torch.Tensor, torch.Tensor]
OPS = TritonOpsBody(None)
TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}


def copied(logits: torch.Tensor, rows: SamplingRows) -> Drawn:
    """As rows whose logits are edited are drawn."""
    wide, broken = OPS.check_logits(logits)
    return OPS.sample(wide, rows), broken


def asked(count: int, temperature: float, device: str) -> SamplingRows:
    """Rows without filters."""
    number, zeros = torch.arange(count, device=device), torch.zeros(count, device=device)
    return SamplingRows(zeros + temperature, zeros.int(), zeros + 1, zeros, number, number)


def measure(title: str, vocab: int, count: int, temperature: float, device: str, cold_bytes: int) -> Row:
    """Microseconds of both ways. GB/s are the draw's from the logits as they are."""
    size = 2 * count * vocab
    copies = [torch.randn(count, vocab, device=device).bfloat16() for _ in range(max(1, -(-cold_bytes // size)))]
    rows, told, seconds = asked(count, temperature, device), [], 0.0
    tokens, broken = OPS.draw(copies[0], rows)
    others, checked = copied(copies[0], rows)
    if not (torch.equal(tokens, others) and torch.equal(broken, checked)):
        return Row(title, "the two ways draw other tokens")
    for name, way in (("from a copy", copied), ("as they are", OPS.draw)):
        seconds = timed(lambda way=way: [way(logits, rows) for logits in copies]) / len(copies)  # type: ignore[misc]
        told.append(f"{name} {seconds * 1e6:.1f}")
    return Row(title, ", ".join(told), size / seconds / 1e9 if seconds else None, share="gb_s" if seconds else "")


def main() -> None:
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_draw", description=__doc__)
    flags.add_argument("--rows", default="256,1")
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--divide", type=int, default=1, help="vocabularies so many times smaller, for a try elsewhere")
    given = flags.parse_args()
    for count in map(int, given.rows.split(",")):
        for model, sizes in MODELS.items():
            for name, temperature in TEMPERATURES.items():
                title = f"draw {model}, {name}, {count} row{'s' * (count > 1)}, us"
                cold_bytes = CACHED // given.divide**2
                tell(measure(title, sizes.vocab // given.divide, count, temperature, given.device, cold_bytes))


if __name__ == "__main__":
    main()

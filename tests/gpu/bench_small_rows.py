"""The layers of a decode step of few rows: torch's products beside those of `triton_gemv`, alone and with the norms,
activations and sums around them, launched one after the other and as dependents.

python -m tests.gpu.bench_small_rows

First whole layers without their attention, as many as the model has, as one graph; then each matrix alone, with every
cut of it that may be the best. Each runs on one copy of its weights after the other, so many that none is in the
cache when its turn comes. Results are held against float64 before they are timed, in memory that was filled with NaN.
Kernels are compiled by other processes meanwhile; a failure is told in its row, and where it leaves a GPU that answers
no more, a fresh process goes on with what follows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine_cuda.ops_triton.activations import Activations
from engine_cuda.ops_triton.norms import Norms
from engine_cuda.ops_triton_gemv.body import PackedWeight, few_rows
from engine_cuda.ops_triton_gemv.cuts import MatrixCut, cut_of
from engine_cuda.ops_triton_gemv.kernel import few_rows_kernel
from tests.gpu.bench_linear import MODELS, Sizes, captured
from tests.gpu.ceilings import median_seconds
from tests.gpu.rows import Row, tell

EPS = 1e-6
COLD_BYTES = 256 << 20
"""Of a matrix's copies together: several times a cache."""
VARIANTS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (1024, ((4, 1), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4))),
    (2048, ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8))),
    (3072, ((2, 2), (2, 4), (4, 4), (2, 8), (4, 8))),
    (4096, ((2, 4), (4, 4), (4, 8), (8, 8), (4, 8, 264), (4, 8, 528), (8, 16, 132))),
    (16384, ((1, 8), (2, 8), (1, 16), (2, 16), (2, 8, 264), (1, 8, 528))),
)
"""By inputs, the divisions that are timed beside the table's own."""
ROWS, MAIN_ROWS = (1, 4, 2), (1, 4)
"""Numbers of rows, in this order; variants are timed with those of MAIN_ROWS."""
COMPILERS = 12
"""Processes that compile, as far as there are processors."""


class Fused(NamedTuple):
    """One matrix and what is around it.

    Args:
        norm, gated, residual: what of it is part of the launch.
    """

    outputs: int
    inputs: int
    norm: bool = False
    gated: bool = False
    residual: bool = False


def layers(sizes: Sizes) -> dict[str, Fused]:
    """A model's, by name."""
    around: dict[str, dict[str, bool]] = {
        "qkv": {"norm": True},
        "output": {"residual": True},
        "gate and up": {"norm": True, "gated": True},
        "down": {"residual": True},
        "head": {},
    }
    return {name: Fused(outputs, inputs, **around[name]) for name, inputs, outputs, _ in sizes.shapes()}


class Given(NamedTuple):
    """What one launch, or the operations in its place, compute with."""

    x: torch.Tensor
    residual: torch.Tensor
    norm: torch.Tensor
    packed: PackedWeight


def composed(form: Fused, given: Given, product: Callable[[torch.Tensor, PackedWeight], torch.Tensor]) -> torch.Tensor:
    """The operations one after the other."""
    x = Norms().rms_norm(given.x, given.norm, EPS) if form.norm else given.x
    y = product(x, given.packed)
    if form.gated:
        return Activations().silu_mul(y)
    return torch.add(given.residual, y) if form.residual else y


def fused(form: Fused, given: Given, dependent: bool, cut: MatrixCut | None = None) -> torch.Tensor:
    """The one launch."""
    return few_rows(
        given.x,
        given.packed,
        norm=given.norm if form.norm else None,
        eps=EPS,
        residual=given.residual if form.residual else None,
        gated=form.gated,
        dependent=dependent,
        cut=cut,
    )


def by_torch(x: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """cuBLAS."""
    return F.linear(x, packed.weight, packed.bias)


def expected(form: Fused, given: Given) -> torch.Tensor:
    """In float64, rounded where the operations round."""
    dtype, n = given.x.dtype, given.x.double()
    if form.norm:
        n = (n * torch.rsqrt(n.square().mean(-1, keepdim=True) + EPS)).to(dtype).double() * given.norm.double()
    y = (n.to(dtype).double() @ given.packed.weight.double().T).to(dtype).double()
    if form.gated:
        gate, up = y.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    return y + given.residual.double() if form.residual else y


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is taken within is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest result; infinite where a result is no number."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def dtype_on(device: str) -> torch.dtype:
    """Triton's interpreter, on the processor, cuts off where a GPU rounds to bfloat16."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def draw(form: Fused, rows: int, copies: int, device: str) -> list[Given]:
    """Random numbers; one x and one residual for all copies of the weights."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype_on(device))

    x, residual = random(rows, form.inputs), random(rows, form.outputs)
    weights = [random(form.outputs, form.inputs) * form.inputs**-0.5 for _ in range(copies)]
    return [Given(x, residual, random(form.inputs), PackedWeight(weight, None)) for weight in weights]


def timed(launches: Callable[[], Any]) -> float:
    """Seconds of all of them as one graph; without a GPU they are called once, and take none."""
    if not torch.cuda.is_available():
        launches()
        return 0.0
    return median_seconds(captured(launches))


def each_of(compute: Callable[[Given], torch.Tensor], given: Sequence[Given]) -> None:
    """One launch after the other."""
    for one in given:
        compute(one)


def told_of(what: str, fault: Exception, device: str) -> str:
    """For a row. Raises what the GPU says where it answers no more."""
    if device == "cuda":
        torch.cuda.synchronize()
    return f"{what}: {type(fault).__name__}: {fault}"[:200]


TOLERANCE = 0.03
"""Of `error_of`: gate and what it multiplies may each be rounded the other way, by up to 2^-7, then their product."""


def ways(form: Fused, rows: int) -> dict[str, Callable[[Given], torch.Tensor]]:
    """What is timed of a matrix, by name. A variant's is its outputs a block x warps, and its programs."""
    found: dict[str, Callable[[Given], torch.Tensor]] = {
        "cuBLAS": lambda given: by_torch(given.x, given.packed),
        "gemv": lambda given: few_rows(given.x, given.packed),
        "composed": lambda given: composed(form, given, by_torch),
        "fused": partial(fused, form, dependent=False),
        "fused, dependent": partial(fused, form, dependent=True),
    }
    if rows in MAIN_ROWS:
        for cut in (MatrixCut(*each) for each in next(each for most, each in VARIANTS if form.inputs <= most)):
            if cut != cut_of(form.outputs, form.inputs, rows):
                name = f"{cut.outputs}x{cut.warps}" + f" of {cut.programs}" * bool(cut.programs)
                found[name] = partial(fused, form, dependent=False, cut=cut)
                found[f"{name}, dependent"] = partial(fused, form, dependent=True, cut=cut)
    return found


def layer_row(title: str, name: str, form: Fused, rows: int, asked: argparse.Namespace) -> None:
    """Each way's time of one matrix."""
    size = 2 * form.outputs * form.inputs
    copies = max(1, -(-asked.cold_bytes // size))
    given = draw(form, rows, copies, asked.device)
    plain = form._replace(norm=False, gated=False, residual=False)
    wanted = {False: expected(plain, given[0]), True: expected(form, given[0])}
    told, best, failed = [], float("inf"), []
    for way, compute in ways(form, rows).items():
        try:
            with poisoned():
                error = error_of(compute(given[0]), wanted[way not in ("cuBLAS", "gemv")])
            if error > TOLERANCE:
                raise ArithmeticError(f"wrong by {error:.3g} of the largest result")
            seconds = timed(partial(each_of, compute, given)) / copies
        except Exception as fault:  # one way's fault is not the others'
            failed.append(told_of(way, fault, asked.device))
            continue
        told.append(f"{way} {seconds * 1e6:.1f}")
        best = min(best, seconds) if seconds else best
    tell(
        Row(
            what=f"few rows {title}, {name} {form.outputs} x {form.inputs}, {rows} row{'s' * (rows > 1)}, us",
            result="; ".join([*([f"failed: {', '.join(failed)}"] if failed else []), ", ".join(told)]),
            gb_s=size / best / 1e9 if best < float("inf") else None,
            share="gb_s" if best < float("inf") else "",
        )
    )


class Layer(NamedTuple):
    """Weights of one, and norms."""

    norms: tuple[torch.Tensor, torch.Tensor]
    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight


def chain_of_operations(
    stack: Sequence[Layer], x: torch.Tensor, product: Callable[[torch.Tensor, PackedWeight], torch.Tensor]
) -> torch.Tensor:
    """What all layers leave; the attention gives back its queries."""
    norms, activations, residual, hidden = Norms(), Activations(), x.clone(), torch.zeros_like(x)
    for layer in stack:
        normed, residual = norms.add_rms_norm(hidden, residual, layer.norms[0], EPS)
        attended = product(normed, layer.qkv)[:, : layer.output.weight.shape[1]]
        normed, residual = norms.add_rms_norm(product(attended, layer.output), residual, layer.norms[1], EPS)
        hidden = product(activations.silu_mul(product(normed, layer.gate_up)), layer.down)
    return residual + hidden


def chain_of_launches(stack: Sequence[Layer], x: torch.Tensor, dependent: bool) -> torch.Tensor:
    """The same, by four launches a layer."""
    for layer in stack:
        attended = few_rows(x, layer.qkv, norm=layer.norms[0], eps=EPS, dependent=dependent)
        attended = attended[:, : layer.output.weight.shape[1]]
        x = few_rows(attended, layer.output, residual=x, dependent=dependent)
        inner = few_rows(x, layer.gate_up, norm=layer.norms[1], eps=EPS, gated=True, dependent=dependent)
        x = few_rows(inner, layer.down, residual=x, dependent=dependent)
    return x


def chain_row(title: str, sizes: Sizes, rows: int, asked: argparse.Namespace) -> None:
    """Microseconds of a layer without its attention, as one of all of the model's."""
    forms = layers(sizes)

    def layer() -> Layer:
        qkv, output, inner, down = (draw(forms[name], rows, 1, asked.device)[0] for name in list(forms)[:4])
        return Layer((qkv.norm, inner.norm), qkv.packed, output.packed, inner.packed, down.packed)

    stack = [layer() for _ in range(sizes.layers)]
    x = torch.randn(rows, sizes.hidden, device=asked.device, dtype=dtype_on(asked.device))
    chains: dict[str, Callable[[Sequence[Layer]], torch.Tensor]] = {
        "cuBLAS": lambda stack: chain_of_operations(stack, x, by_torch),
        "gemv": lambda stack: chain_of_operations(stack, x, few_rows),
        "fused": lambda stack: chain_of_launches(stack, x, dependent=False),
        "fused, dependent": lambda stack: chain_of_launches(stack, x, dependent=True),
    }
    wanted = chains["cuBLAS"](stack[:1]).double()
    told, best, failed = [], float("inf"), []
    for name, chain in chains.items():
        try:
            with poisoned():
                error = error_of(chain(stack[:1]), wanted)  # over more layers roundings grow
            if error > TOLERANCE or not torch.isfinite(chain(stack)).all():
                raise ArithmeticError(f"wrong by {error:.3g} of the largest result")
            seconds = timed(partial(chain, stack)) / len(stack)
        except Exception as fault:
            failed.append(told_of(name, fault, asked.device))
            continue
        told.append(f"{name} {seconds * 1e6:.1f}")
        best = min(best, seconds) if seconds else best
    moved = sum(2 * form.outputs * form.inputs for form in list(forms.values())[:4])
    tell(
        Row(
            what=f"few rows {title}, a layer of {len(stack)} without attention, {rows} row{'s' * (rows > 1)}, us",
            result="; ".join([*([f"failed: {', '.join(failed)}"] if failed else []), ", ".join(told)]),
            gb_s=moved / best / 1e9 if best < float("inf") else None,
            share="gb_s" if best < float("inf") else "",
        )
    )


def work(asked: argparse.Namespace) -> list[tuple[str, Callable[[], None]]]:
    """All of it, the most important first: what it is, and what measures and tells it."""
    chosen = {title: MODELS[title] for title in asked.models.split(",")}
    if asked.divide > 1:
        chosen = {title: divided(sizes, asked.divide) for title, sizes in chosen.items()}
    found: list[tuple[str, Callable[[], None]]] = []
    for rows in MAIN_ROWS:
        for title, sizes in chosen.items():
            found.append((f"a layer of {title}, {rows}", partial(chain_row, title, sizes, rows, asked)))
    for rows in ROWS:
        for title, sizes in chosen.items():
            for name, form in layers(sizes).items():
                found.append((f"{title}, {name}, {rows}", partial(layer_row, title, name, form, rows, asked)))
    return found


def divided(sizes: Sizes, by: int) -> Sizes:
    """A small model of that form, for a try without a GPU."""
    small = {name: max(16, getattr(sizes, name) // by) for name in ("hidden", "inner", "vocab", "head_size")}
    return sizes._replace(layers=2, heads=2, kv_heads=1, **small)


def compile_share(asked: argparse.Namespace) -> None:
    """Compile one of so many processes' share of the kernels, into Triton's cache: launches on tensors without memory,
    which are compiled and not run."""
    share, of = map(int, asked.compile.split("/"))
    run, count = few_rows_kernel.run, 0

    def compile_only(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        if count % of == share:
            run(*args, grid=grid, warmup=True, **kwargs)

    few_rows_kernel.run = compile_only
    alone, every = ("gemv", "fused", "fused, dependent"), [layers(MODELS[title]) for title in asked.models.split(",")]
    for first in (True, False):  # what whole layers launch comes first
        for rows in ROWS:
            for form in (form for forms in every for form in forms.values()):
                given = draw(form, rows, 1, "meta")[0]
                for way, compute in ways(form, rows).items():
                    if way not in ("cuBLAS", "composed") and (way in alone) == first:
                        compute(given)


def main() -> None:
    """A row for each, as soon as it is known."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.bench_small_rows", description=__doc__)
    flags.add_argument("--device", default="cuda")
    flags.add_argument("--models", default="0.6B,8B")
    flags.add_argument("--cold-bytes", type=int, default=COLD_BYTES)
    flags.add_argument("--divide", type=int, default=1, help="sizes by this: for a try without a GPU")
    flags.add_argument("--seconds", type=float, default=38.0, help="of all of it; what is left then is named")
    flags.add_argument("--until", type=float, default=0.0, help="when that is over, of a process that goes on")
    flags.add_argument("--begin", type=int, default=0, help="leave out so many of its rows")
    flags.add_argument("--compile", default="", help="i/n: compile a share of the kernels, and nothing else")
    asked = flags.parse_args()
    if asked.compile:
        compile_share(asked)
        return
    until = asked.until or time.time() + asked.seconds
    again = [sys.executable, "-m", "tests.gpu.bench_small_rows", *sys.argv[1:], "--until", str(until)]
    if asked.device == "cuda" and not asked.begin:
        count = max(1, min(COMPILERS, (os.cpu_count() or 1) - 2))
        for share in range(count):
            subprocess.Popen([*again, "--compile", f"{share}/{count}"], stdout=subprocess.DEVNULL)
    all_of_it = work(asked)
    for place, (what, measure) in enumerate(all_of_it):
        if place < asked.begin:
            continue
        if time.time() > until:
            left = ", ".join(name for name, _ in all_of_it[place:])
            tell(Row(what="few rows, left out", result=f"no time was left for: {left}"))
            return
        try:
            measure()
        except Exception as fault:
            tell(Row(what=f"few rows {what}", result=f"failed: {type(fault).__name__}: {fault}"[:240]))
            if asked.device == "cuda":
                sys.stdout.flush()
                os.execv(sys.executable, [*again, "--begin", str(place + 1)])


if __name__ == "__main__":
    main()

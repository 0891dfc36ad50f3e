"""Products with codes that a checkpoint stores: every level beside the definition in float64, and beside the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")

TABLE = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
WHOLE = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 13, 17, 40, 60, 90, 120, 200, 255])
FORMS = ("codes4", "codes4 by a table", "codes8", "values4", "values8", "int8")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """A layer in one form, and what it stands for."""

    def __init__(
        self, form: str, outputs: int, inputs: int, group: int, scale: torch.dtype, seed: int, ordered: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.form, _, table = form.partition(" ")
        group = -(-inputs // 4) * 4 if self.form == "int8" else group
        groups, bits = -(-inputs // group), 4 if self.form.endswith("4") else 8
        self.group = group
        self.codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=generator)
        if self.form == "values8":  # NaN has two codes
            self.codes[(self.codes & 127) == 127] = 0
        self.scales = (random(outputs, groups, seed=seed) * 0.1).to(torch.float32 if self.form == "int8" else scale)
        whole = self.form.startswith("codes")
        self.zeros = torch.randint(0, 256, (outputs, groups), dtype=torch.uint8, generator=generator) if whole else None
        self.table = WHOLE if table else TABLE if self.form == "values4" else None
        self.order = torch.randperm(inputs, generator=generator) if ordered and self.form != "int8" else None
        numbers = self.codes.double()
        if self.table is not None:
            numbers = self.table.double()[self.codes.long()]
        elif self.form == "values8":
            numbers = self.codes.view(torch.float8_e4m3fn).double()
        if self.zeros is not None:
            numbers = numbers - self.spread(self.zeros.double())
        elif self.form == "int8":
            numbers = numbers - 128
        sorted_weight = numbers * self.spread(self.scales.double())
        self.weight = sorted_weight  # of the inputs as they are sorted

    def spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]

    def expected(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The product, with rows as they are rounded; and the sum of its terms' sizes."""
        rows = x.double() if self.order is None else x.double()[:, self.order]
        if not self.form.startswith("values"):
            inputs = rows.shape[1]
            wide = torch.nn.functional.pad(rows.float(), (0, -inputs % self.group)).unflatten(1, (-1, self.group))
            most = wide.abs().amax(2, keepdim=True)
            steps = torch.round(wide * (torch.full_like(most, 127) / most)).nan_to_num(0.0)
            rows = (steps.double() * (most / 127).double()).flatten(1)[:, :inputs]
        return rows @ self.weight.T + bias.double(), rows.abs() @ self.weight.abs().T + bias.double().abs()

    def run(self, level: str, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        from engine_cpu.packed import PackedLinear

        layers = PackedLinear("quantization", level)
        order = self.order
        packed = layers.pack_codes(self.form, self.codes, self.scales, self.zeros, bias, self.group, self.table, order)
        return layers.linear(x, packed)


def check(found: torch.Tensor, case: Case, x: torch.Tensor, bias: torch.Tensor) -> None:
    expected, sizes = case.expected(x, bias)
    error = (found.double() - expected).abs() - 3e-6 * sizes
    if found.dtype == torch.bfloat16:
        error -= 2**-8 * expected.abs()
    assert found.dtype == x.dtype and found.shape == expected.shape
    assert not error.numel() or float(error.max()) <= 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(native: Any, form: str, dtype: torch.dtype) -> None:
    """Rows for every tile, outputs that fill no panel, inputs that fill no group, in whatever order."""
    sizes = [(1, 4, 4), (37, 96, 32), (70, 250, 64), (33, 512, 128), (5, 36, 12), (9, 1100, 516)]
    for place, (outputs, inputs, group) in enumerate(sizes):
        scale = (torch.float32, torch.float16, torch.bfloat16)[place % 3]
        case = Case(form, outputs, inputs, group, scale, place, ordered=bool(place % 2))
        bias = random(outputs, seed=9)
        for count in (0, 1, 2, 3, 5, 8, 9, 17):
            x = random(count, inputs, seed=count).to(dtype)
            check(case.run("auto", x, bias), case, x, bias)


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS), count=st.integers(1, 20), outputs=st.integers(1, 70), inputs=st.integers(1, 400),
    group=st.sampled_from([4, 32, 64, 100, 300]), scale=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99), wide=st.booleans(), ordered=st.booleans(),
)  # fmt: skip
def test_every_level_gives_the_same_bits(
    form: str, count: int, outputs: int, inputs: int, group: int, scale: torch.dtype, seed: int, wide: bool,
    ordered: bool,
) -> None:  # fmt: skip
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    case = Case(form, outputs, inputs, group, scale, seed, ordered)
    x = random(count, inputs, seed=seed + 1).to(torch.float32 if wide else torch.bfloat16)
    bias = random(outputs, seed=seed + 2)
    results = [case.run(level, x, bias) for level in native.levels()]
    check(results[0], case, x, bias)
    for level, result in zip(native.levels(), results, strict=True):
        assert torch.equal(result, results[0]), level


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_no_number_spoils_nobody_elses(native: Any, form: str) -> None:
    case = Case(form, 35, 96, 32, torch.float16, 1, ordered=False)
    x, bias = random(9, 96), torch.zeros(35)
    before = case.run("auto", x, bias)
    x[6, 50] = torch.nan
    after = case.run("auto", x, bias)
    assert after[6].isnan().all()
    others = [row for row in range(9) if row != 6]
    assert torch.equal(after[others], before[others])

"""Sums over ranks: the same bits at every level of processor features, and those of torch."""

from __future__ import annotations

import pytest
import torch

dtypes = pytest.importorskip("engine_cpu.dtypes", reason="engine-cpu is not installed")


def add(native, level: str, parts: list[torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(parts[0])
    addresses = [part.data_ptr() for part in parts]
    native.sum(level, dtypes.DTYPES[out.dtype], out.data_ptr(), addresses, out.numel())
    return out


@pytest.mark.parametrize("dtype", dtypes.DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_sums(native, dtype: torch.dtype, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    for count in (1, 15, 512, 1537):
        if dtype.is_floating_point:
            parts = [(torch.randn(count, generator=generator) * 100).to(dtype) for _ in range(ranks)]
        else:
            low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
            parts = [torch.randint(low, high, (count,), generator=generator).to(dtype) for _ in range(ranks)]
        wide = torch.float32 if dtype.is_floating_point and dtype.itemsize == 2 else dtype
        expected = parts[0].to(wide)
        for part in parts[1:]:
            expected = expected + part.to(wide)
        for level in native.levels():
            assert torch.equal(add(native, level, parts), expected.to(dtype)), level


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_16_bits(native, dtype: torch.dtype) -> None:
    """Each one survives being widened and narrowed: subnormals, infinities and signed zeros too."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x, zero = bits.view(dtype), torch.full((1 << 16,), -0.0, dtype=dtype)
    number = ~x.isnan()
    for level in native.levels():
        found = add(native, level, [x, zero])
        assert torch.equal(found[number].view(torch.int16), bits[number]), level
        assert found[~number].isnan().all(), level


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_to_nearest_even(native, dtype: torch.dtype) -> None:
    """Sums halfway between two numbers, and near the ends of the range, as torch rounds them."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(0, 1 << 16, (200_000,), generator=generator, dtype=torch.int32).to(torch.int16).view(dtype)
    b = torch.randint(0, 1 << 16, (200_000,), generator=generator, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = (a.float() + b.float()).to(dtype)
    number = ~expected.isnan()
    for level in native.levels():
        assert torch.equal(add(native, level, [a, b])[number], expected[number]), level


def test_a_level_that_is_not_there(native) -> None:
    with pytest.raises(ValueError, match="'mmx' is not compiled in"):
        native.sum("mmx", 0, 0, [], 0)

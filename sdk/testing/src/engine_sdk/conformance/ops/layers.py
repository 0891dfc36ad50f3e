"""Operations of a model's layers, against their formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine_sdk.conformance.ops.subject import DTYPES, OpsSubject, plain

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class LayerOperations(OpsSubject):
    """Rows, elements, norms, rotary positions, activations and the linear layer."""

    # -- rows --------------------------------------------------------------------------------------------------------
    @each_dtype
    def test_embedding(self, dtype: str) -> None:
        """Rows of the weight, by ids of either width."""
        embedding, weight = self.operation("embedding", dtype), self.tensor(9, 40, dtype=dtype)
        for kind in (torch.int32, torch.int64):
            ids = self.ints([8, 0, 0, 3], kind)
            assert torch.equal(embedding(ids, weight), weight[ids.long()])

    @each_dtype
    def test_embedding_part(self, dtype: str) -> None:
        """Zeros for the ids of other parts, whose sum is the whole; NaN in this part does not reach them."""
        part, weight = self.operation("embedding_part", dtype), self.tensor(9, 40, dtype=dtype)
        ids = self.ints([8, 0, 0, 3, 7, 2], torch.int32)
        for first, last in ((0, 9), (0, 3), (3, 8), (8, 9)):
            inside = ((ids >= first) & (ids < last))[:, None]
            expected = torch.where(
                inside, weight[ids.long()], torch.zeros((), dtype=weight.dtype, device=weight.device)
            )
            assert torch.equal(part(ids, weight[first:last].clone(), first), expected)
            broken = torch.full_like(weight[first:last], torch.nan)
            assert torch.equal(part(ids, broken, first).isnan(), inside.expand(-1, 40))

    @each_dtype
    def test_gather_rows(self, dtype: str) -> None:
        """Rows by index, some several times."""
        gather, x = self.operation("gather_rows", dtype), self.tensor(9, 40, dtype=dtype)
        for kind in (torch.int32, torch.int64):
            index = self.ints([5, 5, 0, 8, 1], kind)
            assert torch.equal(gather(x, index), x[index.long()])

    # -- elements ----------------------------------------------------------------------------------------------------
    @each_dtype
    def test_add(self, dtype: str) -> None:
        """Rounded once."""
        a, b = self.tensor(5, 33, dtype=dtype), self.tensor(5, 33, dtype=dtype, seed=1)
        self.check(self.operation("add", dtype)(a, b), plain(a) + plain(b), dtype)

    @each_dtype
    def test_scale(self, dtype: str) -> None:
        """By a factor that no dtype holds exactly."""
        x = self.tensor(5, 33, dtype=dtype)
        self.check(self.operation("scale", dtype)(x, 0.3), plain(x) * 0.3, dtype)

    @each_dtype
    def test_soft_cap(self, dtype: str) -> None:
        """Within the cap and far beyond it."""
        soft_cap, x = self.operation("soft_cap", dtype), self.tensor(5, 33, dtype=dtype, scale=20)
        for cap in (0.7, 30.0):
            self.check(soft_cap(x, cap), cap * np.tanh(plain(x) / cap), dtype, cap)

    @each_dtype
    def test_silu_mul(self, dtype: str) -> None:
        """The first half is the gate. Over the whole range of the exponential, and strided."""
        silu_mul = self.operation("silu_mul", dtype)
        gate = torch.cat((torch.linspace(-120, 120, 501), torch.tensor([-6e4, 6e4, 0.0]))).to(getattr(torch, dtype))
        up = self.tensor(len(gate), dtype=dtype).cpu()
        whole = torch.stack((torch.cat((gate, up)), torch.cat((up, gate)))).to(self.device)
        wide = torch.cat((whole, whole), dim=1)[:, : whole.shape[1]]  # rows lie apart
        for x in (whole, wide):
            first, second = np.split(plain(x), 2, axis=1)
            silu = first * np.where(first < 0, np.exp(np.minimum(first, 0)), 1) / (1 + np.exp(-np.abs(first)))
            self.check(silu_mul(x), silu * second, dtype)

    @each_dtype
    @pytest.mark.parametrize("tanh", [False, True])
    def test_gelu(self, dtype: str, tanh: bool) -> None:
        """With the normal distribution's own Phi, or its approximation; they differ by 4e-4."""
        x = torch.linspace(-6, 6, 301).to(getattr(torch, dtype)).to(self.device)[None]
        wide = plain(x)
        self.check(self.operation("gelu", dtype)(x, tanh), wide * _phi(wide, tanh), dtype)

    @each_dtype
    @pytest.mark.parametrize("tanh", [False, True])
    def test_gelu_mul(self, dtype: str, tanh: bool) -> None:
        """The first half is the gate; rows may lie apart."""
        gelu_mul, x = self.operation("gelu_mul", dtype), self.tensor(5, 67, dtype=dtype, scale=3)
        for given in (x[:, :66], x[:, 1:].contiguous()):
            gate, up = np.split(plain(given), 2, axis=1)
            self.check(gelu_mul(given, tanh), gate * _phi(gate, tanh) * up, dtype)

    @each_dtype
    @pytest.mark.parametrize("squared", [False, True])
    def test_relu(self, dtype: str, squared: bool) -> None:
        """What is negative becomes 0; the square is rounded once."""
        x = self.tensor(5, 33, dtype=dtype, scale=3)
        kept = np.maximum(plain(x), 0)
        self.check(self.operation("relu", dtype)(x, squared), kept**2 if squared else kept, dtype)

    # -- norms -------------------------------------------------------------------------------------------------------
    @each_dtype
    @pytest.mark.parametrize("size", [1, 31, 64, 96, 1000])
    def test_rms_norm(self, dtype: str, size: int) -> None:
        """Rows of any length, heads cut out of a projection, an eps that counts, a row of zeros."""
        rms_norm, weight = self.operation("rms_norm", dtype), self.tensor(size, dtype=dtype, seed=1)
        x = self.tensor(7, size, dtype=dtype, scale=3)
        x[2] = 0
        heads = self.tensor(7, 5, size, dtype=dtype, seed=2)[:, 1:4]
        for given in (x, heads, x * 0.01):
            for eps in (1e-6, 0.1):
                self.check(rms_norm(given, weight, eps), _rms(plain(given), plain(weight), eps), dtype)

    @each_dtype
    def test_rms_norm_of_large_numbers(self, dtype: str) -> None:
        """The mean of squares is taken in float32 at least: squares of these leave float16."""
        x, weight = self.tensor(3, 256, dtype=dtype, scale=3000), self.tensor(256, dtype=dtype, seed=1)
        self.check(self.operation("rms_norm", dtype)(x, weight, 1e-5), _rms(plain(x), plain(weight), 1e-5), dtype)

    @each_dtype
    @pytest.mark.parametrize("size", [31, 64, 1000])
    def test_add_rms_norm(self, dtype: str, size: int) -> None:
        """(norm of the sum, the sum): the norm is of the sum as it is rounded, or before."""
        add_rms_norm, weight = self.operation("add_rms_norm", dtype), self.tensor(size, dtype=dtype, seed=2)
        x, residual = self.tensor(7, size, dtype=dtype), self.tensor(7, size, dtype=dtype, seed=1)
        total = plain(x) + plain(residual)
        normed, added = add_rms_norm(x.clone(), residual.clone(), weight, 1e-3)
        self.check(added, total, dtype)
        self.check(normed, _rms(total, plain(weight), 1e-3), dtype, factor=1.5)

    @each_dtype
    @pytest.mark.parametrize("eps", [1e-12, 0.1])
    def test_layer_norm(self, dtype: str, eps: float) -> None:
        """With a mean that is far from 0."""
        layer_norm = self.operation("layer_norm", dtype)
        weight, bias = self.tensor(40, dtype=dtype, seed=1), self.tensor(40, dtype=dtype, seed=2)
        x = self.tensor(4, 3, 40, dtype=dtype) + 5
        wide = plain(x)
        normed = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + eps)
        factor = 10.0 if dtype == "float32" else 1.0  # the variance of float32 numbers near 5
        self.check(layer_norm(x, weight, bias, eps), normed * plain(weight) + plain(bias), dtype, factor=factor)

    # -- rotary positions --------------------------------------------------------------------------------------------
    @each_dtype
    @pytest.mark.parametrize(("size", "rotary"), [(64, 64), (128, 128), (48, 16), (6, 6)])
    def test_rope(self, dtype: str, size: int, rotary: int) -> None:
        """Pairs (i, i + rotary / 2) are complex numbers that turn by position * frequency; the rest stays. Queries and
        keys are views of one projection."""
        rope, half = self.operation("rope", dtype), rotary // 2
        both = self.tensor(6, 6, size, dtype=dtype)
        positions = self.ints([0, 1, 39, 2, 30, 7])
        angle = np.arange(40)[:, None] * 100.0 ** (-np.arange(half) / half)
        table = torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1)).to(self.device)
        table = table if dtype == "float64" else table.float()
        before, turn = plain(both), np.exp(1j * angle[positions.cpu().numpy()])[:, None]
        turned = (before[..., :half] + 1j * before[..., half:rotary]) * turn
        expected = np.concatenate([turned.real, turned.imag, before[..., rotary:]], axis=-1)
        q, k = rope(both[:, :4], both[:, 4:], positions, table)
        self.check(q, expected[:, :4], dtype)
        self.check(k, expected[:, 4:], dtype)
        assert np.array_equal(plain(q)[..., rotary:], before[:, :4, rotary:]), "what is not rotated was changed"

    @each_dtype
    def test_rope_of_parts(self, dtype: str) -> None:
        """Queries are the last elements of wider heads, the one key those of a wider row (latent attention). What
        stands before them stays, whether a driver rotates in place or not."""
        rope = self.operation("rope", dtype)
        heads, row = self.tensor(5, 3, 24, dtype=dtype), self.tensor(5, 40, dtype=dtype, seed=1)
        q, k = heads[..., 16:], row[:, 32:].unsqueeze(1)
        before = [heads[..., :16].clone(), row[:, :32].clone()]
        positions = self.ints([0, 1, 39, 2, 30])
        angle = np.arange(40)[:, None] * 100.0 ** (-np.arange(4) / 4)
        table = torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1)).to(self.device)
        turn = np.exp(1j * angle[positions.cpu().numpy()])[:, None]
        turned = [(plain(x)[..., :4] + 1j * plain(x)[..., 4:]) * turn for x in (q, k)]
        found = rope(q, k, positions, table if dtype == "float64" else table.float())
        for x, expected in zip(found, turned, strict=True):
            self.check(x, np.concatenate([expected.real, expected.imag], axis=-1), dtype)
        assert torch.equal(heads[..., :16], before[0]) and torch.equal(row[:, :32], before[1])

    @each_dtype
    @pytest.mark.parametrize(("size", "rotary"), [(128, 128), (48, 16), (6, 6)])
    def test_qk_norm_rope(self, dtype: str, size: int, rotary: int) -> None:
        """Each head is normed by its own mean, queries and keys with weights of their own, then rotated. They are views
        of one projection, whose values stay; numbers are large, a head is zeros, and eps counts."""
        operation, half, heads = self.operation("qk_norm_rope", dtype), rotary // 2, (slice(0, 9), slice(9, 11))
        positions = self.ints([0, 39, 2, 30, 7])
        angle = np.arange(40)[:, None] * 100.0 ** (-np.arange(half) / half)
        table = torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1)).to(self.device)
        turn = np.exp(1j * angle[positions.cpu().numpy()])[:, None]
        weights = [self.tensor(size, dtype=dtype, seed=seed) for seed in (1, 2)]
        for scale, eps in ((3000.0, 1e-6), (0.1, 0.05)):
            whole = self.tensor(5, 13, size, dtype=dtype, scale=scale)
            whole[1, 4] = 0
            before = plain(whole).copy()
            found = operation(
                *(whole[:, part] for part in heads), *weights, eps, positions,
                table if dtype == "float64" else table.float(),
            )  # fmt: skip
            for x, part, weight in zip(found, heads, weights, strict=True):
                normed = _rms(before[:, part], plain(weight), eps)
                turned = (normed[..., :half] + 1j * normed[..., half:rotary]) * turn
                # Rounded after the norm and after the turn, of whose terms one can be the larger.
                bound = np.concatenate([np.abs(turned), np.abs(turned), np.abs(normed[..., rotary:])], axis=-1)
                expected = np.concatenate([turned.real, turned.imag, normed[..., rotary:]], axis=-1)
                self.check(x, expected, dtype, bound, factor=1.5)
            assert np.array_equal(plain(whole)[:, 11:], before[:, 11:]), "the values beside them were changed"

    @each_dtype
    def test_linear_heads(self, dtype: str) -> None:
        """Each head by a matrix of its own; heads that are part of wider ones, matrices as stored and transposed. What
        comes out is a tensor of its own, token after token."""
        linear = self.operation("linear_heads", dtype)
        for tokens, heads, inputs, outputs in ((1, 3, 24, 40), (7, 2, 16, 9), (40, 5, 33, 8)):
            wide = self.tensor(tokens, heads, inputs + 8, dtype=dtype)
            weight = self.tensor(heads, outputs, inputs, dtype=dtype, seed=1)
            turned = self.tensor(heads, inputs + 3, outputs, dtype=dtype, seed=2)[:, :inputs].transpose(1, 2)
            for x in (wide[..., :inputs], wide[..., 8:], wide[..., :inputs].contiguous()):
                for given in (weight, turned):
                    before = plain(x).copy()
                    expected = np.einsum("thi,hoi->tho", before, plain(given))
                    terms = np.einsum("thi,hoi->tho", np.abs(before), np.abs(plain(given)))
                    found = linear(x, given)
                    assert found.is_contiguous(), "it is a view of something else"
                    self.check(found, expected, dtype, 1 + terms * (1 if dtype in ("float64", "float32") else 1e-4))
                    assert np.array_equal(plain(x), before), "its input was changed"

    # -- linear ------------------------------------------------------------------------------------------------------
    def _linear(self, dtype: str, shapes: list[tuple[int, int]], rows: list[int], bias: bool) -> None:
        pack, linear = self.operation("pack_linear", dtype), self.operation("linear", dtype)
        for outputs, inputs in shapes:
            weight = self.tensor(outputs, inputs, dtype=dtype, seed=1)
            added = self.tensor(outputs, dtype=dtype, seed=2) if bias else None
            packed = pack(weight.clone(), None if added is None else added.clone())
            for count in rows:
                x = self.tensor(count, inputs, dtype=dtype, seed=3)
                expected = plain(x) @ plain(weight).T + (0 if added is None else plain(added))
                # Products are added up in float32 at least, and rounded once at the end.
                terms = np.abs(plain(x)) @ np.abs(plain(weight)).T * (1 if dtype in ("float64", "float32") else 1e-4)
                self.check(linear(x, packed), expected, dtype, 1 + terms)

    @each_dtype
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear(self, dtype: str, bias: bool) -> None:
        """From one row to many, with widths that fill no register."""
        self._linear(dtype, [(1, 1), (3, 31), (37, 96), (64, 512)], [1, 2, 3, 5, 8, 16, 17, 70], bias)

    @each_dtype
    def test_linear_of_a_view(self, dtype: str) -> None:
        """Some columns of a wider tensor."""
        pack, linear = self.operation("pack_linear", dtype), self.operation("linear", dtype)
        weight, wide = self.tensor(9, 40, dtype=dtype), self.tensor(5, 100, dtype=dtype, seed=1)
        expected = plain(wide)[:, 30:70] @ plain(weight).T
        self.check(linear(wide[:, 30:70], pack(weight, None)), expected, dtype, np.abs(expected).max())

    @each_dtype
    def test_linear_keeps_rows_apart(self, dtype: str) -> None:
        """NaN in one row stays there."""
        pack, linear = self.operation("pack_linear", dtype), self.operation("linear", dtype)
        packed, x = pack(self.tensor(33, 40, dtype=dtype), None), self.tensor(6, 40, dtype=dtype, seed=1)
        x[2] = torch.nan
        found = plain(linear(x, packed))
        assert np.isnan(found[2]).all() and np.isfinite(np.delete(found, 2, axis=0)).all()


def _phi(x: np.ndarray, tanh: bool) -> np.ndarray:
    """The normal distribution's, or its approximation."""
    if tanh:
        near: np.ndarray = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return near
    exact: np.ndarray = np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)))(x)
    return exact


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed

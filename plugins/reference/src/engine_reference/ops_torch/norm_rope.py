"""Normalisation and rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine_reference.ops_torch.precision import widened


class NormRope:
    """RMS norm (Zhang, Sennrich 2019), layer norm (Ba et al. 2016) and rotary embedding (Su et al. 2021)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] / sqrt(mean(x^2) + eps) * weight [H]."""
        wide = widened(x)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        # Rounded before the weight is applied, as transformers does: float32 and float64 do not notice.
        return normed.to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., H], weight and bias [H]."""
        wide = widened(x)
        return F.layer_norm(wide, weight.shape, weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first `rotary_dim` elements of each head, in two halves (GPT-NeoX's form).

        q [T, Hq, D], k [T, Hkv, D], positions int64 [T], cos_sin [max_position, rotary_dim].
        """
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm` of each head, then `rope`. q [T, Hq, D], k [T, Hkv, D], q_weight, k_weight [D]."""
        return self.rope(self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), positions, cos_sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = widened(x)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated

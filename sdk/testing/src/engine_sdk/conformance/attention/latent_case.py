"""Ragged batches of latent attention: one vector a token in the pool, whose first elements are also the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine_sdk.conformance.attention.case import Case, Form


def latent_form(
    num_q_heads: int = 4, latent_size: int = 16, rope_size: int = 8, block_size: int = 16, **fields: Any
) -> Form:
    """A layer of kind "mla". Few elements: those of models are 512 and 64."""
    return Form(
        kind="mla", num_kv_heads=1, group_size=num_q_heads, head_size=latent_size + rope_size, rope_size=rope_size,
        block_size=block_size, **fields,
    )  # fmt: skip


class LatentCase(Case):
    """One step of some rows of latent attention; see `Case`, whose `k` holds the vectors and `v` the latents.

    Attributes:
        q_latent, q_rope: this step's queries, views of `q` [T, Hq, C + P] where `strided`.
        latent, rope_key: what this step writes, views of `new` [T, C + P] where `strided`.
    """

    def _draw_values(self, strided: bool, padding: int) -> None:
        form = self.form
        size, latent_size = form.head_size, form.head_size - form.rope_size
        self.k = [self._round(self.random.normal(size=(row[-1] + 1, 1, size))) for row in self.rows]
        self.v = [vectors[..., :latent_size] for vectors in self.k]
        self.num_real = sum(len(row) for row in self.rows)
        tokens = self.num_real + padding
        new = self.random.normal(size=(tokens, size))
        new[: self.num_real] = self.new_of([vectors[:, 0] for vectors in self.k], new[: self.num_real])
        self.new = torch.from_numpy(new).to(self.dtype).to(self.device)
        queries = self.random.normal(size=(tokens, form.group_size, size))
        self.q = torch.from_numpy(queries).to(self.dtype).to(self.device)
        sizes = [latent_size, form.rope_size]
        parts = [*torch.split(self.q, sizes, dim=-1), *torch.split(self.new, sizes, dim=-1)]
        self.q_latent, self.q_rope, self.latent, self.rope_key = (
            part if strided else part.contiguous() for part in parts
        )

    def _take_share(self, rank: int, ranks: int) -> None:
        super()._take_share(rank, ranks)
        self.v = [vectors[..., : self.form.head_size - self.form.rope_size] for vectors in self.k]

    def _spoil_token(self, token: int, value: float, values_alone: bool) -> None:
        self.latent[token] = value
        if not values_alone:
            self.rope_key[token] = self.q_latent[token] = self.q_rope[token] = value

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the step is given."""
        return self.q_latent, self.q_rope, self.latent, self.rope_key

    def write_history(self, body: Any) -> Any:
        """The layer's cache, with all that earlier steps left in it; this step's own places hold NaN."""
        cache = body.cache(self.need, self.group, self.pages)
        parts = [x[:, 0].copy() for x in self.k]
        for part, own in zip(parts, self.own, strict=True):
            part[own] = np.nan
        vectors = torch.from_numpy(np.concatenate(parts)).to(self.dtype).to(self.device)
        sizes = [self.form.head_size - self.form.rope_size, self.form.rope_size]
        latent, rope_key = torch.split(vectors, sizes, dim=-1)
        body.write(self.layer, latent, rope_key, cache, body.plan(self.history, self.group))
        return cache

    def stored(self) -> Sequence[Sequence[np.ndarray]]:
        """Latents, and rotated keys."""
        size = self.form.head_size - self.form.rope_size
        return [x[:, 0, :size] for x in self.k], [x[:, 0, size:] for x in self.k]

    def launch(self, body: Any, cache: Any, plan: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """This step's `write` and `forward`."""
        body.write(self.layer, self.latent, self.rope_key, cache, plan)
        body.forward(self.layer, self.q_latent, self.q_rope, cache, plan, out, lse)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Room for `forward`: all NaN, so that what is not written shows."""
        out = torch.full(self.q_latent.shape, torch.nan, dtype=self.dtype, device=self.device)
        return out, self.room_for_lse()

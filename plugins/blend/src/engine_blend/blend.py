"""What a worker does with reused tokens: the worker's half of `cacheblend`.

In a step whose plan says that some of its tokens are cached elsewhere:

- up to the check layer all tokens are computed;
- behind it each reused token's new key is compared with the cached one, which is rotated from the position at which it
  was computed to the one at which it stands now. Of each row the `ratio` of its reused tokens that deviate most goes
  on, and with them every token that is not reused, and the row's last one;
- before each later layer the cached keys (rotated) and values of the others are put into the request's own pages. Those
  that go on compute theirs, and see all keys up to their own: `kv_index` says so for each of them alone.

Several ranks add their deviations up, so that all of them choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from engine.interfaces.step import LayerListener, StepPart, StepView
from engine.modeling import Rotary
from engine.types.errors import UnsupportedModelError

if TYPE_CHECKING:
    from engine.interfaces.evictor import ReuseContext
    from engine.types.plan import StepPlan
    from engine_blend.card import CacheBlendOptions


class Reused(NamedTuple):
    """m reused tokens on the device, int64 [m] each: the slots that have them and that get them, their positions."""

    source: torch.Tensor
    destination: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor

    def some(self, places: torch.Tensor) -> Reused:
        """These of them."""
        return Reused(*(column[places] for column in self))


class Blend(StepPart, LayerListener):
    """Its own listener. Raises UnsupportedModelError for a model whose keys cannot be rotated on exactly."""

    def __init__(self, context: ReuseContext) -> None:
        options: CacheBlendOptions = context.options
        self._ratio = options.ratio
        self._check = options.check_layer
        self._ranks = context.ranks
        self._device = context.device
        self._dtype = context.dtype
        model = context.start.model
        self._sites: list[list[int]] = [[] for _ in range(model.num_layers)]
        for site, spec in enumerate(model.sites):
            assert spec.layer is not None
            self._sites[spec.layer].append(site)
        self._latent = frozenset(site for site, spec in enumerate(model.sites) if spec.kind == "mla")
        self._tables = _tables(context.model, model.architecture, model.num_layers)
        self._reused: Reused | None = None

    def listeners(self) -> Sequence[LayerListener]:
        return (self,)

    def hears(self, plan: StepPlan) -> bool:
        if (reuse := plan.reuse) is None:
            return False
        new = plan.num_computed[reuse.row] + reuse.place
        columns = np.stack([reuse.source, reuse.destination, reuse.position, new]).astype(np.int64)
        self._reused = Reused(*torch.from_numpy(columns).to(self._device))
        return True

    def before(self, layer: int, view: StepView) -> None:
        """Those that were left out get what was cached of them."""
        if layer <= self._check or self._reused is None:
            return
        for site in self._sites[layer]:
            view.write(site, self._reused.destination, *self._rotated(view, layer, site, self._reused))

    def after(self, layer: int, view: StepView) -> None:
        """Choose who goes on."""
        if layer != self._check:
            return
        assert self._reused is not None and view.plan.reuse is not None
        plan, reuse = view.plan, view.plan.reuse
        token = (np.cumsum(plan.num_tokens) - plan.num_tokens)[reuse.row] + reuse.place
        kept = self._kept(plan, token, self._deviation(view, layer, self._reused))
        if kept.all():
            self._reused = None
            return
        self._reused = self._reused.some(torch.from_numpy(np.flatnonzero(~kept[token])).to(self._device))
        view.select(torch.from_numpy(np.flatnonzero(kept)).to(self._device))

    def _deviation(self, view: StepView, layer: int, reused: Reused) -> np.ndarray:
        """Of each reused token the sum of (new key - cached key)^2, over all ranks: float [m]. In float32 at least."""
        total = torch.zeros(len(reused.source), dtype=_sums(self._dtype), device=self._device)
        for site in self._sites[layer]:
            cached = self._rotated(view, layer, site, reused)[site in self._latent]
            computed = view.read(site, reused.destination)[site in self._latent]
            total += (computed.to(total.dtype) - cached.to(total.dtype)).square().flatten(1).sum(1)
        if self._ranks is not None:
            total = self._ranks.all_reduce(total)
        return np.nan_to_num(total.cpu().numpy(), nan=np.inf)

    def _kept(self, plan: StepPlan, token: np.ndarray, deviation: np.ndarray) -> np.ndarray:
        """Which of the step's tokens go on, bool [T]. token: int [m]; its places of the reused ones."""
        assert plan.reuse is not None
        kept = np.ones(plan.total_tokens, bool)
        kept[token] = False
        for row in np.unique(plan.reuse.row).tolist():
            mine = np.flatnonzero(plan.reuse.row == row)
            most = mine[np.argsort(-deviation[mine], kind="stable")]
            kept[token[most[: round(self._ratio * mine.size)]]] = True
        kept[np.cumsum(plan.num_tokens) - 1] = True
        return kept

    def _rotated(self, view: StepView, layer: int, site: int, reused: Reused) -> tuple[torch.Tensor, ...]:
        """What the layer has cached of these tokens, as it would be at their new positions."""
        kept = list(view.read(site, reused.source))
        key = int(site in self._latent)  # of a latent vector the second part is rotated
        # What codes of 8 bits stand for is read in float32, and rounded once: when it is written
        dtype = torch.float32 if kept[key].dtype == torch.float32 else self._dtype
        kept[key] = rotate(kept[key], self._tables[layer], reused.old, reused.new)
        return tuple(tensor.to(dtype) for tensor in kept)


def rotate(keys: torch.Tensor, table: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Keys that were rotated to positions `old`, as if they had been to `new`.

    By the model's own rows of cosines and sines, whatever scaling they have: K' = T[new] T[old]^-1 K, with a row of the
    table taken for complex numbers, whose absolute value is the scaling's factor for attention.

    Args:
        keys: [m, ..., D]; the first rotary_dim elements are rotated in two halves (`engine.interfaces.ops.Ops.rope`).
        table: [positions, rotary_dim]; cosines, then sines. old, new: int64 [m].

    Returns float64 for float64 keys, else float32.
    """
    dtype = _sums(keys.dtype)
    (cos, sin), (cos_new, sin_new) = (table[at].to(dtype).chunk(2, dim=-1) for at in (old, new))
    size = cos.square() + sin.square()
    shape = (len(keys), *[1] * (keys.dim() - 2), -1)
    real = ((cos_new * cos + sin_new * sin) / size).view(shape)
    imaginary = ((sin_new * cos - cos_new * sin) / size).view(shape)
    half = table.shape[1] // 2
    first, second, rest = keys.to(dtype).split((half, half, keys.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * real - second * imaginary, second * real + first * imaginary, rest), dim=-1)


def _sums(dtype: torch.dtype | None) -> torch.dtype:
    """In what is computed with numbers of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tables(model: Any, architecture: str, num_layers: int) -> list[torch.Tensor]:
    """Each layer's cosines and sines, by which keys are rotated: as a function of the position alone."""
    layers = list(getattr(model, "layers", ()))
    tables = [{id(rotary.cos_sin): rotary.cos_sin for rotary in _rotaries(layer)} for layer in layers]
    if len(tables) != num_layers or any(len(found) != 1 for found in tables):
        raise UnsupportedModelError(
            f"blend cached chunks of {architecture}",
            "its layers do not each have one table of rotary positions (engine.modeling.Rotary), by which keys could "
            "be rotated to another position exactly",
            "name another evictor",
        )
    return [next(iter(found.values())) for found in tables]


def _rotaries(part: Any, depth: int = 4) -> Iterator[Rotary]:
    """Those of a layer and its parts."""
    if isinstance(part, Rotary):
        yield part
    elif depth and not isinstance(part, torch.Tensor):
        for inner in vars(part).values() if hasattr(part, "__dict__") else ():
            yield from _rotaries(inner, depth - 1)

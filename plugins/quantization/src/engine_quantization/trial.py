"""Products beside the weights that codes stand for: what a library computes is looked at before it serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine_kit.by_expert import Compute, by_expert
from engine_kit.libraries import first_line
from engine_quantization.readers import Codes

ROWS = (1, 17, 130)
"""A decode, rows that fill no tile, and more than one tile."""
TOKENS = 33
"""Of the trial of experts."""
NEAR = 2.0**-6
"""Of the largest number of a row's result: bfloat16 loses 2**-9 of it, and its scales as much; a neighbour's scale, or
a nibble of another place, is several times as far off."""
PIECE = 1 << 24
"""Weights that are widened at once."""
OTHER = "name another driver, e.g. --quantization stored-triton, and report this with the library's version"
OTHER_EXPERTS = OTHER.replace("stored-triton", "expert=stored-triton")


def widened(codes: Codes, rows: slice) -> torch.Tensor:
    """Some outputs' weights [O, I], float32."""
    part = codes.codes[rows]
    group_of = codes.group_of
    if group_of is None:
        group_of = torch.arange(part.shape[1], device=part.device) // codes.group_size
    numbers = part.float() if codes.values is None else codes.values.to(part.device)[part.long()]
    if codes.zeros is not None:
        numbers = numbers - codes.zeros[rows].float()[:, group_of]
    return numbers * codes.scales[rows].float()[:, group_of]


def product(x: torch.Tensor, codes: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, I] -> [T, O] float32, by widened weights, some outputs at a time."""
    outputs, inputs = codes.codes.shape
    step = max(1, PIECE // max(1, inputs))
    wide = x.float()
    out = torch.cat([wide @ widened(codes, slice(at, at + step)).T for at in range(0, outputs, step)], dim=1)
    return out if bias is None else out + bias.float()


def hold_to(
    layer: LayerShape,
    codes: Codes,
    bias: torch.Tensor | None,
    linear: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    library: str,
) -> None:
    """Compare `linear`, [T, I] -> [T, O], with products by widened weights, in float32.

    Rows are numbers of e4m3, the largest in each 128 inputs being its largest times a power of two: whoever rounds rows
    to it keeps them. They are no larger than what sums of float16 hold.

    Raises ConfigError where the library fails, or computes another thing.
    """
    outputs, inputs = codes.codes.shape
    random = torch.Generator(codes.codes.device).manual_seed(0)
    x = torch.randn(max(ROWS), inputs, generator=random, device=codes.codes.device).mul_(120).clamp_(-448, 448)
    x[:, ::128] = 448
    x = x.to(torch.float8_e4m3fn).float() / 64
    expected = product(x, codes, bias)
    asked = f"multiply with {', '.join(layer.names)} by {library}"
    for rows in ROWS:
        compute = partial(linear, x[:rows].to(dtype))
        _compare(compute, expected[:rows], NEAR, asked, f"{rows} x {inputs} x {outputs}", OTHER)


class ExpertsTrial:
    """Tokens that two experts each compute, one expert after another, which `hold` compares with all of a layer in one
    call.

    Args:
        count: experts. inputs: of the first projection.
        one: what an expert makes of its rows, in `dtype`.
    """

    def __init__(
        self, count: int, inputs: int, one: Compute, dtype: torch.dtype, device: torch.device, library: str
    ) -> None:
        random = torch.Generator(device).manual_seed(0)
        self._x = torch.randn(TOKENS, inputs, generator=random, device=device).to(dtype)
        scores = torch.rand(TOKENS, count, generator=random, device=device)
        self._ids = scores.topk(min(2, count)).indices.int()
        self._weights = torch.ones(self._ids.shape, device=device)
        self._expected = by_expert(self._x, self._ids, self._weights, count, one).float()
        self._asked = f"multiply with {count} experts by {library}"

    def hold(self, experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], near: float) -> None:
        """experts: x [T, H], ids, weights [T, k] -> [T, H]. near: of the largest number of a token's result.

        Raises ConfigError where the library fails, or computes another thing.
        """
        compute = partial(experts, self._x, self._ids, self._weights)
        sizes = " x ".join(map(str, self._x.shape))
        _compare(compute, self._expected, near, self._asked, sizes, OTHER_EXPERTS)


def _compare(
    compute: Callable[[], torch.Tensor], expected: torch.Tensor, near: float, asked: str, sizes: str, hint: str
) -> None:
    try:
        found = compute().float()
    except Exception as error:  # whatever a library raises, compilers' complaints among it
        raise ConfigError(asked, f"it says: {first_line(error)}", hint) from error
    wrong = f"it computes {sizes} wrongly"
    if found.shape != expected.shape:
        raise ConfigError(asked, f"{wrong}: the result is {list(found.shape)}, not {list(expected.shape)}", hint)
    apart = (found - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1e-30)
    if not bool((apart <= near).all()):
        raise ConfigError(asked, f"{wrong}: {float(apart.max()):.2g} of the largest number off", hint)

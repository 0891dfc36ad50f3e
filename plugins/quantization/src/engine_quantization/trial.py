"""A layer's product beside the weights that its codes stand for: what a library computes is looked at before it
serves."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine_quantization.readers import Codes

ROWS = (1, 17, 130)
"""A decode, rows that fill no tile, and more than one tile."""
NEAR = 2.0**-6
"""Of the largest number of a row's result: bfloat16 loses 2**-9 of it, and its scales as much; a neighbour's scale, or
a nibble of another place, is several times as far off."""
PIECE = 1 << 24
"""Weights that are widened at once."""


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


def hold_to(
    layer: LayerShape,
    codes: Codes,
    bias: torch.Tensor | None,
    linear: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
    library: str,
) -> None:
    """Compare `linear`, [T, I] -> [T, O], with products by widened weights, in float32.

    Rows are numbers of e4m3 whose largest in each 128 inputs is its largest: whoever rounds rows to it keeps them.

    Raises ConfigError where the library fails, or computes another thing.
    """
    outputs, inputs = codes.codes.shape
    asked = f"multiply with {', '.join(layer.names)} by {library}"
    hint = "name another driver, e.g. --quantization stored-triton, and report this with the library's version"
    device = codes.codes.device
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(max(ROWS), inputs, generator=random, device=device).mul_(120).clamp_(-448, 448)
    x[:, ::128] = 448
    x = x.to(torch.float8_e4m3fn).float()
    step = max(1, PIECE // max(1, inputs))
    parts = [x @ widened(codes, slice(start, start + step)).T for start in range(0, outputs, step)]
    expected = torch.cat(parts, dim=1) + (0 if bias is None else bias.float())
    for rows in ROWS:
        try:
            found = linear(x[:rows].to(dtype)).float()
        except Exception as error:  # whatever a library raises, compilers' complaints among it
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(asked, f"it says: {said}", hint) from error
        apart = (found - expected[:rows]).abs().amax(1) / expected[:rows].abs().amax(1).clamp(min=1e-30)
        if found.shape != expected[:rows].shape or not bool((apart <= NEAR).all()):
            wrong = f"it computes {rows} x {inputs} x {outputs} wrongly"
            raise ConfigError(asked, f"{wrong}: {float(apart.max()):.2g} of the largest number beside float32", hint)

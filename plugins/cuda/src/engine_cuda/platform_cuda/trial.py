"""What a captured step's trial finds: outputs that differ, and what could not be recorded."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from engine.types.errors import ContractError

TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4, torch.float64: 1e-9}
"""Of the largest value of an output. A library may add up in another order when it is recorded (a workspace of another
size), which a model's layers carry on; a value that was baked in changes everything, since the inputs differ in every
token and position."""
LEAST = 1e-300
"""Of what is divided by: rows of zeros are as they should be."""
OF_A_ROW = 4.0
"""Tolerances that a row may lie away, as a share of its own length. Trained weights make some tokens' rows, the first's
above all, hundreds of times as long as the others': beside those alone, anything would pass."""

_STOPPED = (
    ("during CUDA graph capture", "a copy between host and device"),
    ("legacy stream", "work on the device's default stream"),
    ("uncaptured work", "work that waits for another stream"),
    ("unjoined work", "work on another stream that nobody waited for"),
    ("when stream is capturing", "a synchronisation with the host, or memory that is allocated outside torch"),
    ("was invalidated", "a synchronisation with the host, or memory that is allocated outside torch"),
    ("CUDA generator", "random numbers of torch's own generator"),
)
"""Parts of CUDA's and torch's messages, and what was done."""
_TORCH = str(Path(torch.__file__).parent)


def compare(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], number: int) -> None:
    """Raises ContractError where a replay on this input left something else than the step. NaN equals NaN."""
    dtypes = [tensor.dtype for tensor in expected]
    tolerance = max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=0.0)
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours.shape != theirs.shape:
            raise _another(index, number, f"shape {list(ours.shape)} for {list(theirs.shape)}")
        if torch.equal(ours, theirs):
            continue
        if not theirs.is_floating_point():
            raise _another(index, number, f"{int((ours != theirs).sum())} elements differ")
        difference = (ours.double() - theirs.double()).abs().nan_to_num_(nan=0.0)
        broken = bool((ours.isnan() != theirs.isnan()).any())
        largest, scale = float(difference.max()), float(theirs.double().nan_to_num_(0.0, 0.0, 0.0).abs().max())
        if broken or largest > tolerance * scale:
            raise _another(
                index, number, "NaN" if broken else f"a difference of {largest:.3g} where all are at most {scale:.3g}"
            )
        lengths = theirs.double().nan_to_num_(0.0, 0.0, 0.0).norm(dim=-1)
        # Of a row of next to nothing beside most others, rounding may change everything.
        apart = difference.norm(dim=-1) / lengths.clamp(min=0.1 * float(lengths.median()) + LEAST)
        if theirs.dim() > 1 and theirs.shape[-1] >= 8 and float(apart.max()) > OF_A_ROW * tolerance:
            row = int(apart.flatten().argmax())
            raise _another(index, number, f"row {row} lies {float(apart.max()):.3g} of its length away")


def _another(index: int, number: int, what: str) -> ContractError:
    return ContractError(
        "capture a decode step as a CUDA graph",
        f"replayed on input {number}, its output {index} is another than when it runs ({what}): a launch has kept a "
        "value that changes from step to step",
        "start with --platform.capture never, and tell the driver's author",
        point="platform",
    )


def what_stopped(message: str) -> str:
    """What a recording cannot hold, by the error that it ended with."""
    for part, what in _STOPPED:
        if part.lower() in message.lower():
            return what
    return message.partition("\n")[0]


def culprit(error: BaseException) -> str:
    """The innermost line of an error that is neither torch's nor of the recording."""
    here = str(Path(__file__).parent)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if not code.co_filename.startswith((_TORCH, here)):
            return f"{code.co_filename}:{line} ({code.co_qualname})"
    return "an unknown line"

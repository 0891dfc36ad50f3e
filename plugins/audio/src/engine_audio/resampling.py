"""Other rates of samples, by a windowed sinc in polyphase form: a filter for each place between two samples."""

from __future__ import annotations

from math import gcd

import numpy as np

ZEROS = 32
"""Zeros of the sinc to each side."""
BETA = 8.0
"""Of Kaiser's window: what is filtered out is 80 dB below."""
PASSED = 0.94
"""Of the frequencies that the lower rate has; what is above begins to be filtered out."""


def resample(sound: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """float32 [ceil(n * wanted / rate)] of float [n]: sample i lies where i / wanted seconds are."""
    if rate == wanted or not len(sound):
        return np.asarray(sound, np.float32)
    common = gcd(rate, wanted)
    up, down = wanted // common, rate // common
    cut = PASSED * min(1.0, up / down)  # of the given samples' highest frequency
    reach = int(np.ceil(ZEROS / cut))
    offset = np.arange(-reach + 1, reach + 1)
    padded = np.pad(np.asarray(sound, np.float32), (reach - 1, reach + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach)
    result = np.empty(-(-len(sound) * up // down), np.float32)
    for place in range(min(up, len(result))):
        whole, part = divmod(place * down, up)
        distance = offset - part / up
        window = np.i0(BETA * np.sqrt(np.maximum(0, 1 - (distance / reach) ** 2))) / np.i0(BETA)
        taps = (cut * np.sinc(cut * distance) * window).astype(np.float32)
        count = len(result[place::up])
        result[place::up] = windows[whole::down][:count] @ taps
    return result

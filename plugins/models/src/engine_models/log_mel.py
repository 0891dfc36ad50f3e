"""What Whisper's encoder reads of sound (Radford et al. 2022): the logarithm of its power by bands of the mel scale.

Frames of 25 ms, one each 10 ms, windowed (Hann); their power spectra, summed by triangular filters that are even on the
mel scale of Slaney's Auditory Toolbox (1998) and of equal area; the logarithm, at most 8 decades below the largest.
"""

from __future__ import annotations

import numpy as np

from engine.types.errors import InvalidRequestError

RATE = 16_000
"""Samples a second."""
SECONDS = 30
"""Of sound that the encoder reads at once."""
FRAME, HOP = 400, 160
"""Samples of a frame, and from one to the next."""
HIGHEST = 8_000.0
"""Hz."""


def log_mel(sound: np.ndarray, bins: int = 80) -> np.ndarray:
    """float32 [3000, bins] of a sound, float [n] within -1 .. 1, at 16 kHz: the model's `encoder_prompt`. Silence is
    put behind it up to 30 seconds; what is behind these is cut off.

    bins: `num_mel_bins` of the model's config.

    Raises InvalidRequestError for what is no such sound: whole numbers, several channels, or a value that is no number.
    """
    sound = np.asarray(sound)
    if sound.ndim != 1 or sound.dtype.kind != "f":
        found = f"it is {sound.dtype} {list(sound.shape)}, not one channel of floats within -1 .. 1"
        raise InvalidRequestError("read a sound", found, "divide whole numbers by the largest, and take one channel")
    if not np.isfinite(sound).all():
        raise InvalidRequestError("read a sound", "it has values that are no numbers, or infinite", "send another")
    whole = np.zeros(SECONDS * RATE)
    whole[: len(sound)] = sound[: len(whole)]
    padded = np.pad(whole, FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP][:-1]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    logarithm = np.log10(np.maximum(power @ filters(bins), 1e-10))
    return ((np.maximum(logarithm, logarithm.max() - 8) + 4) / 4).astype(np.float32)


def filters(bins: int) -> np.ndarray:
    """float64 [FRAME / 2 + 1, bins]; each band's share of the power at each frequency."""
    edges = hertz(np.linspace(0, mel(HIGHEST), bins + 2))
    frequency = np.linspace(0, RATE / 2, FRAME // 2 + 1)[:, None]
    rising = (frequency - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - frequency) / np.diff(edges)[1:]
    shares: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])
    return shares


def mel(frequency: float) -> float:
    """Even below 1000 Hz, 15 mels; logarithmic above."""
    return 15 + 27 * float(np.log(frequency / 1000) / np.log(6.4)) if frequency >= 1000 else 3 * frequency / 200


def hertz(mels: np.ndarray) -> np.ndarray:
    """The frequencies of mels."""
    return np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))

"""Files of sound to samples: by libsndfile (wav, flac, ogg, mp3, aiff and others), and by FFmpeg, where PyAV is
installed, what comes in the containers of MP4 and Matroska (m4a, mp4, webm)."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile

from engine.types.errors import InvalidRequestError
from engine_audio.resampling import resample
from engine_models.log_mel import RATE

MOST_RATE = 192_000
"""Samples a second."""
KNOWN = "send wav, flac, ogg, mp3, or with PyAV m4a or webm"


def decode(content: bytes, max_seconds: float) -> np.ndarray:
    """float32 [n] within -1 .. 1 at 16 kHz, all channels in one.

    Raises InvalidRequestError: it is no sound, holds none, or too much.
    """
    if not content:
        raise InvalidRequestError("file=...", "it is empty", KNOWN)
    container = "mov" if content[4:8] == b"ftyp" else "matroska" if content[:4] == b"\x1a\x45\xdf\xa3" else None
    sound = _by_libsndfile(content, max_seconds) if container is None else _by_ffmpeg(content, container, max_seconds)
    if not len(sound):
        raise InvalidRequestError("file=...", "it holds no samples", "send a sound")
    if not np.isfinite(sound).all():
        raise InvalidRequestError("file=...", "its samples are not all finite numbers", KNOWN)
    return sound


def _too_long(max_seconds: float) -> InvalidRequestError:
    found = f"it is longer than {max_seconds:g} s (--hooks.audio_routes.max_seconds)"
    return InvalidRequestError("file=...", found, "send it in pieces")


def _by_libsndfile(content: bytes, max_seconds: float) -> np.ndarray:
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate = file.samplerate
            if not 0 < rate <= MOST_RATE:
                found = f"it has {rate} samples a second"
                raise InvalidRequestError("file=...", found, f"send up to {MOST_RATE}")
            parts, most, length = [], int(max_seconds * rate), 0
            # A piece at a time: a small file may hold hours of silence in many channels.
            while len(block := file.read(max(1, rate // file.channels), dtype="float32", always_2d=True)):
                parts.append(block.mean(axis=1))
                length += len(block)
                if length > most:
                    raise _too_long(max_seconds)
    except soundfile.SoundFileError as error:
        raise InvalidRequestError("file=...", f"it is no sound that libsndfile reads: {error}", KNOWN) from error
    return resample(np.concatenate(parts or [np.empty(0, np.float32)]), rate, RATE)


def _by_ffmpeg(content: bytes, container: str, max_seconds: float) -> np.ndarray:
    try:
        import av
    except ImportError as error:
        found = "m4a, mp4 and webm are read by PyAV, which is not installed here"
        remedy = "pip install engine-audio[av] where the server is, or send wav, flac, ogg or mp3"
        raise InvalidRequestError("file=...", found, remedy) from error
    parts: list[np.ndarray] = []
    length = 0
    try:
        # The container is named, or FFmpeg would also try such as name other files, and open these.
        with av.open(io.BytesIO(content), "r", format=container) as opened:
            if not opened.streams.audio:
                raise InvalidRequestError("file=...", "it has no track of sound", KNOWN)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            for frame in _and_none(opened.decode(audio=0)):
                for one in resampler.resample(frame):
                    parts.append(one.to_ndarray()[0].astype(np.float32))
                    length += len(parts[-1])
                if length > max_seconds * RATE:
                    raise _too_long(max_seconds)
    except av.error.FFmpegError as error:
        raise InvalidRequestError("file=...", f"FFmpeg does not read it: {error}", KNOWN) from error
    return np.concatenate(parts or [np.empty(0, np.float32)])


def _and_none(frames: Any) -> Any:
    """The frames, and None at their end, with which what the resampler holds back comes out."""
    yield from frames
    yield None

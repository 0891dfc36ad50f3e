"""Files of sound, and other rates."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from small_whisper import file_of, sound

from engine.types.errors import InvalidRequestError
from engine_audio.decoding import decode
from engine_audio.resampling import resample
from engine_models.log_mel import RATE


def tone(rate: int, hertz: float, seconds: float = 0.5) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 16001])
def test_a_tone_stays_the_same_tone(rate: int) -> None:
    """Within what both rates can tell; what the lower cannot is gone."""
    given, wanted = tone(rate, 440.0), tone(RATE, 440.0)
    found = resample(given, rate, RATE)
    assert len(found) == -(-len(given) * RATE // rate)
    inside = slice(400, min(len(found), len(wanted)) - 400)
    np.testing.assert_allclose(found[inside], wanted[inside], atol=2e-4)
    high = resample(tone(rate, 0.42 * min(rate, RATE)), rate, RATE)
    assert np.abs(high[400:-400]).max() > 0.95 * np.abs(found[400:-400]).max()
    if rate > 2 * 8800:
        assert np.abs(resample(tone(rate, 8800.0), rate, RATE)[400:-400]).max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "more", "close"),
    [("WAV", {}, 1e-4), ("FLAC", {}, 1e-4), ("WAV", {"subtype": "PCM_U8"}, 1e-2), ("OGG", {}, 0.2), ("MP3", {}, 0.2)],
)
def test_files(kind: str, more: dict[str, str], close: float) -> None:
    """Of two channels at 44.1 kHz: one at 16 kHz, as loud as their mean."""
    given = tone(44100, 440.0, 1.0) * 0.5
    found = decode(file_of(np.stack([given, given / 2], axis=1), 44100, kind, **more), 10.0)
    assert abs(len(found) - RATE) < 0.1 * RATE
    assert found.dtype == np.float32
    middle = found[2000:14000]
    assert abs(np.sqrt(np.mean(middle**2)) - 0.375 / np.sqrt(2)) < 0.02
    if close < 0.1:
        np.testing.assert_allclose(middle, 0.75 * 0.5 * tone(RATE, 440.0, 1.0)[2000:14000], atol=close + 1e-3)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "libopus")])
def test_containers(container: str, codec: str) -> None:
    """Those of PyAV."""
    import av

    written = io.BytesIO()
    with av.open(written, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48000)
        given = (tone(48000, 440.0, 1.0) * 0.5).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(given[None], format="fltp", layout="mono")
        frame.sample_rate = 48000
        for one in (*av.AudioResampler(stream.format, stream.layout, 48000, 960).resample(frame), None):
            file.mux(stream.encode(one))
    found = decode(written.getvalue(), 10.0)
    assert abs(len(found) - RATE) < 0.1 * RATE
    assert abs(np.sqrt(np.mean(found[2000:14000] ** 2)) - 0.5 / np.sqrt(2)) < 0.03
    with pytest.raises(InvalidRequestError, match=r"longer than 0.2 s"):
        decode(written.getvalue(), 0.2)
    with pytest.raises(InvalidRequestError, match="FFmpeg does not read it"):
        decode(written.getvalue()[:40], 10.0)


def test_containers_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequestError, match=r"pip install engine-audio\[av\]"):
        decode(b"\x00\x00\x00\x20ftypM4A ", 10.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"no sound at all, but some text", "no sound that libsndfile reads"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "no sound that libsndfile reads"),
        (file_of(sound(0.0)), "holds no samples"),
        (file_of(sound(2.5)), r"longer than 2 s"),
        (file_of(sound(0.1), 400_000), "400000 samples a second"),
        (file_of(np.full(100, np.nan, np.float32), subtype="FLOAT"), "finite"),
    ],
    ids=["empty", "text", "a list", "no samples", "too long", "too fast", "not finite"],  # files hold the time of day
)
def test_what_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        decode(content, 2.0)


def test_cut_off(content: bytes = file_of(sound(1.0), kind="FLAC")) -> None:
    """Of a file that breaks off in the middle, either what is there, or an error; never another exception."""
    for length in range(10, len(content), 997):
        try:
            assert len(decode(content[:length], 5.0)) <= RATE
        except InvalidRequestError as error:
            assert "file=" in str(error)

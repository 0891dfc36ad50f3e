"""Answers, in the forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """A piece of speech, and what was said.

    Args:
        start, end: seconds from the beginning of the sound; `seek`: where its window begins, in frames of 10 ms.
        text: as the model wrote it, with the space before it.
        tokens: timestamps among them.
        temperature: of sampling.
        avg_logprob, compression_ratio, no_speech_prob: of its window; the first and the last are 0 where they were not
            asked for.
    """

    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


def whole_text(segments: Iterable[Segment]) -> str:
    """All that was said."""
    return "".join(segment.text for segment in segments).strip()


def verbose(segments: list[Segment], task: str, language: str, duration: float) -> dict[str, Any]:
    """`verbose_json`. language: its name in English; duration: seconds."""
    return {
        "task": task,
        "language": language,
        "duration": duration,
        "text": whole_text(segments),
        "segments": [{"id": number, **vars(segment)} for number, segment in enumerate(segments)],
        "usage": usage(duration),
    }


def usage(duration: float) -> dict[str, Any]:
    """What is counted: whole seconds of sound."""
    return {"type": "duration", "seconds": -(-round(duration * 1000) // 1000)}


def srt(segments: Iterable[Segment]) -> str:
    """SubRip."""
    several = enumerate(segments, 1)
    return "".join(f"{number}\n{_cue(segment, ',')}\n" for number, segment in several)


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT."""
    return "WEBVTT\n\n" + "".join(f"{_cue(segment, '.')}\n" for segment in segments)


def _cue(segment: Segment, point: str) -> str:
    # An empty line would end the cue, and an arrow begin another.
    text = " ".join(segment.text.replace("-->", "->").split())
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{text}\n"


def _clock(seconds: float, point: str) -> str:
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{milliseconds:03}"

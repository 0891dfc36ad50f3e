"""Where a window's output is cut, beside transformers; and the forms of answers."""

from __future__ import annotations

import random

import torch
from small_whisper import FIRST
from transformers import WhisperForConditionalGeneration

from engine_audio.formats import Segment, srt, verbose, vtt
from engine_audio.segments import Cut, cut

STEPS = 1500


def outputs(seed: int) -> list[int]:
    """As the rules of timestamps let them be: the first is one, none decreases, they stand in pairs."""
    random_ = random.Random(seed)
    tokens, at = [FIRST + random_.randrange(50)], 0
    at = tokens[0]
    for _ in range(random_.randrange(1, 5)):
        tokens += [random_.randrange(200) for _ in range(random_.randrange(1, 4))]
        at = min(FIRST + STEPS, at + random_.randrange(1, 200))
        how = random_.random()
        if how < 0.7:
            tokens += [at, at]
        elif how < 0.8:
            return [*tokens, at]
    return tokens if random_.random() < 0.5 else [*tokens, 7]


def test_as_transformers() -> None:
    kinds = set()
    for seed in range(200):
        tokens = outputs(seed)
        expected, offset = WhisperForConditionalGeneration._retrieve_segment(
            seek_sequence=torch.tensor(tokens), seek_outputs=[{}], time_offset=torch.tensor([0.0], dtype=torch.float64),
            timestamp_begin=FIRST, seek_num_frames=torch.tensor([2 * STEPS]), time_precision=0.02,
            time_precision_features=0.01, input_stride=2, prev_idx=0, idx=0, return_token_timestamps=False,
            decoder_input_ids=torch.zeros(1, 3),
        )  # fmt: skip
        pieces, done = cut(tokens, FIRST, STEPS)
        assert 2 * done == int(offset), tokens
        assert len(pieces) == len(expected), tokens
        for piece, one in zip(pieces, expected, strict=True):
            assert abs(piece.end * 0.02 - float(one["end"])) < 1e-6, tokens
            assert abs(piece.start * 0.02 - float(one["start"])) < 1e-6, tokens
            # Its last piece, where more follows, also holds the timestamp with which what follows begins.
            assert piece.tokens == one["tokens"].tolist()[: len(piece.tokens)], tokens
        kinds.add((len(pieces) > 1, done == STEPS))
    assert len(kinds) >= 3


def test_odd_outputs() -> None:
    """Without any, and with a pair that ends where it begins: the window is done with."""
    assert cut([1, 2], FIRST, 100) == ([Cut(0, 100, [1, 2])], 100)
    assert cut([FIRST], FIRST, 100) == ([Cut(0, 100, [FIRST])], 100)
    assert cut([FIRST, FIRST], FIRST, 100)[1] == 100


def test_forms() -> None:
    more = {"temperature": 0.0, "avg_logprob": -0.5, "compression_ratio": 1.0, "no_speech_prob": 0.1}
    several = [
        Segment(seek=0, start=0.0, end=1.5, text=" Hello\n\nthere", tokens=[1], **more),
        Segment(seek=0, start=3661.25, end=3662.0, text=" a --> b", tokens=[2], **more),
    ]
    assert srt(several) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n\n"
    )
    assert vtt(several) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there\n\n01:01:01.250 --> 01:01:02.000\na -> b\n\n"
    )
    answer = verbose(several, "transcribe", "english", 3662.001)
    assert [one["id"] for one in answer["segments"]] == [0, 1]
    assert answer["usage"] == {"type": "duration", "seconds": 3663}

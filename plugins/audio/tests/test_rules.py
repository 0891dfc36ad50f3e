"""The logits processor beside transformers' own loop, and in the suite of its point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_whisper import EN, END, FIRST, GENERATION, NO_TIMESTAMPS, START, TRANSCRIBE, make, sound, written

from engine import LLM, SamplingParams
from engine.types.errors import InvalidRequestError
from engine_audio.card import KEY
from engine_models.log_mel import log_mel
from engine_sdk.conformance import LogitsProcessorConformance

RULES = {"suppress": GENERATION["suppress_tokens"], "begin_suppress": GENERATION["begin_suppress_tokens"]}
STAMPS = {"first_timestamp": FIRST, "end": END, "max_initial": GENERATION["max_initial_timestamp_index"]}


class TestWhisperRules(LogitsProcessorConformance):
    driver = "whisper"
    examples = (
        {"extra_args": {KEY: {"suppress": [3, 7], "begin_suppress": [9]}}},
        {"extra_args": {KEY: {"suppress": [0], "first_timestamp": 100, "end": 60, "max_initial": 4}}},
        {"extra_args": {KEY: {"begin_suppress": [255], "first_timestamp": 6, "end": 3}}},
    )


def test_as_transformers(tmp_path: Path) -> None:
    """Greedy tokens of several sounds, with and without timestamps, one after the other and all in one batch."""
    model = make(tmp_path)
    sounds = [sound(seconds, seed) for seconds, seed in ((4.0, 1), (1.0, 2), (30.0, 3))]
    asked: list[Any] = []
    params: list[SamplingParams] = []
    expected = []
    for samples in sounds:
        for stamped in (True, False):
            begin = [START, EN, TRANSCRIBE, *([] if stamped else [NO_TIMESTAMPS])]
            asked.append({"encoder_prompt": log_mel(samples), "decoder_prompt": begin})
            rules = {**RULES, **STAMPS} if stamped else RULES
            params.append(SamplingParams(temperature=0.0, max_tokens=None, extra_args={KEY: rules}))
            expected.append(written(model, samples, stamped, "transcribe"))
    assert len({tuple(ids) for ids in expected}) == len(expected)
    options: dict[str, Any] = {"dtype": "float32", "num_kv_pages": 40, "logits_processor": "whisper"}
    llm = LLM(model=str(tmp_path), max_num_seqs=8, **options)
    try:
        outputs = llm.generate(asked, params, use_tqdm=False)
        assert [[token for token in one.outputs[0].token_ids if token != END] for one in outputs] == expected
        for wrong, said in (
            ({"suppress": [10**6]}, "vocabulary ends"),
            ({"first_timestamp": FIRST}, "an end before it"),
            ({"forbid": [1]}, "unknown field"),
            ([1], "whisper=.*object"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                llm.generate(asked[:1], SamplingParams(extra_args={KEY: wrong}), use_tqdm=False)
    finally:
        llm.shutdown()

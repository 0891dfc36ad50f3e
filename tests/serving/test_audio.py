"""A server with a Whisper, and OpenAI's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI

from tests.serving.conftest import Server

sys.path.append(str(Path(__file__).parents[2] / "plugins" / "audio" / "tests"))

from small_whisper import DE, EN, END, FIRST, NO_SPEECH, START, file_of, log_mel, make, sound, written

pytestmark = pytest.mark.xdist_group("audio")
SHORT = sound(4.0)
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--served-model-name", "whisper")


class Served:
    """The server, a client of it, and the model in transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = make(folder)
        self.server = Server(
            str(folder), *FLAGS, "--logits-processors", "whisper", "--hooks.audio_routes.max_seconds", "50"
        )
        self.client = OpenAI(base_url=f"{self.server.address}/v1", api_key="none", max_retries=0)

    def create(self, samples: np.ndarray, **more: Any) -> Any:
        asked = {"model": "whisper", "temperature": 0, "language": "en", **more}
        return self.client.audio.transcriptions.create(file=("a.wav", file_of(samples)), **asked)

    def post(self, path: str = "transcriptions", **more: Any) -> httpx.Response:
        return httpx.post(f"{self.server.address}/v1/audio/{path}", timeout=60, **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("whisper"))
    yield running
    running.client.close()
    assert running.server.stop() == 0, "".join(running.server.lines)


def text_of(ids: list[int]) -> str:
    letters = sorted(_alphabet())
    return bytes(_alphabet()[letters[token]] for token in ids if token < END).decode(errors="replace")


def _alphabet() -> dict[str, int]:
    """Of byte-level tokenizers: the letter that stands for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def test_text(served: Served) -> None:
    """As transformers writes it, of a transcription and a translation, as JSON, as text, and as a stream."""
    expected = text_of(written(served.model, SHORT, False, "transcribe")).strip()
    answer = served.create(SHORT)
    assert answer.text == expected
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 4)
    assert served.create(SHORT, response_format="text") == expected + "\n"
    events = list(served.create(SHORT, stream=True))
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
    assert events[0].delta.strip() == events[1].text == expected
    translation = served.client.audio.translations.create(
        file=file_of(SHORT), model="whisper", temperature=0, extra_body={"language": "en"}
    )
    assert translation.text == text_of(written(served.model, SHORT, False, "translate")).strip()


def test_segments(served: Served) -> None:
    """All that was written is in one of them, with the times that the tokens say, and how likely it is."""
    tokens = written(served.model, SHORT, True, "transcribe")
    answer = served.create(SHORT, response_format="verbose_json", timestamp_granularities=["segment"])
    assert (answer.language, answer.duration) == ("english", 4.0)
    first = answer.segments[0]
    assert first.tokens == tokens[: len(first.tokens)]
    assert first.start == round((tokens[0] - FIRST) * 0.02, 2)
    for segment in answer.segments:
        assert segment.text == text_of(segment.tokens)
        assert segment.avg_logprob < 0 < segment.compression_ratio
    features = {"input_features": torch.from_numpy(log_mel(SHORT).T[None].copy())}
    logits = served.model(**features, decoder_input_ids=torch.tensor([[START]])).logits[0, -1].detach().double()
    assert abs(first.no_speech_prob - float(logits.softmax(0)[NO_SPEECH])) < 1e-5
    spoken = "en" if logits[EN] > logits[DE] else "de"
    found = served.post(
        files={"file": file_of(SHORT)}, data={"response_format": "verbose_json", "model": "whisper", "temperature": "0"}
    ).json()
    assert found["language"] == {"en": "english", "de": "german"}[spoken], "it found out itself"
    subtitles = served.create(SHORT, response_format="srt")
    assert subtitles.count("-->") == len(answer.segments)
    assert subtitles.startswith("1\n00:00:0")
    assert served.create(SHORT, response_format="vtt").startswith("WEBVTT\n\n00:00:0")


def test_long_sound(served: Served) -> None:
    """Longer than a window: what comes second is read where the first ended, knowing what was written."""
    answer = served.create(sound(33.0, 2), response_format="verbose_json")
    assert answer.duration == 33.0
    windows = sorted({segment.seek for segment in answer.segments})
    assert len(windows) > 1
    assert windows[0] == 0
    assert windows[-1] < 3300
    ends = [segment.end for segment in answer.segments]
    assert ends == sorted(ends)
    events = list(served.create(sound(33.0, 2), stream=True))
    assert len(events) == len(answer.segments) + 1
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == answer.text


def test_prompt(served: Served) -> None:
    """It stands before what is written; special tokens in it are none."""
    plain, prompted = served.create(SHORT), served.create(SHORT, prompt="Names: Ada, Zuse")
    assert prompted.text != plain.text
    assert served.create(SHORT, prompt="Names: <|endoftext|>Ada, Zuse").text == prompted.text


def test_what_is_refused(served: Served) -> None:
    wav = file_of(SHORT)
    for more, said, param in (
        ({"language": "tlh"}, "the model knows no 'tlh'", "language"),
        ({"response_format": "diarized_json"}, "response_format", "response_format"),
        ({"temperature": 1.5}, "temperature", "temperature"),
        ({"chunking_strategy": "auto"}, "'chunking_strategy' is not supported", "chunking_strategy"),
        ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "ask for segment", None),
        ({"timestamp_granularities": ["segment"]}, "verbose_json", "timestamp_granularities"),
        ({"response_format": "srt", "stream": True}, "srt comes whole", "stream"),
    ):
        with pytest.raises(BadRequestError, match=said) as caught:
            served.create(SHORT, **more)
        assert param is None or caught.value.param == param
    with pytest.raises(NotFoundError, match="does not exist"):
        served.create(SHORT, model="whisper-1")
    with pytest.raises(BadRequestError, match="longer than 50 s") as caught:
        served.create(np.zeros(51 * 16000, np.float32))
    assert caught.value.param == "file"
    for options, said in (
        ({"json": {"model": "whisper"}}, "file: it is missing"),
        ({"data": {"model": "whisper", "file": "a text"}}, "file: it is missing"),
        ({"files": {"file": b"no sound"}}, "no sound that libsndfile reads"),
        ({"files": {"file": b""}}, "it is empty"),
        ({"files": [("file", wav), ("file", wav)]}, "Too many files"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
        ({"files": {"file": wav}, "data": {"timeout": "nan"}}, "timeout"),
    ):
        answer = served.post(**options)
        assert (answer.status_code, said in answer.text) == (400, True), (options, answer.text)
    assert served.post(files={"file": wav}, data={"timeout": "0.000001"}).status_code == 504
    assert served.post(files={"file": b"0" * (9 * 2**20)}).status_code == 413
    document = httpx.get(f"{served.server.address}/openapi.json").json()
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert form["schema"]["required"] == ["file"] and "$defs" not in json.dumps(form)


def test_models_that_read_no_sound() -> None:
    server = Server("tiny", "--max-num-seqs", "4")
    try:
        answer = httpx.post(f"{server.address}/v1/audio/transcriptions", files={"file": file_of(SHORT)}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_without_sound")
    finally:
        assert server.stop() == 0, "".join(server.lines)


def test_without_the_rules(tmp_path: Path) -> None:
    make(tmp_path)
    server = Server(str(tmp_path), *FLAGS)
    try:
        answer = httpx.post(f"{server.address}/v1/audio/transcriptions", files={"file": file_of(SHORT)}, timeout=60)
        assert answer.status_code == 400
        assert "--logits-processors whisper" in answer.json()["error"]["message"]
    finally:
        assert server.stop() == 0, "".join(server.lines)

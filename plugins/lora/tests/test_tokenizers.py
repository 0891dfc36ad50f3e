"""Adapters with a tokenizer and a chat template of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_adapters import TOKENIZER, VOCAB, write_adapter, write_model
from test_adapted_engine import ADAPTED

from engine import LLM, SamplingParams
from engine.types.errors import InvalidRequestError
from engine.types.request import Adapter
from engine_kit.beam_search import BeamSearchParams
from engine_lora import LoRARequest

A, B = ord("A"), ord("B")
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
SAYS = [{"role": "user", "content": "AB"}]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


def write_tokenizer(folder: str, *, more: int = 0, eos: str = "<|eos|>") -> None:
    """That of the model, in which A and B have each other's ids, with so many more tokens."""
    tokenizer = json.loads((Path(TOKENIZER) / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**first, "id": 258 + i, "content": f"<|{i}|>"} for i in range(more)]
    (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((Path(TOKENIZER) / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "eos_token": eos}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    write_model(folder / "model")
    write_adapter(folder / "plain", 1)
    write_tokenizer(write_adapter(folder / "own", 1), eos="A")
    write_tokenizer(write_adapter(folder / "more", 1), more=3)
    write_tokenizer(write_adapter(folder / "beyond", 1))
    copied = Path(write_adapter(folder / "copied", 1))
    for file in Path(TOKENIZER).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder / "model"), **ADAPTED) as llm:
        yield llm


def request(folder: Path, name: str) -> Adapter:
    return LoRARequest(name, 0, folder / name)


def test_texts_are_read_and_written_by_its_own(llm: LLM, folder: Path) -> None:
    each = [None, request(folder, "plain"), request(folder, "own"), None]
    outputs = llm.generate(["AB"] * 4, PARAMS, lora_request=each, use_tqdm=False)
    ids = [list(output.prompt_token_ids or ()) for output in outputs]
    one, other = ids[0]
    assert ids == [[one, other], [one, other], [other, one], [one, other]]
    plain, own = (llm.llm_engine.frontend.inputs.tokenizer_of(by) for by in each[1:3])
    for output, tokenizer in zip(outputs, (plain, plain, own, plain), strict=True):
        found = output.outputs[0]
        assert found.text == tokenizer.decode(found.token_ids)
        assert found.logprobs is not None
        for token, position in zip(found.token_ids, found.logprobs, strict=True):
            assert position[token].decoded_token == tokenizer.token(token)
    again = llm.generate({"prompt_token_ids": ids[2]}, PARAMS, lora_request=each[1], use_tqdm=False)
    assert again[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids, "the same weights read the same ids"
    (beams,) = llm.beam_search("AB", BeamSearchParams(beam_width=2, max_tokens=3), lora_request=each[2])
    for beam in beams.sequences:
        assert beam.tokens[:2] == [other, one] and beam.text == own.decode(beam.tokens)


def test_conversations_by_its_own_template(llm: LLM, folder: Path) -> None:
    inputs = llm.llm_engine.frontend.inputs
    prompts = [inputs.render_chat(SAYS, adapter=by)["prompt"] for by in (None, request(folder, "own"))]
    assert prompts == ["user: AB\nassistant: ", "<AB>"]
    own, plain = llm.chat([SAYS] * 2, PARAMS, lora_request=[request(folder, "own"), None], use_tqdm=False)
    assert own.prompt == "<AB>" and plain.prompt == "user: AB\nassistant: "
    assert own.prompt_token_ids == inputs.tokenize("<AB>", False, request(folder, "own"))


def test_its_end_of_sequence_ends_it_too(llm: LLM, folder: Path) -> None:
    """Beside the model's."""
    inputs = llm.llm_engine.frontend.inputs
    given: dict[str, Any] = {"prompt": "x", "adapter": request(folder, "own")}
    ends = inputs.process("r", given, SamplingParams(max_tokens=4)).requests[0].eos_token_ids
    plain = inputs.process("s", "x", SamplingParams(max_tokens=4)).requests[0].eos_token_ids
    assert ends == [*plain, *inputs.tokenize("A", False, request(folder, "own"))] != plain
    given["adapter"] = request(folder, "beyond")
    (beyond,) = inputs.tokenizer_of(given["adapter"]).eos_token_ids
    ends = inputs.process("t", given, SamplingParams(max_tokens=4)).requests[0].eos_token_ids
    assert beyond >= VOCAB and ends == plain, "what the model cannot draw is none"


def test_a_token_that_ends_its_sequences(llm: LLM, folder: Path) -> None:
    """The first that it draws is called its end of sequence: of one prompt beside others, and of beams."""
    own, given = request(folder, "own"), {"prompt_token_ids": [5, 9, 17]}
    params = SamplingParams(max_tokens=3, temperature=0.0)
    (plain,) = llm.generate(given, params, lora_request=own, use_tqdm=False)
    drawn = plain.outputs[0].token_ids[0]
    names = json.loads((folder / "own" / "tokenizer.json").read_text())["model"]["vocab"]
    write_tokenizer(write_adapter(folder / "ends", 1), eos=next(name for name, i in names.items() if i == drawn))
    each = [own, request(folder, "ends")]
    other, ended = llm.generate([given] * 2, params, lora_request=each, use_tqdm=False)
    assert ended.outputs[0].finish_reason == "stop" and len(ended.outputs[0].token_ids) == 1
    assert other.outputs[0].finish_reason == "length"
    beams = BeamSearchParams(beam_width=2, max_tokens=1)
    other_beams, ended_beams = llm.beam_search([given] * 2, beams, lora_request=each)
    assert [beam.finish_reason for beam in ended_beams.sequences] == ["stop", "length"]
    assert [beam.finish_reason for beam in other_beams.sequences] == ["length", "length"]


def test_words_are_forbidden_by_its_own(llm: LLM, folder: Path) -> None:
    inputs = llm.llm_engine.frontend.inputs
    params = SamplingParams(max_tokens=4, bad_words=["A"])
    found = [
        inputs.process(str(by), {"prompt": "x", **by}, params).requests[0].params.bad_words_token_ids
        for by in ({}, {"adapter": request(folder, "own")})
    ]
    own = inputs.tokenizer_of(request(folder, "own"))
    assert found[0] != found[1] and own.encode("A", add_special_tokens=False) in found[1]


def test_copies_of_the_models_are_not_read_again(llm: LLM, folder: Path) -> None:
    inputs = llm.llm_engine.frontend.inputs
    for name in ("copied", "plain"):
        assert inputs.tokenizer_of(request(folder, name)) is inputs.tokenizer
    own = request(folder, "own")
    assert inputs.tokenizer_of(own) is inputs.tokenizer_of(own) is not inputs.tokenizer


def test_tokens_that_the_model_has_no_place_for(llm: LLM, folder: Path) -> None:
    found = "its ids go to 260, and those of the model and its tokenizer to 257"
    with pytest.raises(InvalidRequestError, match=found):
        llm.generate("AB", PARAMS, lora_request=request(folder, "more"), use_tqdm=False)


def test_another_tokenizer_is_another_revision(folder: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", 1)
    before = LoRARequest("a", 0, path)
    write_tokenizer(path)
    assert LoRARequest("a", 0, path).revision != before.revision

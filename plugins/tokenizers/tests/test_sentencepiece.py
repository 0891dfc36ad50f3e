"""Tokenizer `sentencepiece` beside the library itself and transformers' own class."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_tokenizers import TEMPLATE, train, write_config, write_model, write_tekken

from engine.interfaces.tokenizer import TokenizerNeed
from engine.plugin import Registry, choose, points
from engine.types.errors import TokenizerError
from engine.types.request import Adapter
from engine_kit.adapter_tokenizers import AdapterTokenizers
from engine_tokenizers.cards import MistralTokenizerCard, SentencePieceCard
from engine_tokenizers.files import NO_PREFIX, mistral_file, normalizer_of
from engine_tokenizers.sentencepiece_model import SentencePieceBody

FORMS: dict[str, dict[str, Any]] = {
    "bpe": {},
    "unigram": {"kind": "unigram"},
    "without a blank before it": {"add_dummy_prefix": False},
    "normalised": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False},
}
_TEXT = st.text(st.one_of(st.sampled_from("Hello wrd,.  \n"), st.characters(exclude_categories=["Cs"])), max_size=30)


def opened(folder: Path | str) -> SentencePieceBody:
    return SentencePieceBody(SimpleNamespace(folder=str(folder)))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=list(FORMS))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SentencePieceBody, Any]:
    """The driver and the library, over one model."""
    folder = write_model(tmp_path_factory.mktemp("model"), **FORMS[request.param])
    return opened(folder), sentencepiece.SentencePieceProcessor(model_file=f"{folder}/tokenizer.model")


@given(text=_TEXT)
@settings(max_examples=60, deadline=None)
def test_ids_and_text_are_the_librarys(both: tuple[SentencePieceBody, Any], text: str) -> None:
    ours, theirs = both
    assume(not any(token in text for token in ours.table.special))
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.encode(text) == [theirs.bos_id(), *ids]
    if theirs.unk_id() not in ids:
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.longest_token is None or len(text) <= ours.longest_token * len(ids)


def test_what_a_model_does_first() -> None:
    assert normalizer_of(train()) == ("identity", True, False)
    assert normalizer_of(train(add_dummy_prefix=False)) == ("identity", False, False)
    assert normalizer_of(train() + NO_PREFIX) == ("identity", False, False)
    found = normalizer_of(train(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True))
    assert found == ("nmt_nfkc", True, True) and not found.keeps
    for broken in (train()[:-3], b"\xff\xff", b"\x0b"):
        with pytest.raises(ValueError, match="it "):
            normalizer_of(broken)


@pytest.mark.slow
def test_special_tokens_as_transformers_reads_them(tmp_path: Path) -> None:
    """A blank is put before the beginning alone."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = write_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = transformers.LlamaTokenizer.from_pretrained(folder), opened(folder)
    for text in ("Hello</s>world", "Hello </s> world", "</s>Hello", "<s><s>Hello, world!</s>"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_what_stands_beside_the_model(tmp_path: Path) -> None:
    size = sentencepiece.SentencePieceProcessor(model_file=write_model(tmp_path) + "/tokenizer.model").get_piece_size()
    added = {size: {"content": "<|im_end|>", "special": True}, size + 2: {"content": "<tool>", "special": False}}
    write_config(
        tmp_path, added_tokens_decoder=added, add_bos_token=False, add_eos_token=True, eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    )  # fmt: skip
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<more>": size + 3, "<tool>": size + 2}))
    ours = opened(tmp_path)
    assert ours.vocab_size == size + 4 and ours.eos_token_ids == (size,)
    ids = ours.encode("Hello<tool>Hello<more><|im_end|>")
    assert [i for i in ids if i >= size] == [size + 2, size + 3, size, size] and ids[0] != 1
    assert ours.decode(ids) == "Hello<tool>Hello<more>" and ours.vocabulary()[size + 1] is None
    assert ours.token(size + 1) == "" and ours.decode([size + 1, *ids]) == ours.decode(ids)
    assert ours.render_chat([{"role": "user", "content": "Hi"}]) == "<s>[user] Hi<|im_end|>"
    assert SentencePieceCard.chat_template(str(tmp_path), True) == TEMPLATE


def test_broken_models(tmp_path: Path) -> None:
    for content in (b"", b"\x00", train()[:400], b"no model"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("beside", "config", "found"),
    [
        ({"x": 10**10}, {}, "is 10000000000, not a number"),
        ({"x": -1}, {}, "is -1, not a number"),
        ({"x": "a"}, {}, "is 'a', not a number"),
        ({"": 400}, {}, "a token is empty"),
        ({}, {"a": "x"}, "is 'a', not a number"),
        ({}, {"9" * 5000: "x"}, "not a number"),
        ({}, {"400": {"content": "<mask>", "lstrip": True}}, "'<mask>' sets lstrip"),
        ({}, {"400": {"content": "<mask>", "single_word": True}}, "'<mask>' sets single_word"),
    ],
    ids=["too large", "negative", "a text", "empty", "a text of the config", "long", "lstrip", "single_word"],
)
def test_added_tokens_that_are_refused(tmp_path: Path, beside: Any, config: Any, found: str) -> None:
    write_model(tmp_path)
    write_config(tmp_path, added_tokens_decoder=config)
    (tmp_path / "added_tokens.json").write_text(json.dumps(beside))
    with pytest.raises(TokenizerError, match=found):
        opened(tmp_path)


def test_who_reads_a_folder(tmp_path: Path) -> None:
    """Each file has one reader, and tokenizer.json goes first, unless somebody is named."""
    registry = Registry.discover()

    def reader(folder: Path, asked: str | None = None) -> str:
        return choose(registry, points.TOKENIZER, {"": TokenizerNeed(folder=str(folder))}, asked)[0].candidate.name

    plain, mistral, tekken = tmp_path / "plain", tmp_path / "mistral", tmp_path / "tekken"
    write_model(plain)
    assert reader(plain) == "sentencepiece"
    write_model(mistral)
    write_model(mistral, "tokenizer.model.v1")
    write_model(mistral, "tokenizer.model.v11")
    assert reader(mistral) == "mistral" and MistralTokenizerCard.chat_template(str(mistral), True).count("version 11")
    write_tekken(tekken)
    assert reader(tekken) == "mistral"
    for folder in (plain, tekken):
        (folder / "tokenizer.json").write_text("{}")
        assert reader(folder) == "hf"
    assert (reader(plain, "sentencepiece"), reader(tekken, "mistral")) == ("sentencepiece", "mistral")


def test_the_highest_version_of_tekken(tmp_path: Path) -> None:
    """By what is written in it; what is only called like it counts for nothing."""
    for name, version in (("tekken_240911.json", "v7"), ("tekken_240718.json", "v11"), ("tekken.json", "v3")):
        write_tekken(tmp_path, version)
        (tmp_path / "tekken.json").rename(tmp_path / name)
    (tmp_path / "tekken_notes.json").write_text("[]")
    found = mistral_file(tmp_path)
    assert found is not None and (found.path.name, found.version) == ("tekken_240718.json", 11)


def test_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(folder: Path) -> list[str]:
        need = TokenizerNeed(folder=str(folder))
        return [*SentencePieceCard.unsupported(need), *MistralTokenizerCard.unsupported(need)]

    model, tekken, broken = tmp_path / "model", tmp_path / "tekken", tmp_path / "broken"
    write_model(model)
    write_tekken(tekken)
    broken.mkdir()
    (broken / "tekken.json").write_text('{"config": {"version": "new"}}')
    assert any("call it tokenizer.model.v1" in reason for reason in reasons(model))
    assert any("no file of tekken" in reason for reason in reasons(broken))
    assert len(reasons(tmp_path / "nowhere")) == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert any("pip install sentencepiece" in reason for reason in reasons(model))
    assert any("pip install mistral-common" in reason for reason in reasons(tekken))
    assert not any("sentencepiece is not" in reason for reason in MistralTokenizerCard.unsupported(_need(tekken)))
    write_model(tekken / "old", "tokenizer.model.v3")
    assert len(MistralTokenizerCard.unsupported(_need(tekken / "old"))) == 2


def test_adapters_with_another_model(tmp_path: Path) -> None:
    """Only the file of sentencepiece differs, or what is added: which is no copy of the model's, nor the same twice."""
    own, copied, other, more = (tmp_path / name for name in ("own", "copied", "other", "more"))
    for folder in (own, copied, more):
        write_model(folder)
    write_model(other, kind="unigram")
    (more / "added_tokens.json").write_text('{"<more>": 400}')
    plan: Any = SimpleNamespace(start=SimpleNamespace(tokenizer_folder=str(own)), model=SimpleNamespace(vocab_size=500))
    models = opened(own)
    of_adapters = AdapterTokenizers(SentencePieceCard, opened, models, plan)

    def found(folder: Path) -> SentencePieceBody:
        adapter = Adapter(name=folder.name, path=str(folder), revision="1")
        made = of_adapters(adapter)
        assert isinstance(made, SentencePieceBody) and made is of_adapters(adapter)
        return made

    assert found(copied) is models
    assert len({id(made) for made in (models, found(other), found(more))}) == 3
    assert found(other).vocabulary() != models.vocabulary() and found(more).own("<more>") == [400]


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "own")
    adapter = Adapter(name="a", path=write_model(tmp_path / "a", kind="unigram"), revision="1")
    plan: Any = SimpleNamespace(
        start=SimpleNamespace(tokenizer_folder=str(tmp_path / "own")), model=SimpleNamespace(vocab_size=500)
    )

    def build(folder: str) -> SentencePieceBody:
        made = opened(folder)
        (tmp_path / "a" / "added_tokens.json").write_text('{"<more>": 400}')
        return made

    of_adapters = AdapterTokenizers(SentencePieceCard, build, opened(tmp_path / "own"), plan)
    with pytest.raises(TokenizerError, match="were changed while they were read"):
        of_adapters(adapter)
    made = of_adapters(adapter)
    assert isinstance(made, SentencePieceBody) and made.own("<more>") == [400]


def _need(folder: Path) -> TokenizerNeed:
    return TokenizerNeed(folder=str(folder))

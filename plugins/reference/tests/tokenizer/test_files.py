"""What the tokenizer's files say: special tokens, added tokens, BOS and EOS; and files that are missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import AddedToken

from engine.interfaces.context import FrontContext
from engine.interfaces.tokenizer import TokenizerNeed
from engine.types.errors import TokenizerError
from engine_reference.tokenizer_hf.card import HFTokenizer
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody

TEXTS = ["Hello, world!", "", " a", "<|eos|>x", "Grüße 你好 <tool call> \n"]


def make_body(folder: Path) -> HFTokenizerBody:
    return HFTokenizerBody(FrontContext(folder=str(folder), files=None, model=None))  # type: ignore[arg-type]


def same_as_transformers(folder: Path) -> HFTokenizerBody:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    body = make_body(folder)
    for text in TEXTS:
        for special in (True, False):
            assert body.encode(text, special) == oracle(text, add_special_tokens=special)["input_ids"]
        ids = body.encode(text)
        for skip in (True, False):
            assert body.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert body.eos_token_ids == (() if oracle.eos_token_id is None else (oracle.eos_token_id,))
    return body


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": "<|eos|>", "bos_token": "<|bos|>"},
        {"eos_token": {"content": "<|eos|>", "special": True, "__type": "AddedToken"}},
        {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "add_bos_token": False},
        {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "add_bos_token": True, "add_eos_token": True},
        {"eos_token": "<|eos|>", "bos_token": "<|bos|>", "add_eos_token": True},
        {"eos_token": "<tool call>"},  # given a role, it becomes special
        {"additional_special_tokens": ["<tool call>"]},  # tokenizer.json says that it is not special, and is believed
        {
            "added_tokens_decoder": {
                "397": {"content": "<extra>", "special": True, "normalized": False, "lstrip": True, "rstrip": False}
            }
        },
    ],
    ids=str,
)
def test_parity(builders: ModuleType, tmp_path: Path, config: dict[str, Any]) -> None:
    tokenizer = builders.byte_level()
    assert tokenizer.get_vocab_size() == 397
    same_as_transformers(builders.save(tokenizer, tmp_path, **config))


def test_family_parity(builders: ModuleType, tmp_path: Path) -> None:
    for index, tokenizer in enumerate([builders.llama2(), builders.metaspace("always"), builders.wordpiece()]):
        body = same_as_transformers(builders.save(tokenizer, tmp_path / str(index), clean_up_tokenization_spaces=False))
        assert body.vocab_size == tokenizer.get_vocab_size()


def test_special_tokens_map_fills_in(builders: ModuleType, tmp_path: Path) -> None:
    builders.save(builders.byte_level(), tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|eos|>"}}))
    assert make_body(tmp_path).eos_token_ids == (1,)


def test_truncation_and_padding_of_the_file_do_not_count(builders: ModuleType, tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10)
    body = make_body(builders.save(tokenizer, tmp_path))
    assert body.decode(body.encode("Hello there")) == "Hello there"
    assert len(body.encode("a", False)) == 1


def test_a_token_that_cannot_get_its_id(builders: ModuleType, tmp_path: Path) -> None:
    builders.save(builders.byte_level(), tmp_path, added_tokens_decoder={"999": {"content": "<far>"}})
    with pytest.raises(TokenizerError, match=r"'<far>' as id 999.*next free id .* is 397"):
        make_body(tmp_path)


def test_model_token_that_is_added_with_holes(builders: ModuleType, tmp_path: Path) -> None:
    tokenizer = builders.byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>")])
    assert make_body(builders.save(tokenizer, tmp_path)).vocab_size == 398


def test_missing_and_broken(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; the folder holds tokenizer\.model"):
        make_body(tmp_path)
    with pytest.raises(TokenizerError, match="no such folder"):
        make_body(tmp_path / "absent")
    (reason,) = HFTokenizer.unsupported(TokenizerNeed(folder=str(tmp_path)))
    assert "no tokenizer.json (it holds tokenizer.model)" in reason
    assert HFTokenizer.unsupported(TokenizerNeed(folder=str(tmp_path / "absent")))
    for broken in ('{"a": ', "{}", '{"model": {"type": "BPE", "vocab": 3}}', "[]"):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
            make_body(tmp_path)
    assert HFTokenizer.unsupported(TokenizerNeed(folder=str(tmp_path))) == []


def test_broken_config(builders: ModuleType, tmp_path: Path) -> None:
    builders.save(builders.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json.*no JSON object"):
        make_body(tmp_path)

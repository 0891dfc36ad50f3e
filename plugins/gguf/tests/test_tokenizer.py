"""Vocabularies of files, beside the tokenizers that transformers makes of the same ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from engine.interfaces.tokenizer import TokenizerNeed
from engine.types.errors import TokenizerError
from engine_gguf.tokenizer import GGUFTokenizerBody
from engine_gguf.tokenizer_card import GGUFTokenizer
from engine_gguf.vocabulary import MARK

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 1,234,567 o'clock and we'll see.",
    "def main(argv):\n    return [x ** 2 for x in range(10)]\n\n\n# done",
    "Grüße aus Köln, naïve café. ÉCOLE française, Straße HTTPServer camelCase",
    "你好，世界。 こんにちは 안녕하세요 привет мир",
    "    four blanks\t\ttabs  \n\n lines",
] * 4
TEXTS = [
    *CORPUS[:5], "a", "", " ", "  two", "x\n\n  y", "I'm SHE'LL don't", "2024-11-28 3.14159 1000000",
    "😀👨‍👩‍👧 🇩🇪", "hello<|end|>world<tag>ok",
    "/usr/bin/env\r\n", "\u0301combining e\u0301", "ﬁ ligature",
]  # fmt: skip
BYTE_LEVEL = ("llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2")


@cache
def byte_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a small byte-level BPE, with a control token and one of users behind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _vocabulary(tokenizer)


@cache
def sentence_vocabulary(gemma: bool = False) -> tuple[list[str], list[str], list[float], list[int]]:
    """(tokens, merges, scores, types) of a small sentencepiece, whose scores tell the order of merges."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.decoder = decoders.Replace(MARK, " ")
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    tokenizer.train_from_iterator([f" {text}" for text in CORPUS], trainer)
    tokens, merges = _vocabulary(tokenizer)
    made = {a + b: place for place, (a, b) in enumerate(merge.split(" ", 1) for merge in merges)}
    start = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    runs = ["  ", "   "] if gemma else []
    ordered = [token for token in tokens if token not in made] if not gemma else []
    words = ordered + sorted(made, key=made.__getitem__)
    if gemma:  # merges go by the places of tokens: single characters stand behind
        words = [token for token in words if set(token) != {MARK}] + [token for token in tokens if token not in made]
    whole = [*start, *runs, *words, "<tag>", "<|end|>"]
    scores = [0.0] * 259 + [0.0] * len(runs) + [-float(made.get(token, -1)) - 1 for token in words] + [0.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [4] * len(runs) + [1] * len(words) + [4, 3]
    return whole, merges, scores, types


def _vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    import json

    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def save(path: Path, architecture: str = "llama", **keys: Any) -> Path:
    """A file with a vocabulary alone."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, value in keys.items():
        key = f"tokenizer.{name}" if name.startswith("chat") else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def opened(path: Path) -> GGUFTokenizerBody:
    return GGUFTokenizerBody(SimpleNamespace(folder=str(path)))  # type: ignore[arg-type]


def byte_level(path: Path, pre: str, **more: Any) -> tuple[Path, dict[str, Any]]:
    tokens, merges = byte_vocabulary()
    tokens = [*tokens, "<tag>", "<|end|>"]
    types = [1] * (len(tokens) - 2) + [4, 3]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    theirs = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
    }
    return save(path, eos_token_id=len(tokens) - 1, **keys, **more), theirs


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_byte_level(pre: str, tmp_path: Path) -> None:
    path, theirs = byte_level(tmp_path / "x.gguf", pre, bos_token_id=0, add_bos_token=False)
    ours, oracle = opened(path), convert_gguf_tokenizer("llama", theirs)[0]
    for text in TEXTS:
        ids = ours.encode(text)
        plain = pre == "qwen2" and "\u0301" in text  # composed, as Qwen's own tokenizer.json does
        if not plain:
            assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert plain or ours.decode(ids, skip_special_tokens=False) == text
    assert ours.eos_token_ids == (len(byte_vocabulary()[0]) + 1,)
    assert ours.decode(ours.encode("a<|end|>b<tag>")) == "ab<tag>"


def test_whole_pieces_first(tmp_path: Path) -> None:
    """Llama 3's and Mistral's: a piece that is a token is that token, whatever merges there are."""
    tokens, _ = byte_vocabulary()
    keys = {"model": "gpt2", "tokens": [*tokens, "whole"], "token_type": [1] * (len(tokens) + 1), "merges": []}
    assert opened(save(tmp_path / "a.gguf", pre="llama-bpe", **keys)).encode("whole") == [len(tokens)]
    assert len(opened(save(tmp_path / "b.gguf", pre="qwen2", **keys)).encode("whole")) == 5


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma"])
def test_sentences(architecture: str, tmp_path: Path) -> None:
    gemma = architecture == "gemma"
    tokens, _, scores, types = sentence_vocabulary(gemma)
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    path = save(
        tmp_path / "x.gguf", architecture, model="llama", tokens=tokens, scores=scores, token_type=types, **special
    )
    theirs = {"tokenizer_type": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    ours = opened(path)
    oracle = convert_gguf_tokenizer("gemma" if gemma else "phi3", theirs)[0]
    for text in TEXTS:
        if "<|end|>" not in text:  # what follows a special token is cut in another way by each version
            assert ours.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False).ids, (
                text
            )
        ids = ours.encode(text)
        assert ids[0] == 1, "a text begins with BOS where the file does not say"
        if "<|end|>" not in text and "<tag>" not in text:
            assert ours.decode(ids) == text
    assert ours.encode("\x07")[-1] == tokens.index("<0x07>")


CHAT = "<|user|>\nWhat is a brown fox?  <|end|>\n<|assistant|>\n  The dog.<|end|>\n<|endoftext|>\n a<s>\nb"


def test_a_chat_of_phi_3(tmp_path: Path) -> None:
    """Blanks and line ends behind its tokens are theirs, as its own tokenizer.json says; not behind <s>."""
    whole, _, scores, types = sentence_vocabulary()
    ends = ["<|endoftext|>", "<|user|>", "<|assistant|>"]
    tokens, scores, types = whole + ends, scores + [0.0] * 3, types + [3] * 3
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, "bos_token_id": 1}
    ours = opened(save(tmp_path / "phi.gguf", "phi3", **keys))
    theirs = {"tokenizer_type": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    oracle = convert_gguf_tokenizer("phi3", theirs)[0]
    oracle = getattr(oracle, "backend_tokenizer", oracle)
    oracle.add_special_tokens(
        [
            AddedToken(token, rstrip=token not in ("<|endoftext|>", "<s>"), normalized=False, special=True)
            for token in (*ends, "<|end|>", "<s>")
        ]
    )
    ids = ours.encode(CHAT, add_special_tokens=False)
    assert ids == oracle.encode(CHAT, add_special_tokens=False).ids
    assert ids[0] == tokens.index("<|user|>")
    plain = opened(save(tmp_path / "llama.gguf", "llama", **keys))
    assert len(plain.encode(CHAT, add_special_tokens=False)) > len(ids)


def test_what_is_put_around_a_text(tmp_path: Path) -> None:
    for pre, begins in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        path, _ = byte_level(tmp_path / f"{pre}.gguf", pre, bos_token_id=7)
        assert (opened(path).encode("a")[0] == 7) is begins
    path, _ = byte_level(tmp_path / "both.gguf", "qwen2", bos_token_id=7, add_bos_token=True, add_eos_token=True)
    ours = opened(path)
    assert ours.encode("a")[0] == 7 and ours.encode("a")[-1] == ours.eos_token_ids[0]
    assert ours.encode_pair("a", "b")[0].count(7) == 2


def test_chat_templates(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    path, _ = byte_level(
        tmp_path / "x.gguf", "qwen2", bos_token_id=7, **{"chat_template": template, "chat_template.tool_use": "T"}
    )
    ours = opened(path)
    assert ours.render_chat([{"role": "user", "content": "hi"}]).endswith("hi")
    assert GGUFTokenizer.chat_template(str(path), False) == template
    assert GGUFTokenizer.chat_template(str(path), True) == "T"
    assert ours.render_chat([{"role": "user", "content": "hi"}], tools=[{"name": "f"}]) == "T"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "has no tokenizer"),
        ({"model": "no_vocab"}, "has no tokenizer"),
        ({"model": "bert"}, "of kind 'bert'"),
        ({"model": "gpt2"}, "does not say how its tokenizer cuts texts"),
        ({"model": "gpt2", "pre": "nobody"}, "cuts texts as 'nobody' does"),
    ],
)
def test_what_is_not_served(keys: dict[str, str], said: str, tmp_path: Path) -> None:
    path = save(tmp_path / "x.gguf", **keys)
    (reason,) = GGUFTokenizer.unsupported(TokenizerNeed(folder=str(path)))
    assert said in reason and "x.gguf" in reason
    with pytest.raises(TokenizerError, match=said):
        opened(path)


def test_what_makes_no_sense(tmp_path: Path) -> None:
    for number, keys in enumerate(
        (
            {"model": "llama", "tokens": ["a", "b"], "token_type": [1]},
            {"model": "llama", "tokens": ["a", "b"], "token_type": [1, 1]},
            {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b"], "merges": ["ab"]},
            {"model": "gpt2", "pre": "qwen2", "tokens": ["a"], "bos_token_id": 5, "add_bos_token": True},
        )
    ):
        path = save(tmp_path / f"{number}.gguf", **keys)
        with pytest.raises(TokenizerError, match=path.name):
            opened(path)
    assert GGUFTokenizer.unsupported(TokenizerNeed(folder=str(tmp_path))) == [f"'{tmp_path}' is not a GGUF file"]


@pytest.mark.parametrize("value", ["text", ["a", "b"], [1, 2], 0, 0.5])
@pytest.mark.parametrize(
    "key", ["model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "add_bos_token",
            "add_space_prefix"],
)  # fmt: skip
def test_keys_of_other_types(key: str, value: Any, tmp_path: Path) -> None:
    """An error that names the file; but for what such a vocabulary does not read, and numbers for yes and no."""
    sound = {"tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "bos_token_id": 1}
    for number, more in enumerate(
        ({"model": "llama", "scores": [0.0, 0.0, 1.0]}, {"model": "gpt2", "pre": "qwen2", "merges": ["a b"]})
    ):
        path = save(tmp_path / f"{number}.gguf", **(sound | more | {key: value}))
        one = not isinstance(value, list)
        unread = one and key == "pre" if number == 0 else key in ("scores", "bos_token_id", "add_space_prefix")
        if unread or (one and key.startswith("add_")) or (key == "bos_token_id" and value == 0):
            assert opened(path).encode("ab")
            continue
        with pytest.raises(TokenizerError, match=path.name):
            opened(path).encode("ab")


def test_a_large_vocabulary_is_read_quickly_where_it_is_not_wanted(tmp_path: Path) -> None:
    """The card looks at a few keys."""
    tokens = [f"token{number}" for number in range(50_000)]
    path = save(tmp_path / "x.gguf", model="gpt2", pre="qwen2", tokens=tokens, scores=np.zeros(50_000).tolist())
    assert GGUFTokenizer.unsupported(TokenizerNeed(folder=str(path))) == []

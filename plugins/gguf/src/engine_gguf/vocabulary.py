"""A file's vocabulary as a tokenizer.json, of the two kinds that language models have: byte-level BPE ("gpt2"), and
sentencepiece's BPE with scores ("llama"). Torch-free, and without the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.types.errors import TokenizerError
from engine_gguf.file import GGUFFile

_KEY = "tokenizer.ggml."
_CONTROL, _USER, _BYTE, _UNKNOWN = 3, 4, 6, 2
"""Types of tokens."""
MARK = "\u2581"
"""Sentencepiece's blank."""
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GEMMA = ("gemma", "gemma2", "gemma3")
_PHI_PLAIN = ("<s>", "<unk>", "<|endoftext|>")

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA_3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = r"[^\r\n\p{{L}}\p{{N}}]?{0}*{1}+{2}|[^\r\n\p{{L}}\p{{N}}]?{0}+{1}*{2}"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _WORDS.format(_UPPER, _LOWER, "") + rf"|\p{{N}}|{_SLASHED}"
_GPT_4O = _WORDS.format(_UPPER, _LOWER, f"{_ENDINGS}?") + rf"|\p{{N}}{{1,3}}|{_SLASHED}"
_SPLITS: Mapping[str, str] = MappingProxyType(
    {
        "llama3": _LLAMA_3, "llama-v3": _LLAMA_3, "llama-bpe": _LLAMA_3, "smaug-bpe": _LLAMA_3, "falcon3": _LLAMA_3,
        "dbrx": _LLAMA_3, "qwen2": _QWEN_2, "deepseek-r1-qwen": _QWEN_2, "megrez": _QWEN_2, "tekken": _TEKKEN,
        "gpt-4o": _GPT_4O, "llama4": _GPT_4O,
    }
)  # fmt: skip
"""How texts are cut in front of the merges, by the file's name of it: the expressions that those models publish."""
_BYTES_ALONE = ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-v2-en")
"""GPT-2's own, which the tokenizers library knows."""
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""The same behind a cut at each digit."""
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""That begin a text with BOS, where the file says nothing of it."""
_WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe", "smaug-bpe", "tekken")
"""In which a piece that is a token is that token, whatever the merges."""


def unsupported(file: GGUFFile) -> list[str]:
    """Why a file's vocabulary is not served, in reasons; empty where it is."""
    kind, cut = _one(file, "model"), _one(file, "pre")
    if kind is None or kind in ("none", "no_vocab"):
        return [f"'{file.path}' has no tokenizer: name a folder with one, --tokenizer"]
    if kind not in ("gpt2", "llama"):
        return [f"'{file.path}' has a tokenizer of kind {kind!r}; served are 'gpt2' and 'llama'"]
    if kind == "gpt2" and cut not in (*_SPLITS, *_BYTES_ALONE, *_DIGITS):
        known = ", ".join((*_SPLITS, *_BYTES_ALONE, *_DIGITS))
        said = "does not say how its tokenizer cuts texts" if cut is None else f"cuts texts as {cut!r} does"
        return [f"'{file.path}' {said} ({_KEY}pre); served are {known}; --tokenizer names a folder with another"]
    return []


def templates(file: GGUFFile) -> dict[str, str]:
    """The chat templates by name."""
    key = "tokenizer.chat_template"
    found = {"default": file.metadata.get(key)}
    found |= {name[len(key) + 1 :]: text for name, text in file.metadata.items() if name.startswith(f"{key}.")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Named special tokens, as templates see them."""
    tokens, found = _texts(file, "tokens"), {}
    for name, key in _NAMED.items():
        token = file.metadata.get(f"{_KEY}{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            found[name] = tokens[token]
    return found


def tokenizer_json(file: GGUFFile) -> bytes:
    """The whole of it. `file` has the arrays of the vocabulary.

    Raises TokenizerError for a vocabulary that is not served, or makes no sense.
    """
    if reasons := unsupported(file):
        raise TokenizerError("load a tokenizer", "; ".join(reasons), "name a folder with one: --tokenizer")
    tokens = _texts(file, "tokens")
    kinds = _numbers(file, "token_type", "iu")
    if kinds is None:
        kinds = [1] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise _bad(file, f"it has {len(tokens)} tokens and {len(kinds)} types of them")
    parts = _byte_level(file, tokens) if file.metadata[f"{_KEY}model"] == "gpt2" else _sentences(file, tokens, kinds)
    # Of Phi-3's, as its tokenizer.json and llama.cpp have it: blanks and line ends behind them are theirs.
    phi3 = file.metadata.get("general.architecture") == "phi3" and file.metadata[f"{_KEY}model"] == "llama"
    added = [
        {
            "id": place, "content": token, "special": kind == _CONTROL, "normalized": False, "single_word": False,
            "lstrip": False, "rstrip": phi3 and token not in _PHI_PLAIN,
        }
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER) and token
    ]  # fmt: skip
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    return json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace")


def _bad(file: GGUFFile, found: str) -> TokenizerError:
    return TokenizerError(f"load the tokenizer of '{file.path}'", found, "convert the model again, or --tokenizer")


def _one(file: GGUFFile, key: str, default: Any = None) -> Any:
    """A value that is no array."""
    found = file.metadata.get(_KEY + key, default)
    if isinstance(found, (np.ndarray, list)):
        raise _bad(file, f"its {_KEY}{key} is an array")
    return found


def _numbers(file: GGUFFile, key: str, kinds: str) -> list[Any] | None:
    """An array of numbers of some of numpy's kinds; None where there is none."""
    found = file.metadata.get(_KEY + key)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in kinds or not np.isfinite(found).all():
        raise _bad(file, f"its {_KEY}{key} is no array of numbers, as it has to be")
    return list(found.tolist())


def _texts(file: GGUFFile, key: str) -> list[str]:
    found = file.metadata.get(_KEY + key, [])
    if not isinstance(found, list):
        raise _bad(file, f"its {_KEY}{key} are no texts")
    return found


def _around(file: GGUFFile, bos: bool) -> dict[str, Any] | None:
    """What a text begins and ends with. bos: where the file does not say."""
    ends = {}
    for end, default in (("bos", bos), ("eos", False)):
        token = file.metadata.get(f"{_KEY}{end}_token_id")
        if _one(file, f"add_{end}_token", default) and token is not None:
            tokens = _texts(file, "tokens")
            if not isinstance(token, int) or not 0 <= token < len(tokens):
                raise _bad(file, f"its {end} token {token!r:.80} is none of {len(tokens)}")
            ends[end] = {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
    if not ends:
        return None

    def form(*places: str) -> list[dict[str, Any]]:
        found = []
        for number, place in enumerate(places):
            named = {end: {"SpecialToken": {"id": one["id"], "type_id": number}} for end, one in ends.items()}
            text = {"Sequence": {"id": place, "type_id": number}}
            found += [part for part in (named.get("bos"), text, named.get("eos")) if part is not None]
        return found

    return {
        "type": "TemplateProcessing",
        "single": form("A"),
        "pair": form("A", "B"),
        "special_tokens": {one["id"]: one for one in ends.values()},
    }


def _byte_level(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any]:
    cut = file.metadata[f"{_KEY}pre"]
    own = cut not in _SPLITS
    steps: list[dict[str, Any]] = []
    if not own:
        steps.append({"type": "Split", "pattern": {"Regex": _SPLITS[cut]}, "behavior": "Isolated", "invert": False})
    if cut in _DIGITS:
        steps.append({"type": "Digits", "individual_digits": True})
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": own})
    return {
        "normalizer": {"type": "NFC"} if _SPLITS.get(cut) == _QWEN_2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _around(file, cut in _WITH_BOS),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _bpe(tokens, _pairs(file, tokens), ignore_merges=cut in _WHOLE_FIRST),
    }


def _pairs(file: GGUFFile, tokens: Sequence[str]) -> list[list[str]]:
    """The merges, each of two tokens that make a third: the tokenizers library panics where they do not."""
    merges, known = [merge.split(" ", 1) for merge in _texts(file, "merges")], frozenset(tokens)
    for merge in merges:
        if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
            raise _bad(file, f"its merge {' '.join(merge)!r:.80} is no pair of tokens that make another")
    return merges


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    rest = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    vocab = {token: place for place, token in enumerate(tokens)}
    return {"type": "BPE", **plain, **rest, "vocab": vocab, "merges": merges, **more}


def _sentences(file: GGUFFile, tokens: Sequence[str], kinds: list[int]) -> dict[str, Any]:
    scores = _numbers(file, "scores", "iuf")
    if scores is None or len(scores) != len(tokens):
        raise _bad(file, f"it has {len(tokens)} tokens and {0 if scores is None else len(scores)} scores")
    gemma = file.metadata.get("general.architecture") in _GEMMA
    order: Sequence[float] = scores
    if gemma:
        # Runs of blanks stand as such; and its scores do not tell the order of its merges, the places of tokens do.
        tokens = [MARK * len(token) if token and not token.strip(" ") else token for token in tokens]
        order = [-float(place) for place in range(len(tokens))]
        kinds[:] = [
            1 if token.strip(MARK) == "" and kind == _USER else kind for token, kind in zip(tokens, kinds, strict=True)
        ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    prefix = bool(_one(file, "add_space_prefix", True)) and not gemma
    blanks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": MARK}]
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
    ]  # fmt: skip
    if prefix:
        blanks.insert(0, {"type": "Prepend", "prepend": MARK})
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    stored = f"{_KEY}merges" in file.metadata
    pairs: Sequence[Sequence[str]] = _pairs(file, tokens) if stored else list(_merges(tokens, kinds, order))
    return {
        "normalizer": {"type": "Sequence", "normalizers": blanks},
        "pre_tokenizer": None,
        "post_processor": _around(file, True),
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _bpe(tokens, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds),
    }


def _merges(tokens: Sequence[str], kinds: Sequence[int], order: Sequence[float]) -> Iterator[tuple[str, str]]:
    """The pairs that make a token each, of the best token first: sentencepiece merges what gives the best score."""
    places = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind not in (_CONTROL, _BYTE, _UNKNOWN)
    }
    found = []
    for token, place in places.items():
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(places[a], places[b], a, b) for a, b in halves if a in places and b in places]
        found += [(-order[place], a_place, b_place, a, b) for a_place, b_place, a, b in known]
    for *_, a, b in sorted(found):
        yield a, b

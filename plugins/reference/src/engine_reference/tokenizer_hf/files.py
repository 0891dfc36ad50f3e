"""The tokenizer's files: what they are called, and what they say about special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from engine.types.errors import TokenizerError
from engine_reference.tokenizer_hf.pieces import TokenizerModel, longest_token
from engine_reference.tokenizer_hf.template_files import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a role; templates see them under these names."""


class _TokenizerJson(msgspec.Struct):
    """The parts of tokenizer.json that are read here; the tokenizers library reads the rest."""

    model: TokenizerModel = msgspec.field(default_factory=TokenizerModel)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class TokenizerFiles:
    """What a folder says about its tokenizer.

    Attributes:
        tokenizer: the tokenizers library's object; never truncates or pads.
        decoder: tokenizer.json's decoder, or None.
        config: tokenizer_config.json; empty where there is none.
        special: named special tokens, e.g. {"bos_token": "<s>"}.
        special_ids: ids that `skip_special_tokens` leaves out of a text.
        longest_token: characters of a text, see `engine.interfaces.tokenizer.Tokenizer`.
    """

    tokenizer: Tokenizer
    decoder: dict[str, Any] | None
    config: dict[str, Any]
    special: dict[str, str] = field(default_factory=dict)
    special_ids: frozenset[int] = frozenset()
    longest_token: int | None = None


def read_files(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json and the small files beside it.

    What `encode` puts around a text is tokenizer.json's post-processor alone: transformers too passes over
    `add_bos_token` and `add_eos_token` of tokenizer_config.json where there is a tokenizer.json.

    Raises TokenizerError where tokenizer.json is missing, or a file is broken.
    """
    path = folder / "tokenizer.json"
    asked = f"load the tokenizer of '{folder}'"
    if not path.is_file():
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        raise TokenizerError(
            asked,
            f"there is no tokenizer.json; the folder holds {', '.join(present[:20]) or 'nothing'}"
            if folder.is_dir()
            else "there is no such folder",
            "save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder), "
            "or name another folder with --tokenizer",
        )
    config = read_json(folder / "tokenizer_config.json")
    added = read_json(folder / "added_tokens.json")
    return files_of(path.read_bytes(), str(path), config, _named_tokens(folder, config), added)


def files_of(
    data: bytes, where: str, config: dict[str, Any], special: dict[str, str], added: Mapping[str, Any]
) -> TokenizerFiles:
    """What tokenizer.json says, and what stands beside it: tokenizer_config.json, named special tokens, and ids of
    further tokens.

    where: what it was read from, for messages. Raises TokenizerError where it is broken.
    """
    asked = f"load the tokenizer of '{where}'"
    try:
        parts = msgspec.json.decode(data, type=_TokenizerJson)
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise TokenizerError(asked, f"{where} cannot be read: {error}", "download or save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_missing(tokenizer, asked, config, special, added)
    known = tokenizer.get_added_tokens_decoder()
    ids = {i for i, token in known.items() if token.special}
    return TokenizerFiles(
        tokenizer,
        parts.decoder,
        config,
        special,
        frozenset(ids),
        longest_token(parts.normalizer, parts.pre_tokenizer, parts.model, known.values(), tokenizer.get_vocab()),
    )


def token_text(value: Any) -> str | None:
    """A token as the files write it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """tokenizer_config.json speaks first, special_tokens_map.json fills in."""
    fallback = read_json(folder / "special_tokens_map.json")
    named = {name: token_text(config.get(name)) or token_text(fallback.get(name)) for name in _NAMED}
    return {name: token for name, token in named.items() if token}


def _add_missing(
    tokenizer: Tokenizer, asked: str, config: dict[str, Any], special: dict[str, str], added: Mapping[str, Any]
) -> None:
    """Tokens that only the files beside tokenizer.json know, and the flag `special` of those that have a role."""
    listed = config.get("added_tokens_decoder")
    entries: dict[int, Any] = {int(i): entry for i, entry in listed.items()} if isinstance(listed, dict) else {}
    for token, token_id in added.items():
        entries.setdefault(int(token_id), token)
    for token_id, entry in sorted(entries.items()):
        content = token_text(entry)
        if content is None or tokenizer.token_to_id(content) is not None:
            continue
        if token_id != tokenizer.get_vocab_size():
            # The library gives the next free id; any other would shift every token after it.
            raise TokenizerError(
                asked,
                f"tokenizer_config.json adds {content!r} as id {token_id}, "
                f"but the next free id of tokenizer.json is {tokenizer.get_vocab_size()}",
                "save the tokenizer again with transformers",
            )
        flags = entry if isinstance(entry, dict) else {}
        keep = {k: bool(flags[k]) for k in ("single_word", "lstrip", "rstrip", "normalized") if k in flags}
        tokenizer.add_tokens([AddedToken(content, special=bool(flags.get("special", False)), **keep)])
    known = {str(token.content): token for token in tokenizer.get_added_tokens_decoder().values()}
    marked: list[AddedToken] = []
    for content in sorted(set(special.values())):
        if content in known and not known[content].special:
            known[content].special = True
            marked.append(known[content])
        elif content not in known and tokenizer.token_to_id(content) is not None:
            marked.append(AddedToken(content, special=True, normalized=False))
    if marked:
        tokenizer.add_special_tokens(marked)

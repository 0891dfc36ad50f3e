"""The body of tokenizer `sentencepiece`: tokenizer.model, read by the library that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from engine.types.errors import TokenizerError, shown
from engine_reference.tokenizer_hf.files import token_text
from engine_reference.tokenizer_hf.pieces import PieceRules
from engine_reference.tokenizer_hf.template import ChatTemplates
from engine_reference.tokenizer_hf.template_files import find_templates, read_json
from engine_tokenizers.files import MODEL, NO_PREFIX, Normalizer, normalizer_of
from engine_tokenizers.table import TableTokenizer, Vocabulary, longest_of

_BLANK = "\u2581"
_MOST_IDS = 1 << 21
"""Eight times the largest vocabulary there is: more are a mistake, and would take the memory."""
_BESIDE = ("lstrip", "rstrip", "single_word")
"""What a token may say of the text around it."""
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Model:
    """A sentencepiece model.

    Args:
        path: of the file.

    Attributes:
        pieces: by id, see `Vocabulary`; control tokens as they are written.
        control: control tokens and the unknown one, as they are written, and their ids.
        normalizer: what it does first.

    Raises TokenizerError where the file is broken.
    """

    def __init__(self, path: Path) -> None:
        asked = f"load the tokenizer '{path}'"
        try:
            data = path.read_bytes()
            self.normalizer: Normalizer = normalizer_of(data)
            self.processor: Any = SentencePieceProcessor(model_proto=data)
            self._bare: Any = SentencePieceProcessor(model_proto=data + NO_PREFIX)
        except (RuntimeError, ValueError, OSError) as error:
            raise TokenizerError(asked, f"it is no sentencepiece model: {error}", "download it again") from error
        processor = self.processor
        self.control: dict[str, int] = {}
        self.pieces: list[bytes | None] = []
        has_bytes = 0
        for token in range(processor.get_piece_size()):
            piece = processor.id_to_piece(token)
            if processor.is_control(token) or processor.is_unknown(token):
                self.control[piece] = token
            if processor.is_byte(token):
                has_bytes += 1
                self.pieces.append(bytes([int(piece[3:5], 16)]))
            else:
                self.pieces.append(None if processor.is_unused(token) else piece.replace(_BLANK, " ").encode())
        self._knows_bytes = has_bytes == 256

    @property
    def rules(self) -> PieceRules:
        """Broken characters are broken bytes, and the blank that is put before a text is taken away again."""
        added = int(self.normalizer.add_dummy_prefix)
        return PieceRules(byte_fallback=True, strip=" " if added else "", strip_left=added)

    @property
    def longest(self) -> int | None:
        """Characters that an id stands for: there is no such number where characters are taken away, or many that are
        unknown are one id."""
        return longest_of(self.pieces) if self.normalizer.keeps and self._knows_bytes else None

    def plain(self, text: str, at_start: bool) -> list[int]:
        """Ids of a text; within a sequence no blank is put before it."""
        return list((self.processor if at_start else self._bare).encode(text))


class SentencePieceBody(TableTokenizer):
    """A folder's tokenizer.model, and what tokenizer_config.json and added_tokens.json say beside it.

    The beginning of a sequence is put before every text unless `add_bos_token` is false, the end behind it where
    `add_eos_token` is true. A text behind a special token gets no blank of its own, as in transformers from version 5.
    """

    def read(self, folder: str) -> tuple[Vocabulary, ChatTemplates]:
        place = Path(folder)
        config, model = read_json(place / "tokenizer_config.json"), Model(place / MODEL)
        pieces, special = list(model.pieces), dict(model.control)
        hidden = set(special.values())
        for content, token, is_hidden in _added(place, config):
            pieces += [None] * (token + 1 - len(pieces))
            pieces[token] = content.encode()
            special[content] = token
            hidden |= {token} if is_hidden else set()
        named = {name: text for name in _ROLES if (text := token_text(config.get(name))) and text in special}
        hidden |= {special[text] for text in named.values()}
        ends = [_id(model.processor.bos_id, named, special, "bos_token")]
        ends.append(_id(model.processor.eos_id, named, special, "eos_token"))
        written = {token: content for content, token in special.items()}
        variables = {name: written[ids[0]] for name, ids in zip(_ROLES, ends, strict=False) if ids}
        longest = None if model.longest is None else max(model.longest, *map(len, special))
        table = Vocabulary(
            pieces=pieces,
            special=special,
            hidden=frozenset(hidden),
            before=ends[0] if config.get("add_bos_token") is not False else (),
            behind=ends[1] if config.get("add_eos_token") is True else (),
            eos=ends[1],
            rules=model.rules,
            longest=longest,
            plain=model.plain,
        )
        return table, ChatTemplates(find_templates(place, config), variables | named, folder)


def _id(own: Callable[[], int], named: dict[str, str], special: dict[str, int], role: str) -> tuple[int, ...]:
    """The id of a role: as tokenizer_config.json names it, else the model's own, if it has one."""
    if role in named:
        return (special[named[role]],)
    return (own(),) if own() >= 0 else ()


def _added(folder: Path, config: dict[str, Any]) -> list[tuple[str, int, bool]]:
    """(token, id, whether texts leave it out) of those that stand beside the model. Raises TokenizerError."""
    listed = config.get("added_tokens_decoder")
    found: dict[int, tuple[str, bool]] = {}
    for token, entry in (listed if isinstance(listed, dict) else {}).items():
        content, said = token_text(entry), entry if isinstance(entry, dict) else {}
        if content is None:
            continue
        if beside := [name for name in _BESIDE if said.get(name)]:
            raise TokenizerError(
                f"load the tokenizer of '{folder}'",
                f"its token {shown(content)} sets {beside[0]}, which this driver does not follow",
                "save it with a tokenizer.json beside (transformers' fast tokenizer does), which driver 'hf' reads",
            )
        number = int(token) if token.isdecimal() and len(token) < 20 else token
        found[_id_of(folder, number)] = content, bool(said.get("special"))
    for content, token in read_json(folder / "added_tokens.json").items():
        if not content:
            raise TokenizerError(f"read '{folder / 'added_tokens.json'}'", "a token is empty", "take it out")
        found.setdefault(_id_of(folder, token), (content, False))
    return [(content, token, is_hidden) for token, (content, is_hidden) in sorted(found.items())]


def _id_of(folder: Path, token: Any) -> int:
    if type(token) is not int or not 0 <= token < _MOST_IDS:
        found = f"the id of an added token is {shown(token)}, not a number from 0 to {_MOST_IDS - 1}"
        raise TokenizerError(f"load the tokenizer of '{folder}'", found, "correct its files, or download them again")
    return token

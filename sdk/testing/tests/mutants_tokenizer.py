"""Tokenizers with one planted fault each, over the bundled model's files. A class a mutant."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Sequence
from typing import Any

import jinja2
from broken_tokenizer_cards import CARDS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from mutant_suites import suites_of

from engine.interfaces.context import FrontContext
from engine.types.errors import TokenizerError
from engine_kit.chat_messages import template_variables, text_messages
from engine_reference.tokenizer_hf.tokenizer import HFTokenizerBody
from engine_sdk.conformance import TokenizerConformance

Ids = Sequence[int]


class Stream:
    """A sound stream, of which mutants change one thing."""

    def __init__(self, owner: Any, skip: bool, prompt: Ids) -> None:
        self.owner = owner
        self.skip = skip
        self.inner = HFTokenizerBody.stream(owner, skip, prompt)

    def push(self, ids: Ids) -> str:
        return self.inner.push(ids)

    def flush(self) -> str:
        return self.inner.flush()


class _Streams(HFTokenizerBody):
    """Gives out streams of its own."""

    kind: type = Stream

    def stream(self, skip_special_tokens: bool = True, prompt_token_ids: Ids = ()) -> Any:
        return self.kind(self, skip_special_tokens, prompt_token_ids)


class TokenByToken(_Streams):
    """each token is decoded alone: characters of several tokens are broken"""

    class kind(Stream):
        def push(self, ids: Ids) -> str:
            return "".join(HFTokenizerBody.decode(self.owner, [i], self.skip) for i in ids)


class PieceByPiece(_Streams):
    """each piece is decoded alone: a character is broken where a piece ends"""

    class kind(Stream):
        def push(self, ids: Ids) -> str:
            return HFTokenizerBody.decode(self.owner, ids, self.skip)


class DropsTheEnd(_Streams):
    """an unfinished character at the end is dropped"""

    class kind(Stream):
        def flush(self) -> str:
            return ""


class FlushesAgain(_Streams):
    """a second flush gives the end again"""

    class kind(Stream):
        def flush(self) -> str:
            self.last = self.inner.flush() or getattr(self, "last", "")
            return self.last


class ShowsSpecial(_Streams):
    """streams show special tokens, whatever they were asked for"""

    class kind(Stream):
        def __init__(self, owner: Any, skip: bool, prompt: Ids) -> None:
            super().__init__(owner, False, prompt)


class HoldsBack(_Streams):
    """everything is held back until the end"""

    class kind(Stream):
        def push(self, ids: Ids) -> str:
            self.held = getattr(self, "held", "") + super().push(ids)
            return ""

        def flush(self) -> str:
            held, self.held = getattr(self, "held", "") + super().flush(), ""
            return held


class RepeatsThePrompt(_Streams):
    """the prompt's last token is written again"""

    class kind(Stream):
        def __init__(self, owner: Any, skip: bool, prompt: Ids) -> None:
            super().__init__(owner, skip, prompt[:-1])
            self.first = list(prompt[-1:])

        def push(self, ids: Ids) -> str:
            first, self.first = self.first, []
            return super().push([*first, *ids])


class OneStream(_Streams):
    """all streams share one state"""

    def stream(self, skip_special_tokens: bool = True, prompt_token_ids: Ids = ()) -> Any:
        if not prompt_token_ids and skip_special_tokens:
            self.shared = getattr(self, "shared", None) or super().stream(skip_special_tokens, prompt_token_ids)
            return self.shared
        return super().stream(skip_special_tokens, prompt_token_ids)


class Normalises(HFTokenizerBody):
    """texts are brought into a normal form (NFKC), and come back as others"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(unicodedata.normalize("NFKC", text), add_special_tokens)


class StripsBlanks(HFTokenizerBody):
    """blanks at the ends of a text are lost"""

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        return super().decode(ids, skip_special_tokens).strip(" ")


class AddsAlways(HFTokenizerBody):
    """a special token is put around each text, whether it was asked for or not"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*self.eos_token_ids, *super().encode(text, add_special_tokens)]


class KeepsSpecial(HFTokenizerBody):
    """special tokens stay in the text"""

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        return super().decode(ids, False)


class ReadsSpecialAsText(HFTokenizerBody):
    """a special token that is written is read letter by letter"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = []
        for place, part in enumerate(text.split("<")):
            found += super().encode("<", False) if place else []
            found += super().encode(part, False)
        return found


class OneTooSmall(HFTokenizerBody):
    """the vocabulary's size is its largest id"""

    @property
    def vocab_size(self) -> int:
        return super().vocab_size - 1


class LongerThanItSays(HFTokenizerBody):
    """tokens are longer than it says: prompts that would fit are refused"""

    @property
    def longest_token(self) -> int:
        return (super().longest_token or 2) // 2


class ShortVocabulary(HFTokenizerBody):
    """the vocabulary ends before the last id"""

    def vocabulary(self) -> Sequence[bytes | None]:
        return super().vocabulary()[:-1]


class SpecialHasBytes(HFTokenizerBody):
    """special tokens have the bytes of their names in the vocabulary"""

    def vocabulary(self) -> Sequence[bytes | None]:
        return [entry or self.decode([i], False).encode() or None for i, entry in enumerate(super().vocabulary())]


class BytesOfSymbols(HFTokenizerBody):
    """the vocabulary has the bytes of a token's written form, not of its text"""

    def vocabulary(self) -> Sequence[bytes | None]:
        return [entry and self._tokenizer.id_to_token(i).encode() for i, entry in enumerate(super().vocabulary())]


class FailsOnUnknown(HFTokenizerBody):
    """an id that the tokenizer does not know is an error"""

    def decode(self, ids: Ids, skip_special_tokens: bool = True) -> str:
        if any(i >= self.vocab_size for i in ids):
            raise IndexError("no such id")
        return super().decode(ids, skip_special_tokens)


class UntypedUnicode(HFTokenizerBody):
    """text that is no Unicode is an error of the library beneath"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        text.encode("utf-8")
        return super().encode(text, add_special_tokens)


class PairsBackwards(HFTokenizerBody):
    """a pair's second text comes first"""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        return super().encode_pair(second, first)


class TypesFromTheStart(HFTokenizerBody):
    """the second text's type begins with the first text"""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        return super().encode_pair(first, second)[0], 0


class NotThreadSafe(HFTokenizerBody):
    """the text is kept on the body while it is encoded"""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.text = text
        time.sleep(1e-4)
        return super().encode(self.text, add_special_tokens)


class _Chats(HFTokenizerBody):
    """Renders templates by itself."""

    environment: Any = None

    def render_chat(self, messages: Any, *, template: str | None = None, variables: Any = None, **options: Any) -> str:
        if template is None:
            return super().render_chat(messages, variables=variables, **options)
        try:
            seen = {"add_generation_prompt": True, **options, **template_variables(variables)}
            return str(self.environment.from_string(template).render(seen, messages=text_messages(messages)))
        except (jinja2.TemplateError, AttributeError, LookupError) as error:
            raise TokenizerError("render", str(error)) from error


class NoSandbox(_Chats):
    """templates run outside of a sandbox"""

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)


class EscapesHTML(_Chats):
    """what was said is escaped as HTML"""

    environment = ImmutableSandboxedEnvironment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


class UntypedTemplates(HFTokenizerBody):
    """a template that fails is an error of the library beneath"""

    def render_chat(self, messages: Any, **more: Any) -> str:
        try:
            return super().render_chat(messages, **more)
        except TokenizerError as error:
            raise jinja2.TemplateError(str(error)) from None


class MessagesAsTheyCome(HFTokenizerBody):
    """templates get messages as clients send them"""

    def render_chat(self, messages: Any, **options: Any) -> str:
        defaults = {"tools": None, "add_generation_prompt": True, "template": None}
        options["variables"] = template_variables(options.get("variables"))
        return self._templates.render(messages, **{**defaults, **options})


class ForgetsTools(HFTokenizerBody):
    """tools do not reach the template"""

    def render_chat(self, messages: Any, *, tools: Any = None, **more: Any) -> str:
        return super().render_chat(messages, **more)


class PromptsAlways(HFTokenizerBody):
    """the answer's beginning is always added"""

    def render_chat(self, messages: Any, **more: Any) -> str:
        return super().render_chat(messages, **{**more, "add_generation_prompt": True})


class UntypedFiles(HFTokenizerBody):
    """broken files are an error of another kind"""

    def __init__(self, context: FrontContext) -> None:
        try:
            super().__init__(context)
        except TokenizerError as error:
            raise ValueError(str(error)) from None


MUTANTS = [
    TokenByToken, PieceByPiece, DropsTheEnd, FlushesAgain, ShowsSpecial, HoldsBack, RepeatsThePrompt, OneStream,
    Normalises, StripsBlanks, AddsAlways, KeepsSpecial, ReadsSpecialAsText, OneTooSmall, LongerThanItSays,
    ShortVocabulary, SpecialHasBytes, BytesOfSymbols, FailsOnUnknown, UntypedUnicode, PairsBackwards,
    TypesFromTheStart, NotThreadSafe, NoSandbox, EscapesHTML, UntypedTemplates, MessagesAsTheyCome,
    ForgetsTools, PromptsAlways, UntypedFiles, *CARDS,
]  # fmt: skip

globals().update(suites_of(TokenizerConformance, "hf", MUTANTS))

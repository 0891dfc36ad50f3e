"""The suite of point `tokenizer`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.checkpoint import CheckpointCard
from engine.interfaces.context import FrontContext
from engine.interfaces.tokenizer import Tokenizer, TokenizerNeed
from engine.plugin import Registry
from engine.types.errors import InvalidRequestError, TokenizerError
from engine.types.model import CheckpointFiles
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.core_contexts import start_message

NOWHERE = "/nowhere/there-is-no-such-folder"
TEXTS = (
    "Hello, world!",
    "  two  blanks,\ttabs\nand lines \r\n ",
    "Grüße aus Köln, naïve café; \u0301 alone",
    "你好，世界。 こんにちは 안녕하세요",
    "😀 👨‍👩‍👧 🇩🇪 ✊🏿",
    "مرحبا بالعالم שלום नमस्ते",
    "def f(x):\n    return x + 1  # 3.14e-10\n",
    "\x00\x01\x7f\x80\xa0\u2028\ufeff\ufffd",
    "a" * 300,
)
"""Of all kinds that a server sees."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".npz", ".pt")
_LARGEST = 1 << 24
"""Bytes of a file that the suite copies and breaks."""
_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_PLAIN = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


class TokenizerConformance(Conformance):
    """Text and ids, whole and as they come in; chats; from several threads.

    Attributes:
        model: whose files the driver reads: a folder, or a name that an installed checkpoint driver opens. Left out, it
            is the installed default model, where the card serves that.
        lossy: why a text may come back as another one ("it lower-cases"); "" for a tokenizer that keeps all there is.
    """

    point = "tokenizer"
    protocol = "Tokenizer"
    model: ClassVar[str] = ""
    lossy: ClassVar[str] = ""

    # -- who is tested -----------------------------------------------------------------------------------------------
    @classmethod
    def needs(cls) -> Sequence[TokenizerNeed]:
        files = cls._files()
        return [TokenizerNeed(folder=files.folder if files else NOWHERE)]

    @classmethod
    def impossible(cls) -> Sequence[TokenizerNeed]:
        return [TokenizerNeed(folder=NOWHERE)]

    @classmethod
    def _files(cls) -> CheckpointFiles | None:
        """Where the tokenizer's files lie; None where nobody says."""
        if cls.model and os.path.isdir(cls.model):
            return CheckpointFiles(name=cls.model, folder=cls.model, weights=(), config={})
        registry = Registry.discover()
        for candidate in registry.candidates("checkpoint"):
            card = cast("type[CheckpointCard]", registry.card(candidate))
            name = cls.model or card.default_model
            if name and card.claims(name):
                files = card.resolve(name)
                need = TokenizerNeed(folder=files.folder)
                if cls.model or not cls.subject().card.unsupported(need):
                    return files
        return None

    @classmethod
    def files(cls) -> CheckpointFiles:
        """Where the tokenizer's files lie."""
        found = cls.once("files", cls._files)
        if found is None:
            pytest.skip('the suite names no tokenizer: set model = "..." to a folder, or a model that is installed')
        return cast("CheckpointFiles", found)

    @classmethod
    def opened(cls, folder: str) -> Tokenizer:
        """A body over the files of a folder."""
        context = FrontContext(
            folder=folder, files=cls.files(), model=start_message().model, options=cls.subject().options
        )
        return cast("Tokenizer", cls.body()(context))

    @classmethod
    def tokenizer(cls) -> Tokenizer:
        """The body; made once."""
        return cast("Tokenizer", cls.once("tokenizer", lambda: cls.opened(cls.files().folder)))

    @classmethod
    def special(cls) -> frozenset[int]:
        """Ids that a text leaves out by default, as far as the suite sees them."""

        def find() -> frozenset[int]:
            tokenizer = cls.tokenizer()
            return frozenset(
                i for i in range(tokenizer.vocab_size) if tokenizer.decode([i], False) and not tokenizer.decode([i])
            ) | frozenset(tokenizer.eos_token_ids)

        return cast("frozenset[int]", cls.once("special", find))

    @classmethod
    def spoken(cls) -> Sequence[bytes | None]:
        """`vocabulary`; the test is skipped where tokens stand for no bytes."""

        def find() -> Sequence[bytes | None] | TokenizerError:
            try:
                return cls.tokenizer().vocabulary()
            except TokenizerError as error:
                return error

        found = cls.once("vocabulary", find)
        if isinstance(found, TokenizerError):
            not_served(str(found))
        return cast("Sequence[bytes | None]", found)

    # -- whole texts -------------------------------------------------------------------------------------------------
    def test_round_trip(self) -> None:
        """Any text comes back as it was."""
        if self.lossy:
            not_served(self.lossy)
        tokenizer = self.tokenizer()
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

        @given(_text)
        @self.hypothesis_settings(60)
        def run(text: str) -> None:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text, f"{ids} is another text"

        run()

    def test_ids(self) -> None:
        """Whole numbers below `vocab_size`, the same each time; an end of sequence is one of them."""
        tokenizer = self.tokenizer()
        size = tokenizer.vocab_size
        assert isinstance(size, int) and size > 0
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids), ids
            assert tokenizer.encode(text) == ids, "encoded again, it is another sequence"
            assert ids or not text
        assert isinstance(tokenizer.eos_token_ids, tuple)
        assert all(0 <= i < size for i in tokenizer.eos_token_ids), f"{tokenizer.eos_token_ids} of {size} ids"

    def test_longest_token(self) -> None:
        """No id stands for more characters than `longest_token` says: what cannot fit by it is refused untokenised."""
        tokenizer = self.tokenizer()
        longest = getattr(tokenizer, "longest_token", None)
        if longest is None:
            not_served("it does not say how long a token may be")
        assert type(longest) is int and longest > 0

        def check(text: str) -> None:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert len(text) <= longest * len(ids), f"{len(text)} characters are {len(ids)} ids"

        check(max((tokenizer.decode([i], False) for i in range(tokenizer.vocab_size)), key=len) * 100)
        for text in TEXTS:
            check(text)

        @given(_text, st.integers(1, 50))
        @self.hypothesis_settings(60)
        def run(text: str, times: int) -> None:
            check(text * times)

        run()

    def test_empty(self) -> None:
        """No text has no ids of its own, and no ids are no text."""
        tokenizer = self.tokenizer()
        assert tokenizer.encode("", add_special_tokens=False) == []
        assert set(tokenizer.encode("")) <= self.special()
        for skip in (True, False):
            assert tokenizer.decode([], skip) == ""
            stream = tokenizer.stream(skip)
            assert stream.push([]) == "" and stream.flush() == ""

    def test_special_tokens_around_a_text(self) -> None:
        """They stand around the text's own ids, and are left out of its text again."""
        tokenizer = self.tokenizer()
        for text in ("Hello, world!", "x"):
            ids, own = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
            place = next((i for i in range(len(ids)) if ids[i : i + len(own)] == own), None)
            assert place is not None, f"{own} is not in {ids}"
            around = ids[:place] + ids[place + len(own) :]
            assert set(around) <= self.special(), f"{around} are no special tokens"
            assert tokenizer.decode(ids) == tokenizer.decode(own)
            assert not around or tokenizer.decode(ids, False) != tokenizer.decode(own, False)

    def test_special_tokens_in_a_text(self) -> None:
        """One that is written becomes its id: what a chat template writes means what it says."""
        tokenizer = self.tokenizer()
        for token in [*tokenizer.eos_token_ids, *sorted(self.special())[:20]]:
            written = tokenizer.decode([token], skip_special_tokens=False)
            assert tokenizer.decode([token]) == "", f"{written} is left in the text"
            found = tokenizer.encode(written, add_special_tokens=False)
            if len({tokenizer.decode([i], False) for i in self.special()}) == len(self.special()):
                assert found == [token], f"{written!r} is read as {found}, and written by {token}"
            inside = tokenizer.encode(f"Hello{written}world", add_special_tokens=False)
            assert token in inside, f"{written!r} between words is read as {inside}"

    def test_ids_that_nobody_knows(self) -> None:
        """A model's vocabulary may be larger: such ids add nothing, and break nothing."""
        tokenizer = self.tokenizer()
        far = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
        ids = tokenizer.encode("Hello, world!", add_special_tokens=False)
        for mixed in ([*ids, *far], [*ids[:1], far[0], *ids[1:]]):
            assert tokenizer.decode(mixed) == tokenizer.decode(ids)
            assert self._streamed([[i] for i in mixed]) == tokenizer.decode(ids)
        assert isinstance(tokenizer.token(far[0]), str)

    def test_text_that_is_no_unicode(self) -> None:
        """A lone surrogate, which JSON may hold, is a typed error or some ids."""
        try:
            ids = self.tokenizer().encode("a\ud800b")
        except TokenizerError:
            return
        assert all(0 <= i < self.tokenizer().vocab_size for i in ids)

    def test_pairs(self) -> None:
        """Both texts' ids follow one another; the second's types begin where it does, or there are none."""
        tokenizer = self.tokenizer()
        one, two = "Which planet is red?", "It is Mars."
        ids, second = tokenizer.encode_pair(one, two)
        first_ids, second_ids = (tokenizer.encode(text, add_special_tokens=False) for text in (one, two))
        places = [i for i in range(len(ids)) if ids[i : i + len(second_ids)] == second_ids]
        before = [i for i in range(len(ids)) if ids[i : i + len(first_ids)] == first_ids]
        assert before and places and before[0] + len(first_ids) <= places[-1], f"{ids} does not hold both texts"
        assert second is None or before[0] + len(first_ids) <= second <= places[-1], f"the second begins at {second}"

    # -- as ids come in ----------------------------------------------------------------------------------------------
    def _streamed(self, pieces: Sequence[Sequence[int]], skip: bool = True, prompt: Sequence[int] = ()) -> str:
        stream = self.tokenizer().stream(skip, prompt)
        text = "".join([*(stream.push(piece) for piece in pieces), stream.flush()])
        assert stream.flush() == "", "the second flush gives something again"
        return text

    def test_streams_at_every_split(self) -> None:
        """Pieces of a sequence give the text of the whole, wherever it is cut; special tokens left out or not."""
        tokenizer = self.tokenizer()
        for text in TEXTS[:8]:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                whole = tokenizer.decode(ids, skip)
                assert self._streamed([[i] for i in ids], skip) == whole
                for cut in range(len(ids) + 1):
                    assert self._streamed([ids[:cut], ids[cut:]], skip) == whole, f"cut at {cut} of {ids}"

    def test_streams_of_any_ids(self) -> None:
        """What a model samples need be no text: broken characters, special tokens, in pieces of any size."""
        tokenizer = self.tokenizer()

        @given(st.lists(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4), max_size=6), st.booleans())
        @self.hypothesis_settings(80)
        def run(pieces: list[list[int]], skip: bool) -> None:
            whole = tokenizer.decode([i for piece in pieces for i in piece], skip)
            assert self._streamed(pieces, skip) == whole

        run()

    def test_half_a_character_is_held_back(self) -> None:
        """What was given out is never taken back: at each id the text so far begins the whole one, and what is held is
        one character at most."""
        tokenizer = self.tokenizer()
        for text in TEXTS[:7]:
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole, stream, given_out = tokenizer.decode(ids), tokenizer.stream(), ""
            for place, token in enumerate(ids):
                given_out += stream.push([token])
                assert whole.startswith(given_out), f"{given_out!r} does not begin {whole!r}"
                so_far = tokenizer.decode(ids[: place + 1]).rstrip("\ufffd")
                assert len(given_out) >= len(so_far) - 1, f"{so_far[len(given_out) :]!r} is held back"
            assert given_out + stream.flush() == whole

    def test_streams_behind_a_prompt(self) -> None:
        """With the prompt's ids known, what follows it has the text that it has in the whole sequence."""
        tokenizer = self.tokenizer()
        for text in ("Hello, brave new world! ", TEXTS[2], TEXTS[4]):
            ids = tokenizer.encode(text)
            whole = tokenizer.decode(ids)
            for cut in range(1, len(ids)):
                prompt = tokenizer.decode(ids[:cut])
                if not whole.startswith(prompt):
                    continue  # half a character
                found = self._streamed([[i] for i in ids[cut:]], prompt=ids[:cut])
                assert prompt + found == whole, f"behind {prompt!r} comes {found!r}"

    def test_streams_are_apart(self) -> None:
        """Two sequences that come in turn."""
        tokenizer = self.tokenizer()
        sequences = [tokenizer.encode(text, add_special_tokens=False) for text in (TEXTS[4], TEXTS[3])]
        streams, found = [tokenizer.stream() for _ in sequences], ["", ""]
        for place in range(max(map(len, sequences))):
            for i, (ids, stream) in enumerate(zip(sequences, streams, strict=True)):
                found[i] += stream.push(ids[place : place + 1])
        found = [text + stream.flush() for text, stream in zip(found, streams, strict=True)]
        assert found == [tokenizer.decode(ids) for ids in sequences]

    # -- the vocabulary ----------------------------------------------------------------------------------------------
    def test_vocabulary(self) -> None:
        """One entry for each id; special ids add nothing; the bytes of ids, joined, are their text."""
        tokenizer, spoken = self.tokenizer(), self.spoken()
        assert len(spoken) == tokenizer.vocab_size
        assert all(entry is None or (isinstance(entry, bytes) and entry) for entry in spoken)
        assert all(spoken[i] is None for i in self.special()), "a special id has bytes"
        begun = tokenizer.encode("Hello", add_special_tokens=False)
        said = [i for i, entry in enumerate(spoken) if entry is not None]

        @given(st.lists(st.sampled_from(said), min_size=1, max_size=6))
        @self.hypothesis_settings(80)
        def run(ids: list[int]) -> None:
            try:
                text = b"".join(spoken[i] or b"" for i in ids).decode("utf-8")
            except UnicodeDecodeError:
                return
            assert tokenizer.decode([*begun, *ids]) == tokenizer.decode(begun) + text

        run()

    def test_one_token(self) -> None:
        """Each id alone is some text; where its bytes are whole characters, these."""
        tokenizer, spoken = self.tokenizer(), self.spoken()
        for token in range(tokenizer.vocab_size):
            text, entry = tokenizer.token(token), spoken[token]
            assert isinstance(text, str)
            assert entry is None or text == entry.decode("utf-8", "replace"), f"{token} is {text!r}, of bytes {entry!r}"

    # -- chats -------------------------------------------------------------------------------------------------------
    def test_a_template_of_the_request(self) -> None:
        """Is rendered as it stands, with the messages, tools and variables; nothing is changed."""
        render, messages = self.tokenizer().render_chat, [{"role": "user", "content": "<b>1 & 2</b> ü"}]
        before = [dict(message) for message in messages]
        assert render(messages, template=_PLAIN) == "[user] <b>1 & 2</b> ü\n"
        assert render(messages, template=_PLAIN) == "[user] <b>1 & 2</b> ü\n"
        asks = "{% if add_generation_prompt %}now{% else %}later{% endif %}"
        assert [render(messages, template=asks, add_generation_prompt=on) for on in (True, False)] == ["now", "later"]
        tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look_up"}}]
        assert render(messages, template="{{ tools[0].function.name }}", tools=tools) == "look_up"
        assert render(messages, template="{{ mood }}", variables={"mood": "cheerful"}) == "cheerful"
        assert messages == before

    def test_messages_as_clients_send_them(self) -> None:
        """Parts of text are one text, the arguments of a call an object; what is no text, or no message, is refused."""
        render = self.tokenizer().render_chat
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert render([{"role": "user", "content": parts}], template=_PLAIN) == "[user] a\nb\n"
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
        said = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        assert render(said, template="{{ messages[0].tool_calls[0].function.arguments.city }}") == "Oslo"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        nonsense: list[Any] = [[], "hi", [{}], [image]]
        for messages in nonsense:
            with pytest.raises(InvalidRequestError):
                render(messages, template=_PLAIN)
        with pytest.raises(InvalidRequestError):
            render([{"role": "user", "content": "a"}], template=_PLAIN, variables={"messages": []})

    def test_the_models_own_template(self) -> None:
        """Says what was said, and can be encoded; where there is none, that is a typed error."""
        tokenizer = self.tokenizer()
        messages = [{"role": "user", "content": "What is red?"}]
        try:
            prompt = tokenizer.render_chat(messages)
        except TokenizerError as error:
            not_served(str(error))
        assert "What is red?" in prompt
        assert tokenizer.encode(prompt, add_special_tokens=False)
        assert tokenizer.render_chat(messages, add_generation_prompt=False) in prompt

    @pytest.mark.parametrize(
        "template", ["{% if %}", "{{ raise_exception('no') }}", "{{ messages[7].content }}", "{{ nobody.knows }}"]
    )
    def test_a_template_that_fails(self, template: str) -> None:
        """Is a typed error."""
        with pytest.raises(TokenizerError):
            self.tokenizer().render_chat([{"role": "user", "content": "x"}], template=template)

    @pytest.mark.parametrize(
        "template",
        ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__ }}"],
    )
    def test_templates_stay_in_their_sandbox(self, template: str) -> None:
        """They reach no class and change nothing: refused, or nothing comes of it."""
        try:
            text = self.tokenizer().render_chat([{"role": "user", "content": "x"}], template=template)
        except TokenizerError:
            return
        assert "class" not in text and "{" not in text and text.strip() in ("", "None"), text

    # -- files and threads -------------------------------------------------------------------------------------------
    def test_broken_files(self, tmp_path: Path) -> None:
        """Half of a file is a typed error, or it was none of the tokenizer's; of a file that has the weights behind it,
        the first bytes."""
        whole = Path(self.files().folder)
        inside = [whole] if whole.is_file() else sorted(whole.iterdir())
        files = [path for path in inside if path.is_file() and (path == whole or path.suffix not in _WEIGHTS)]
        files = [path for path in files if path.stat().st_size < _LARGEST]
        expected = self.tokenizer().encode(TEXTS[0])
        broke = 0
        for broken in files:
            copy = tmp_path / broken.name.replace(".", "-")
            copy.mkdir()
            for path in files:
                shutil.copy(path, copy)
            with open(copy / broken.name, "r+b") as file:
                file.truncate(1024 if broken == whole else broken.stat().st_size // 2)
            try:
                found = self.opened(str(copy / broken.name if broken == whole else copy)).encode(TEXTS[0])
            except TokenizerError as error:
                broke += 1
                assert str(copy) in str(error) or broken.name in str(error), f"the error names no file: {error}"
                continue
            assert found == expected, f"with half of {broken.name} it makes other ids"
        assert broke, f"none of {', '.join(path.name for path in files)} is missed where half of it is gone"

    def test_threads(self) -> None:
        """Several at once get what one gets."""
        tokenizer = self.tokenizer()

        def work(text: str) -> tuple[Any, ...]:
            ids = tokenizer.encode(text)
            streamed = self._streamed([[i] for i in ids])
            chat = tokenizer.render_chat([{"role": "user", "content": text}], template=_PLAIN)
            return ids, tokenizer.decode(ids), streamed, chat

        texts = [f"{text} {number}" for number in range(12) for text in TEXTS[:6]]
        expected = [work(text) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, texts)) == expected

    @classmethod
    def figure(cls) -> str | None:
        """How fast text is read and written."""
        tokenizer, text = cls.tokenizer(), " ".join(TEXTS[:7]) * 20
        start = time.perf_counter()
        ids = tokenizer.encode(text)
        middle = time.perf_counter()
        stream = tokenizer.stream()
        for token in ids:
            stream.push([token])
        end = time.perf_counter()
        return (
            f"{len(text) / (middle - start) / 1e6:.2f} M characters/s encoded, "
            f"{len(ids) / (end - middle) / 1e6:.2f} M ids/s decoded one by one"
        )

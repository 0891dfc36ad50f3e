"""The conversation, with a backend and a user that do what a script says."""

from __future__ import annotations

import io

import pytest

from engine.types.errors import EngineDeadError, InvalidRequestError, KVCacheTooSmallError, PromptTooLongError
from engine_chat.backend import Piece
from engine_chat.conversation import Conversation
from engine_chat.loop import Chat


class Backend:
    """Echoes, in two pieces. `fits` is the most messages that it takes; `play` says what else happens to a question."""

    def __init__(self, fits=100):
        self.asked = []
        self.fits = fits
        self.play = {}

    def answer(self, messages):
        self.asked.append(messages)
        if len(messages) > self.fits:
            raise PromptTooLongError("a prompt of 99 tokens", "the longest has 64")
        question = messages[-1]["content"]
        for item in self.play.get(question, ("re ", question)):
            if isinstance(item, BaseException):
                raise item
            yield item if isinstance(item, Piece) else Piece(item)

    def close(self):
        pass


class User:
    """Types what the script says; an exception is a key that was pressed while `typed` stood on the line."""

    def __init__(self, *script, typed=""):
        self.script = list(script)
        self.typed = typed
        self.prompts = []
        self.remembered = []

    def read(self, prompt):
        self.prompts.append(prompt)
        item = self.script.pop(0) if self.script else EOFError()
        if isinstance(item, BaseException):
            raise item
        return item

    def interrupted_line(self):
        return self.typed

    def remember(self, line):
        self.remembered.append(line)


@pytest.fixture
def talk():
    def run(backend, user, **options):
        out = io.StringIO()
        chat = Chat(backend, Conversation(), out, out, user, **options)
        chat.interact()
        assert not user.script, "the chat ended before the script did"
        return chat, out.getvalue()

    return run


def roles(messages):
    return "".join(message["role"][0] for message in messages)


def test_every_question_comes_with_what_was_said_before(talk):
    backend = Backend()
    chat, shown = talk(backend, User("one", "", "two"))
    assert shown == "re one\nre two\n\n"
    assert backend.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "re one"},
        {"role": "user", "content": "two"},
    ]
    assert chat.conversation.exchanges == [("one", "re one"), ("two", "re two")]


def test_commands(talk):
    backend = Backend()
    user = User("/system Be brief.", "one", "/help", "/reset", "two", "/system", "three", "//slash", "/exit")
    _, shown = talk(backend, user)
    assert [roles(messages) for messages in backend.asked] == ["su", "su", "uau", "uauau"]
    assert backend.asked[0][0]["content"] == "Be brief." and backend.asked[3][-1]["content"] == "/slash"
    assert "/reset   forget" in shown and "system prompt: Be brief." in shown and "(forgotten)" in shown
    assert user.remembered[0] == "/system Be brief."


def test_an_unknown_command_is_not_said_to_the_model(talk):
    backend = Backend()
    _, shown = talk(backend, User("/rest"))
    assert backend.asked == [] and "did you mean '/reset'" in shown


def test_ctrl_c_stops_the_answer_and_keeps_what_came(talk):
    backend = Backend()
    backend.play = {"one": ("half", KeyboardInterrupt()), "never": (KeyboardInterrupt(),)}
    chat, shown = talk(backend, User("one", "never", "two"))
    assert "half\n(stopped)\n(stopped)\nre two\n" in shown
    assert chat.conversation.exchanges == [("one", "half"), ("two", "re two")]


def test_ctrl_c_twice_at_an_empty_prompt_leaves(talk):
    _, shown = talk(Backend(), User(KeyboardInterrupt(), "one", KeyboardInterrupt(), KeyboardInterrupt()))
    assert shown.count("Ctrl-C once more leaves") == 2


def test_ctrl_c_on_a_line_only_drops_the_line(talk):
    _, shown = talk(Backend(), User(*[KeyboardInterrupt()] * 5, typed="half a li"))
    assert "once more" not in shown


def test_a_failed_answer_is_told_and_the_chat_goes_on(talk):
    backend = Backend()
    error = InvalidRequestError("asked", "found", "remedy")
    backend.play = {"bad": (error,), "breaks": ("some", error)}
    chat, shown = talk(backend, User("bad", "breaks", "two"))
    assert shown.count("error: asked; found; remedy") == 2 and "re two" in shown
    assert chat.conversation.exchanges == [("breaks", "some"), ("two", "re two")]


def test_a_dead_engine_ends_it(talk):
    backend = Backend()
    backend.play = {"die": ("so", EngineDeadError("compute a step", "boom"))}
    with pytest.raises(EngineDeadError):
        talk(backend, User("die"))


@pytest.mark.parametrize("agreed", ["", "y", "YES"])
def test_when_the_context_is_full_the_older_half_is_forgotten_if_the_user_agrees(talk, agreed):
    backend = Backend(fits=7)
    user = User("1", "2", "3", "4", "5", agreed)
    chat, shown = talk(backend, user)
    assert [q for q, _ in chat.conversation.exchanges] == ["3", "4", "5"]
    assert "the longest has 64" in shown
    assert user.prompts[5] == "Forget the oldest 2 of 4 exchanges, and answer? [Y/n] "
    assert "" not in user.remembered and agreed not in user.remembered


@pytest.mark.parametrize("refused", ["n", "what?", EOFError(), KeyboardInterrupt()])
def test_what_the_user_does_not_agree_to_is_not_forgotten(talk, refused):
    chat, shown = talk(Backend(fits=3), User("1", "2", "3", refused, "/exit"))
    assert [q for q, _ in chat.conversation.exchanges] == ["1", "2"] and "was not sent" in shown


def test_a_question_that_is_too_long_alone(talk):
    backend = Backend()
    backend.play = {"long": (KVCacheTooSmallError("serve it", "9 pages of 4"),)}
    chat, shown = talk(backend, User("1", "long", "y", "2"))
    assert "9 pages of 4" in shown and "does not fit, even alone" in shown
    assert [q for q, _ in chat.conversation.exchanges] == ["2"]


@pytest.mark.parametrize(("limited", "told"), [(False, True), (True, False)])
def test_an_answer_that_was_cut_by_the_context_is_told(talk, limited, told):
    backend = Backend()
    backend.play = {"1": (Piece("a", "length"),)}
    assert ("the context is full" in talk(backend, User("1"), limited=limited)[1]) is told


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((Piece("", "stop"),), "(the answer is empty: the model ended it at once"),
        ((Piece(""), Piece("\n", "stop", "x")), "(the answer is empty: the stop text 'x' came first"),
        ((Piece("a"), Piece("", "stop")), ""),
    ],
)
def test_an_empty_answer_says_why(talk, pieces, told):
    backend = Backend()
    backend.play = {"1": pieces}
    shown = talk(backend, User("1"))[1]
    assert told in shown and ("empty" in shown) is bool(told)


def test_through_a_pipe_nobody_is_asked():
    backend, out, notes = Backend(fits=3), io.StringIO(), io.StringIO()
    chat = Chat(backend, Conversation("Be brief."), out, notes, None)
    assert all(chat.take(line) for line in ("1\n", "2\n", "\n", "3\n")) and not chat.take("/exit\n")
    assert out.getvalue() == "re 1\nre 2\nre 3\n" and chat.failed == 0
    assert "forgetting all that was said before" in notes.getvalue()
    backend.play = {"4": ("x", KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        chat.take("4")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_an_answer_cannot_take_the_terminal_over():
    backend, out = Backend(), Terminal()
    backend.play = {"1": ("\x1b]0;title\x07\x9b2Ja\tb\n",)}
    chat = Chat(backend, Conversation(), out, out, User())
    chat.take("1")
    assert out.getvalue() == "]0;title2Ja\tb\n\n"
    assert chat.conversation.exchanges[0][1].startswith("\x1b")  # what the model said is what it is told it said

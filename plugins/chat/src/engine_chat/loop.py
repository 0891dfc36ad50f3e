"""The conversation itself: reads a line, does what a command says, or asks the model and shows its answer."""

from __future__ import annotations

from typing import Protocol, TextIO

from engine.plugin.hints import did_you_mean
from engine.types.errors import EngineDeadError, EngineError, KVCacheTooSmallError, PromptTooLongError
from engine_chat.answers import printable, why_empty
from engine_chat.backend import Backend, Piece
from engine_chat.conversation import Conversation

COMMANDS: dict[str, str] = {
    "/reset": "forget what was said; the system prompt stays",
    "/system": "/system TEXT sets the system prompt, /system alone takes it away",
    "/help": "show this",
    "/exit": "leave (Ctrl-D does too)",
}
_ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}

PROMPT = "> "


class Reader(Protocol):
    """Where lines come from when a user types them."""

    def read(self, prompt: str) -> str: ...

    def interrupted_line(self) -> str: ...

    def remember(self, line: str) -> None: ...


class Chat:
    """One conversation.

    Args:
        backend: answers.
        conversation: what has been said.
        out: gets the answers.
        notes: gets everything else.
        reader: lines of a user at a terminal; None where lines are piped in, and nobody can be asked anything.
        limited: answers have a length that the user chose.
    """

    def __init__(
        self,
        backend: Backend,
        conversation: Conversation,
        out: TextIO,
        notes: TextIO,
        reader: Reader | None,
        *,
        limited: bool = False,
    ) -> None:
        self._backend = backend
        self.conversation = conversation
        self._limited = limited
        self._out = out
        self._notes = notes
        self._reader = reader
        self.failed = 0
        self._shown = printable if out.isatty() else str

    def interact(self) -> None:
        """Talk with a user until they leave."""
        assert self._reader is not None
        armed = False
        while True:
            try:
                line = self._reader.read(PROMPT)
            except EOFError:
                self._note("")
                return
            except UnicodeDecodeError:
                self._note("(that was no UTF-8 text: it was not sent)")
                continue
            except KeyboardInterrupt:
                self._note("")
                typed = self._reader.interrupted_line()
                if armed and not typed:
                    return
                armed = not typed
                if armed:
                    self._note("(Ctrl-C once more leaves; so do Ctrl-D and /exit)")
                continue
            armed = False
            if line.strip():
                self._reader.remember(line)
            if not self.take(line):
                return

    def take(self, line: str) -> bool:
        """One line: a command, or something to ask. False where it says to leave.

        Raises:
            EngineDeadError: there will be no more answers.
            KeyboardInterrupt: Ctrl-C during an answer, where lines are piped in.
        """
        text = line.strip()
        if not text:
            return True
        if text.startswith("//"):
            self.ask(text[1:])
        elif text.startswith("/"):
            return self._command(text)
        else:
            self.ask(text)
        return True

    # -- commands -----------------------------------------------------------------------------------------------------
    def _command(self, text: str) -> bool:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match _ALIASES.get(name, name):
            case "/exit":
                return False
            case "/reset":
                self.conversation.reset()
                self._note("(forgotten)")
            case "/system":
                self.conversation.system = rest
                self._note("(the system prompt is set)" if rest else "(there is no system prompt now)")
            case "/help":
                self._help()
            case _:
                hint = did_you_mean(name, COMMANDS) or "/help lists them."
                self._note(f"(there is no command {name}: {hint} To say this to the model, begin with //)")
                self.failed += self._reader is None
        return True

    def _help(self) -> None:
        width = max(map(len, COMMANDS))
        lines = [f"{name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
        lines += [
            f"{'//...'.ljust(width)}  say something that begins with a slash",
            f"{'Ctrl-C'.ljust(width)}  stop the answer; twice at an empty prompt, leave",
        ]
        if self.conversation.system:
            lines.append(f"system prompt: {self.conversation.system}")
        self._note("\n".join(lines))

    # -- answers ------------------------------------------------------------------------------------------------------
    def ask(self, question: str) -> None:
        """Ask the model, and show its answer. Raises as `take`."""
        while True:
            try:
                answer = self._stream(question)
            except (PromptTooLongError, KVCacheTooSmallError) as error:
                if self._make_room(error):
                    continue
                self.failed += 1
                return
            except EngineDeadError:
                raise
            except EngineError as error:
                self._tell(error)
                self.failed += 1
                return
            if answer is not None:
                self.conversation.add(question, answer)
            return

    def _stream(self, question: str) -> str | None:
        """Show the answer as it comes.

        Returns:
            All of it, or as much as came before Ctrl-C or an error; None where it was stopped before it began.
        """
        came: list[str] = []
        last = Piece("")
        pieces = self._backend.answer(self.conversation.messages(question))
        try:
            for piece in pieces:
                came.append(piece.text)
                last = piece if piece.finish_reason else last
                self._out.write(self._shown(piece.text))
                self._out.flush()
        except KeyboardInterrupt:
            if self._reader is None:
                raise
            self._end_line(came)
            self._note("(stopped)")
            return "".join(came) or None
        except EngineDeadError:
            raise
        except EngineError as error:
            if not any(came):
                raise
            self._end_line(came)
            self._tell(error)
            self.failed += 1
            return "".join(came)
        self._end_line(came, always=True)
        if last.finish_reason == "length" and not self._limited:
            self._note("(the answer was cut: the context is full. /reset empties it)")
        elif last.finish_reason is not None and not "".join(came).strip():
            self._note(f"(the answer is empty: {why_empty(last.finish_reason, last.stop_reason)[0]})")
        return "".join(came)

    def _end_line(self, came: list[str], *, always: bool = False) -> None:
        if always or any(came):
            self._out.write("\n")
            self._out.flush()

    def _make_room(self, error: EngineError) -> bool:
        """Drop the older half of what was said, if the user agrees. False where the question has to be given up."""
        count = len(self.conversation.exchanges)
        if not count:
            self._tell(error)
            self._note("(your message does not fit, even alone: it was not sent. Shorten it, or the system prompt)")
            return False
        oldest = (count + 1) // 2
        self._note(f"(the conversation has grown too long: {error.found or error.asked})")
        what = f"the oldest {oldest} of {count} exchanges" if oldest < count else "all that was said before"
        if self._reader is None:
            self._note(f"(forgetting {what})")
        elif not self._agreed(f"Forget {what}, and answer? [Y/n] "):
            self._note("(your message was not sent; /reset forgets everything)")
            return False
        self.conversation.forget(oldest)
        return True

    def _agreed(self, question: str) -> bool:
        assert self._reader is not None
        try:
            return self._reader.read(question).strip().lower() in ("", "y", "yes")
        except (EOFError, KeyboardInterrupt, UnicodeDecodeError):
            self._note("")
            return False

    def _tell(self, error: EngineError) -> None:
        self._note(f"error: {error}")

    def _note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

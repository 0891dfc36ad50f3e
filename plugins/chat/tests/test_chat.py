"""`engine chat` as a program: through a pipe, and at a terminal (a pseudo-terminal, with its keys)."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def lines(monkeypatch):
    """Standard input."""

    def give(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def test_each_line_of_a_pipe_is_a_turn(program, server, lines):
    lines("Hi\n\n/system Sei kürzer.\nthere\n".encode())
    code, out, err = program(
        "chat", "--url", server.url, "--seed", "3", "--max-tokens=9", "--api-key", "k", "--system=x"
    )
    assert (code, out, err) == (0, "re Hi\nre there\n", "(the system prompt is set)\n")
    _, (_, headers, first), (_, _, second) = server.requests
    assert headers["Authorization"] == "Bearer k" and (first["seed"], first["max_tokens"]) == (3, 9)
    assert [m["content"] for m in first["messages"]] == ["x", "Hi"]
    assert [m["content"] for m in second["messages"]] == ["Sei kürzer.", "Hi", "re Hi", "there"]


def test_the_key_may_stand_in_the_environment(program, server, lines, monkeypatch):
    monkeypatch.setenv("ENGINE_API_KEY", "first,second")
    lines(b"Hi\n")
    assert program("chat", "served-name", "--url", server.url)[0] == 0
    assert server.requests[0][1]["Authorization"] == "Bearer first"


def test_a_turn_that_fails_is_told_and_the_exit_code_is_2(program, server, lines):
    server.replies["bad"] = (400, {"error": {"message": "no", "code": "invalid_request"}})
    lines(b"bad\ngood\n")
    code, out, err = program("chat", "--url", server.url)
    assert (code, out) == (2, "re good\n") and "status 400: no" in err


def test_bytes_that_are_no_text(program, server, lines):
    lines(b"\xff\n")
    code, _, err = program("chat", "--url", server.url)
    assert code == 2 and "no UTF-8 text" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "URL", "--attention", "x"], "engine chat with --attention"),
        (["--url", "URL", "--evictor.depth", "3"], "engine chat with --evictor.depth"),
        (["--url", "URL", "--dtype=float32"], "the server's own affair"),
        (["--url", "URL", "--verbose"], "the server's own affair"),
        (["--api-key", "k"], "name the server with --url"),
        (["--url", "ftp://x"], "no address of a server"),
        (["a", "--model", "b"], "these differ"),
        (["--temperature", "nan"], "temperature=nan"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(program, server, lines, arguments, says):
    lines(b"Hi\n")
    code, out, err = program("chat", *(server.url if a == "URL" else a for a in arguments))
    assert (code, out) == (2, "") and says in err


def test_the_engine_in_this_process_answers_too(program, lines, monkeypatch, doubles, make_engine):
    import engine.llm

    core = doubles.ScriptedCore(
        {"user:Hi;!": ("hello", "stop"), "user:Hi;assistant:hello;user:more;!": ("yes", "stop")}
    )
    monkeypatch.setattr(engine.llm.LLMEngine, "from_engine_args", classmethod(lambda cls, config: make_engine(core)))
    lines(b"Hi\nmore\n" + b"x" * 99 + b"\n")
    code, out, err = program("chat")
    assert (code, out) == (2, "hello\nyes\n") and "does not fit, even alone" in err
    assert core.closed == 1


def test_one_question_alone(program, server, lines):
    """vLLM's flag; what stands in the pipe is left there."""
    lines(b"Hi\n")
    code, out, _ = program("chat", "--url", server.url, "--quick", "Who?", "--system-prompt", "Be kind.")
    assert (code, out) == (0, "re Who?\n")
    _, (_, _, body) = server.requests
    assert [message["content"] for message in body["messages"]] == ["Be kind.", "Who?"]


def test_an_empty_pipe_is_told(program, server, lines):
    lines(b" \n")
    code, out, err = program("chat", "--url", server.url)
    assert (code, out) == (2, "") and "standard input\n  found: it is empty" in err


# -- at a terminal ----------------------------------------------------------------------------------------------------
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"


class Terminal:
    """`engine` at a terminal of its own. What readline says about pasting is left out of what is read."""

    def __init__(self, *arguments, state):
        self.fd, end = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(state)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine", *arguments], stdin=end, stdout=end, stderr=end,
            env=environment, start_new_session=True, preexec_fn=lambda: _take_terminal(end),
        )  # fmt: skip
        os.close(end)
        self.unread = b""

    def expect(self, text):
        """Wait until this has been written; returns what came before it."""
        deadline = time.monotonic() + 30
        while text not in self.unread:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            try:
                data = os.read(self.fd, 65536) if ready else b""
            except OSError:
                data = b""
            assert data, f"{text!r} did not come: {self.unread!r}"
            self.unread = (self.unread + data).replace(b"\x1b[?2004h", b"").replace(b"\x1b[?2004l\r", b"")
        before, _, self.unread = self.unread.partition(text)
        return before

    def type(self, keys):
        """As a user does, who sees the prompt and then types: readline shows it before it listens, and a Ctrl-C in
        between is heard with the next key."""
        program, deadline = psutil.Process(self.process.pid), time.monotonic() + 5
        while program.status() == psutil.STATUS_RUNNING and time.monotonic() < deadline:
            time.sleep(0.005)
        os.write(self.fd, keys)

    def ended(self):
        return self.process.wait(60)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.fd)


def _take_terminal(end):
    import fcntl
    import termios

    fcntl.ioctl(end, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tmp_path, server):
    opened = []

    def start(*arguments):
        opened.append(Terminal("chat", "--url", server.url, *arguments, state=tmp_path))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_talk_at_the_terminal(terminal, server, tmp_path):
    server.replies["go on"] = "forever"
    chat = terminal()
    chat.expect(b"stub-model at http://")
    chat.expect(b"\n> ")
    chat.type(b"hello\r")
    chat.expect(b"re hello\r\n> ")
    chat.type(b"go on\r")
    chat.expect(b"word word")
    chat.type(CTRL_C)  # stops the answer, not the program
    chat.expect(b"(stopped)\r\n> ")
    assert server.gone.wait(10)
    chat.type(b"half a li")
    chat.expect(b"half a li")  # Ctrl-C discards what was not yet read
    chat.type(CTRL_C)  # drops the line
    assert b"once more" not in chat.expect(b"\r\n> ")
    chat.type(UP + UP + b" again\r")
    chat.expect(b"re hello again\r\n> ")
    chat.type(CTRL_C)
    chat.expect(b"Ctrl-C once more leaves")
    chat.expect(b"\n> ")
    chat.type(CTRL_C)
    assert chat.ended() == 0
    questions = [body["messages"] for _, _, body in server.requests if body]
    assert questions[2][3]["content"].startswith("word ")  # what was said before Ctrl-C is remembered
    history = tmp_path / "engine" / "chat_history"
    assert history.read_text().split("\n")[:3] == ["hello", "go on", "hello again"]
    assert history.stat().st_mode & 0o077 == 0


def test_the_history_outlives_the_program_and_answers_to_us_are_not_in_it(terminal, server):
    full = (400, {"error": {"message": "full", "code": "context_length_exceeded"}})
    first = terminal()
    first.expect(b"\n> ")
    first.type(b"one\r")
    first.expect(b"re one\r\n> ")
    server.replies["two"] = full
    first.type(b"two\r")
    first.expect(b"Forget all that was said before, and answer? [Y/n] ")
    first.type(b"n\r")
    first.expect(b"was not sent")
    first.expect(b"\n> ")
    first.type(CTRL_D)
    assert first.ended() == 0
    second = terminal()
    second.expect(b"\n> ")
    second.type(UP + UP + b"!\r")
    second.expect(b"re one!\r\n> ")
    second.type(b"/ex\t\r")
    assert second.ended() == 0


def test_pasted_lines_are_one_question(terminal, server):
    chat = terminal()
    chat.expect(b"\n> ")
    chat.type(b"\x1b[200~two\nlines\x1b[201~\r")
    chat.expect(b"re two\r\nlines\r\n")
    assert server.requests[-1][2]["messages"][-1]["content"] == "two\nlines"


def test_no_home_for_the_history(server, tmp_path):
    folder = tmp_path / "state"
    folder.write_text("a file stands where the folder would be")
    chat = Terminal("chat", "--url", server.url, state=folder)
    try:
        chat.expect(b"\n> ")
        chat.type(b"hello\r")
        chat.expect(b"re hello\r\n> ")
        chat.type(CTRL_D)
        assert chat.ended() == 0
    finally:
        chat.close()
    assert Path(folder).is_file()

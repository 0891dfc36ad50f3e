"""The program around the commands: help, unknown names, errors, extra commands, and that it stays light."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap

import pytest

from engine.plugin import Registry

HEAVY = ("torch", "numpy", "pydantic", "typer", "stevedore", "transformers", "msgspec", "yaml", "pluggy", "fastapi")


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "--attention=x", "--json"], ["--version"]])
def test_help_and_plugins_import_nothing_heavy(process, arguments):
    code = (
        "import sys; from engine.cli.main import main; main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], [m for m in sys.modules if 'builtin.' in m])"
    )
    result = process("-c", code, *arguments)
    assert result.stdout.splitlines()[-1] == "[] []", result.stderr


@pytest.mark.parametrize("command", ["plugins", "generate"])
def test_a_commands_help_imports_nothing_heavy(process, command):
    code = (
        "import sys, atexit; from engine.cli.main import main;"
        f"atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules])); main([sys.argv[1], '--help'])"
    )
    result = process("-c", code, command)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "[]", result.stderr


@pytest.mark.parametrize("start", [["-m", "engine"], ["-m", "engine.cli.main"]])
def test_it_runs_as_a_module(process, start):
    result = process(*start, "--version")
    assert (result.returncode, result.stdout) == (0, "engine 0.1.0\n")


def test_help_lists_the_commands(program):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = program(*arguments)
        assert code == 0 and "  config " in out and "  plugins " in out and "  generate " in out


def test_help_where_nothing_reads_the_commands_lines(program, monkeypatch):
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    code, out, _ = program("--help")
    assert code == 0 and "\n  generate         (from engine-chat" in out
    code, _, err = program("fly")
    assert code == 2 and err.startswith("error: engine fly\n"), "told without what logs for programs"


@pytest.mark.parametrize(
    ("arguments", "asked", "hint"),
    [
        (["generat", "x"], "engine generat", "did you mean 'generate'?"),
        (["fly"], "engine fly", "the commands are: bench"),
        (["plugins", "tset", "attention", "torch"], "engine plugins tset", "did you mean 'plugins"),
        (["plugins", "--max-num-seq", "3"], "engine plugins --max-num-seq", "did you mean '--max-num-seqs'?"),
        (["plugins", "--attention.num_splits"], "set --attention.num_splits", "write --attention.num_splits VALUE"),
        (["plugins", "--attenton.x", "3"], "set 'attenton.x'", "did you mean 'attention'?"),
    ],
)
def test_slips_are_one_clear_message_and_exit_code_2(program, arguments, asked, hint):
    code, out, err = program(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {asked}\n") and hint in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["config", "plugins", "plugins why", "plugins doctor"])
def test_where_a_command_of_ours_is_not_installed_it_is_told_how(program, monkeypatch, command):
    monkeypatch.setattr(Registry, "discover", lambda plugins: Registry())
    code, _, err = program(*command.split(), "--json")
    assert code == 2 and f"error: engine {command}\n" in err and "pip install engine-" in err


@pytest.fixture
def extra_command(tmp_path, monkeypatch):
    """A distribution with a command of its own."""

    def install(source, name="hello"):
        info = tmp_path / "pg_extra-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pg-extra\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[engine.commands.v0]\n{name} = pg_extra_command:Hello\n")
        (tmp_path / "pg_extra_command.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    sys.modules.pop("pg_extra_command", None)


HELLO = """
    from engine.plugin import Command

    class Hello(Command):
        help = "Say hello."

        def add_arguments(self, parser):
            parser.add_argument("--name-of-it", default="world")

        def run(self, arguments):
            print("hello", arguments.name_of_it)
            return 7
"""


def test_a_plugins_command_is_listed_without_import_and_runs(extra_command, process):
    extra_command(HELLO)
    code = "import sys; from engine.cli.main import main; main(['--help']); print('pg_extra_command' in sys.modules)"
    listed = process("-c", code)
    assert "\n  hello            Say hello. (from pg-extra 1.5)\n" in listed.stdout
    assert listed.stdout.splitlines()[-1] == "False"
    result = process("-m", "engine", "hello", "--name_of_it", "engine")
    assert (result.returncode, result.stdout) == (7, "hello engine\n")


@pytest.mark.parametrize(
    ("source", "says"), [("raise RuntimeError('boom')", "RuntimeError: boom"), ("class Hello: pass", "not a subclass")]
)
def test_a_broken_command_breaks_nothing_but_itself(extra_command, program, source, says):
    extra_command(source)
    assert program("--help")[0] == program("plugins")[0] == 0
    code, _, err = program("hello")
    assert code == 2 and says in err and "pg-extra 1.5" in err


def test_a_command_that_two_offer_is_refused_until_one_is_denied(extra_command, program):
    extra_command("raise RuntimeError('boom')", name="plugins")
    code, _, err = program("plugins")
    assert code == 2 and "pg-extra 1.5" in err and "engine-inspect" in err and "deny one" in err
    assert program("plugins", "--plugins", "-pg-extra")[0] == 0


@pytest.mark.parametrize("arguments", [["plugins"], ["generate", "--help"]])
def test_the_reader_may_go_away(arguments):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "engine", *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert result.returncode in (0, 1) and result.stderr == ""  # argparse itself swallows the error of its help

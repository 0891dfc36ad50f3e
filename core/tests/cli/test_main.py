"""The program around the commands: help, unknown names, errors, extra commands, and that it stays light."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap

import pytest

from engine.cli.main import help_of
from engine.plugin import Candidate

HEAVY = ("torch", "numpy", "pydantic", "typer", "stevedore", "transformers", "msgspec", "yaml", "pluggy", "fastapi")


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "--attention=x", "--json"], ["--version"]])
def test_help_and_plugins_import_nothing_heavy(process, arguments):
    code = (
        "import sys; from engine.cli.main import main; main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], [m for m in sys.modules if 'builtin.' in m])"
    )
    result = process("-c", code, *arguments)
    assert result.stdout.splitlines()[-1] == "[] []", result.stderr


@pytest.mark.parametrize(("command", "heavy"), [("plugins", []), ("generate", ["stevedore"])])
def test_a_commands_help_imports_nothing_heavy(process, command, heavy):
    """A plugin's command is loaded, which is stevedore's work."""
    code = (
        "import sys, atexit; from engine.cli.main import main;"
        f"atexit.register(lambda: print([m for m in {HEAVY!r} if m in sys.modules])); main([sys.argv[1], '--help'])"
    )
    result = process("-c", code, command)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == str(heavy), result.stderr


@pytest.mark.parametrize("start", [["-m", "engine"], ["-m", "engine.cli.main"]])
def test_it_runs_as_a_module(process, start):
    result = process(*start, "--version")
    assert (result.returncode, result.stdout) == (0, "engine 0.1.0\n")


def test_help_lists_the_commands(program):
    for arguments in ([], ["--help"], ["-h"]):
        code, out, _ = program(*arguments)
        assert code == 0 and "  config " in out and "  plugins " in out and "  generate " in out


@pytest.mark.parametrize(
    ("arguments", "asked", "hint"),
    [
        (["generat", "x"], "engine generat", "did you mean 'generate'?"),
        (["fly"], "engine fly", "the commands are: config"),
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


LINES = {
    "from a: import b": "",
    "class Other: help = 'no'": "",
    "class Hello:\n    x = 1": "",
    "class Hello:\n    '''Greets.\n\n    More.\n    '''": "Greets.",
    "class Hello:\n    help: str = (\n        'Greets '\n        'all.')": "Greets all.",
    "class Hello:\n    'Doc.'\n    help = 'a' + b": "Doc.",
    "class Hello:\n    help = 'Two\\n  lines.'": "Two lines.",
}


@pytest.mark.parametrize("source", LINES)
@pytest.mark.parametrize("module", ["pg_lines", "pg_package.inner.lines", "pg_package.inner"])
def test_a_commands_line_is_read_from_its_source(tmp_path, monkeypatch, module, source):
    path = tmp_path.joinpath(*module.split("."))
    path = path / "__init__.py" if module == "pg_package.inner" else path.with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    if module != "pg_lines":
        (tmp_path / "pg_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert help_of(Candidate("commands", "hello", 0, "d", "1", f"{module}:Hello")) == LINES[source]
    assert help_of(Candidate("commands", "hello", 0, "d", "1", "pg_nowhere.lines:Hello")) == ""


@pytest.mark.parametrize(
    ("source", "says"), [("raise RuntimeError('boom')", "RuntimeError: boom"), ("class Hello: pass", "not a subclass")]
)
def test_a_broken_command_breaks_nothing_but_itself(extra_command, program, source, says):
    extra_command(source)
    assert program("--help")[0] == program("plugins")[0] == 0
    code, _, err = program("hello")
    assert code == 2 and says in err and "pg-extra 1.5" in err


def test_a_plugin_cannot_take_a_builtin_commands_name(extra_command, program):
    extra_command("raise RuntimeError('boom')", name="plugins")
    assert program("plugins")[0] == 0


@pytest.mark.parametrize("arguments", [["plugins"], ["generate", "--help"]])
def test_the_reader_may_go_away(arguments):
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "engine", *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
    )
    os.close(write)
    assert result.returncode in (0, 1) and result.stderr == ""  # argparse itself swallows the error of its help

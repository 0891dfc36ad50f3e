"""The line that `engine --help` has for a command, read from its source."""

import pytest

from engine.plugin import Candidate
from engine_kit.command_help import help_of

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

"""What cards and bodies of drivers over other libraries ask of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.types.errors import ConfigError
from engine_kit.libraries import first_line, loaded, numbers_of, version_of, why_not_installed


def test_versions() -> None:
    assert version_of("engine-kit") and version_of("no-such-library") == ""
    assert numbers_of("0.7.2.post1+cu130") == (0, 7, 2)
    assert numbers_of("0.1.20rc1") == (0, 1, 0) < numbers_of("0.1.20")
    assert numbers_of("2.11.0", 2) == (2, 11)


@pytest.mark.parametrize(
    ("version", "reasons"),
    [
        ("1.10", []),
        ("1.9.9", ["lib 1.9.9 is too old (pip install 'lib[cu13]>=1.10')"]),
        ("", ["lib is not installed (pip install 'lib[cu13]>=1.10')"]),
    ],
)
def test_what_does_not_do(version: str, reasons: list[str]) -> None:
    assert why_not_installed("lib", version, (1, 10), "[cu13]") == reasons


def test_what_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises, in the words of its first line."""
    (tmp_path / "a_library_that_fails.py").write_text("raise OSError('no libcudart.so.13\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded("a-library", ["json", "json.decoder"], "")[1].__name__ == "json.decoder"
    with pytest.raises(ConfigError, match="load a-library; it says: no libcudart.so.13; name another driver"):
        loaded("a-library", ["json", "a_library_that_fails"], "name another driver")
    assert first_line(ValueError()) == "ValueError"

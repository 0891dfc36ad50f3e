"""Tables, histograms, and the last line."""

from __future__ import annotations

import io
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.errors import ConfigError
from engine_bench.plot import check_plot, draw_lines, draw_plot
from engine_bench.report import Report, histogram


def test_the_last_line_is_one_flat_object():
    report = Report("title", {"a_ms": 1.23456789, "n": 3, "who": "x", "noisy": False}, warnings=["careful"])
    report.row("label", "one", "two")
    out = io.StringIO()
    report.write(out, as_json=True)
    lines = out.getvalue().splitlines()
    assert lines[0] == "title" and lines[1].split() == ["label", "one", "two"] and lines[2] == "warning: careful"
    assert json.loads(lines[-1]) == {"a_ms": 1.23457, "n": 3, "who": "x", "noisy": False}
    out = io.StringIO()
    report.write(out, as_json=False)
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize("label", ["short", "a label that is wider than its column"])
def test_a_label_stands_apart_from_its_figure(label: str) -> None:
    report = Report("title", {})
    report.row(label, "1.5", "2.5")
    assert report.lines[0].split() == [*label.split(), "1.5", "2.5"]


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=300))
def test_a_histogram_loses_nothing(values):
    lines = histogram(values)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in lines) == len(values)
    assert max(map(len, lines)) <= 90
    # A bin that has anything shows something.
    assert all(("█" in line or any(c in line for c in "▏▎▍▌▋▊▉")) == (not line.endswith(" 0")) for line in lines)


def test_an_empty_histogram():
    assert histogram([]) == []


def test_a_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    check_plot(str(path))
    draw_plot(str(path), "title", {"a": [1.0, 2.0, 4.0], "nothing": []})
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    draw_lines(str(path), "title", "drafts", "speed", {"all": {"one": [(2, 0.5), (4, 1.5)]}, "nothing": {}})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_has_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_plot("x.png")


@pytest.mark.parametrize(("path", "found"), [("no/such/folder/x.png", "folder"), ("x.docx", "format"), ("x", "format")])
def test_a_plot_that_cannot_be_drawn_is_refused_at_once(path, found):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=found):
        check_plot(path)

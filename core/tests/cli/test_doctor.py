"""`engine plugins doctor`: each ailment is found, named and has a remedy; what is broken harms nobody else."""

from __future__ import annotations

import json

import pytest

from .strangers import CARDS, install


def test_a_sound_installation(program):
    code, out, _ = program("plugins", "doctor")
    assert code == 0 and out.rstrip().endswith("all are sound")


@pytest.mark.slow
def test_every_ailment(program, tmp_path, monkeypatch):
    install(tmp_path, *(name for name in CARDS if name not in ("stranger", "unfit")))
    install(tmp_path, "stranger", "sound", distribution="engine-mars")
    install(tmp_path, "unfit", major=4, distribution="engine-pluto")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, _ = program("plugins", "doctor", "--json", "--timeout", "20")
    assert code == 1
    found = {(a["where"].split("'")[1], a["kind"]): a for a in json.loads(out)["ailments"]}
    assert set(found) == {
        ("broken", "broken"), ("syntax", "broken"), ("crashes", "broken"), ("hangs", "broken"), ("heavy", "heavy"),
        ("slow", "slow"), ("stranger", "broken"), ("sound", "duplicate"), ("unfit", "outdated"),
    }  # fmt: skip
    assert all(ailment["found"] and ailment["remedy"] for ailment in found.values())
    assert "pip install module_that_nobody_has" in found["broken", "broken"]["remedy"]
    assert "exit code 7" in found["crashes", "broken"]["found"]
    assert "not done after 20 s" in found["hangs", "broken"]["found"]
    assert "torch" in found["heavy", "heavy"]["found"]
    assert (
        "engine-moon" in found["sound", "duplicate"]["found"] and "engine-mars" in found["sound", "duplicate"]["found"]
    )
    assert "v4" in found["unfit", "outdated"]["found"]


def test_the_text(program, tmp_path, monkeypatch):
    install(tmp_path, "broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, _ = program("plugins", "doctor")
    assert code == 1
    assert "1 to mend" in out and "broken: 'broken' of evictor (engine-moon 1.2)" in out and "to do: install" in out


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "soon"])
def test_a_nonsensical_timeout_is_refused(program, timeout):
    with pytest.raises(SystemExit):
        program("plugins", "doctor", "--timeout", timeout)

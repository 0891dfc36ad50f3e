"""Flags go before the file, the file before the environment; every value remembers its place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.config.sources import Key, gather, resolve
from engine.plugin.points import POINTS
from engine.types.errors import ConfigError, EngineError


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        return str(path)

    return write


def setting(name):
    return Key("settings", name)


def test_precedence_with_provenance(config_file):
    path = config_file("max_num_seqs: 2\nblock-size: 32\nattention: fromfile\n")
    environ = {"ENGINE_MAX_NUM_SEQS": "1", "ENGINE_BLOCK_SIZE": "1", "ENGINE_SEED": "1", "ENGINE_ATTENTION": "env"}
    merged = gather({"max-num-seqs": "3"}, path, environ)
    assert merged.section("settings") == {"max_num_seqs": "3", "block_size": 32, "seed": "1"}
    assert merged.origins[setting("max_num_seqs")] == "flag --max-num-seqs"
    assert merged.origins[setting("block_size")] == f"file {path}:2"
    assert merged.origins[setting("seed")] == "environment ENGINE_SEED"
    assert merged.choice("attention") == ("fromfile", f"file {path}:3")
    assert merged.choice("executor") == ("auto", "")


def test_options_merge_one_by_one(config_file):
    path = config_file("attention.num_splits: 2\noptions:\n  attention: {window: 8}\n")
    merged = gather({"attention.num-splits": "3"}, path, {"ENGINE_ATTENTION__SCALE": "0.5"})
    assert merged.options() == {"attention": {"num_splits": "3", "window": 8, "scale": "0.5"}}
    assert merged.origins[Key("options", "attention", "num_splits")] == "flag --attention.num_splits"
    assert merged.origins[Key("options", "attention", "scale")] == "environment ENGINE_ATTENTION__SCALE"


def test_auto_given_by_a_flag_overrides_the_file(config_file):
    assert gather({"attention": "auto"}, config_file("attention: x"), {}).choice("attention")[0] == "auto"


def test_the_file_may_be_named_by_the_environment(config_file):
    path = config_file("seed: 5")
    assert gather({}, None, {"ENGINE_CONFIG": path}).section("settings") == {"seed": 5}


def test_points_go_by_their_flag_because_settings_may_have_their_name():
    assert resolve("model") == Key("settings", "model")
    assert resolve("model-impl") == Key("points", "model")
    assert resolve("load_format") == resolve("checkpoint") == Key("points", "checkpoint")
    assert resolve("tokenizer_mode.fast") == resolve("tokenizer.fast") == Key("options", "tokenizer", "fast")
    for point in POINTS.values():
        assert resolve(point.keyword).flag == point.option_flag


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_num_seq": 1}, "did you mean 'max_num_seqs'"),
        ({"attenton.x": 1}, "did you mean 'attention'"),
        ({"attention.": 1}, "no option is named"),
        ({"points": {"attn": "x"}}, "no such point"),
        ({"points": "torch"}, "not a mapping"),
        ({"options": {"attention": 3}}, "not a mapping"),
        ({"load_format": "a", "checkpoint": "b"}, "set twice"),
        ({"max-num-seqs": 1, "max_num_seqs": 2}, "set twice"),
    ],
)
def test_names_that_cannot_be_understood(flags, says):
    with pytest.raises(ConfigError, match=says):
        gather(flags, None, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "list"),
        ("a: [", "not valid YAML"),
        ("max_num_seq: 1", "did you mean"),
        ("\x00", "not valid YAML"),
    ],
)
def test_files_that_cannot_be_understood(config_file, text, says):
    with pytest.raises(ConfigError, match=says):
        gather({}, config_file(text), {})


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.yaml.*No such file"):
        gather({}, str(tmp_path / "gone.yaml"), {})


def test_a_file_that_no_package_reads(config_file, monkeypatch):
    path = config_file("seed: 1")
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    with pytest.raises(EngineError, match="no installed package brings 'config_file'; pip install --upgrade"):
        gather({}, path, {})


def test_an_empty_file_sets_nothing(config_file):
    assert gather({}, config_file("# nothing\n"), {}).values == {}


def test_slips_in_the_environment_are_warned_of_and_strangers_left_alone():
    merged = gather({}, None, {"ENGINE_MAX_NUM_SEQ": "1", "ENGINE_ROOM_TEMPERATURE": "90", "ENGINE_SEED": ""})
    assert merged.values == {}
    [warning] = merged.warnings
    assert "ENGINE_MAX_NUM_SEQ" in warning and "'max_num_seqs'" in warning


def test_merging_imports_neither_pydantic_nor_yaml():
    code = (
        "import sys; from engine.config.sources import gather; gather({'attention': 'x'}, None, {});"
        "print([m for m in ('pydantic', 'yaml', 'torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_line_of_every_key_is_known(config_file):
    path = config_file(
        "# a comment\nseed: 1\n\npoints:\n  attention: x\noptions:\n  attention:\n    a: 1\n    b: [1,\n 2]\n"
    )
    merged = gather({}, path, {})
    assert {str(key.option or key.name): origin for key, origin in merged.origins.items()} == {
        "seed": f"file {path}:2",
        "attention": f"file {path}:5",
        "a": f"file {path}:8",
        "b": f"file {path}:9",
    }
    assert merged.options() == {"attention": {"a": 1, "b": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nseed: 2\n", "'seed' stands on line 1 and on line 2"),
        ("options:\n  attention:\n    a: 1\n    a: 2\n", "'options.attention.a' stands on line 3 and on line 4"),
        ("seed: 1\n\nmax_num_seq: 1\n", r"engine\.yaml:3.*did you mean 'max_num_seqs'"),
        ("points:\n  attenton: x\n", r"engine\.yaml:2.*did you mean 'attention'"),
        ("options:\n  attention: 3\n", r"engine\.yaml:2.*not a mapping"),
        ("yes: 1\n", "set 'True'"),
    ],
)
def test_errors_name_the_line(config_file, text, says):
    with pytest.raises(ConfigError, match=says):
        gather({}, config_file(text), {})


def test_what_comes_by_an_anchor_has_no_line(config_file):
    path = config_file("options:\n  ops: &o\n    a: 1\n  attention:\n    <<: *o\n    b: 2\n")
    merged = gather({}, path, {})
    assert merged.options()["attention"] == {"a": 1, "b": 2}
    assert merged.origins[Key("options", "attention", "a")] == f"file {path}"

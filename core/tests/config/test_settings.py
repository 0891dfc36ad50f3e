"""The validated settings, and that they are what was declared."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import engine
from engine.config.declaration import EngineSettings, Settings, setting
from engine.config.settings import EngineArgs, EngineConfig, model_of, parse_bytes
from engine.config.sources import gather
from engine.types.errors import ConfigError


class Declared(Settings):
    """One of each form."""

    text: str | None = setting(None, "a text")
    names: tuple[str, ...] | None = setting(None, "several", repeatable=True, least=1)
    joined: str | None = setting(None, "several as one", repeatable=True)
    count: int = setting(3, "a number", least=1, most=9)
    share: float = setting(0.5, "a number", above=0, most=1)
    size: int = setting(2**20, "an amount", type="bytes")
    choice: str = setting("a", "one of two", choices=("a", "b"))
    switch: bool = setting(False, "on or off")


def test_a_model_is_made_of_what_is_declared():
    model = model_of(Declared)
    assert [*model.model_fields] == [*Declared.declared]
    assert all(getattr(model(), name) == one.default for name, one in Declared.declared.items())
    kinds = [one.type for one in Declared.declared.values()]
    assert kinds == ["text", "text", "text", "integer", "number", "bytes", "text", "boolean"]
    given = {"text": pathlib.Path("/a"), "names": "a, b", "joined": ["a", "b"], "count": "9", "size": "1KiB"}
    found = BaseModel.__new__(model)
    BaseModel.__init__(found, **given, choice="b", switch="true")
    assert (found.text, found.names, found.joined, found.count, found.size) == ("/a", ("a", "b"), "a,b", 9, 1024)
    for wrong in ({"count": 0}, {"count": 10}, {"share": 0}, {"share": float("nan")}, {"choice": "c"}, {"names": [""]}):
        with pytest.raises(ValidationError):
            BaseModel.__init__(BaseModel.__new__(model), **wrong)


def test_annotations_may_be_types():
    """As those of a file without `from __future__ import annotations`."""
    types = {"count": int | None, "share": float, "switch": bool, "name": str, "names": tuple[str, ...] | None}
    declared = type("Plain", (Settings,), {"__annotations__": types} | {name: setting(None, "") for name in types})
    kinds = [one.type for one in declared.declared.values()]
    assert kinds == ["integer", "number", "boolean", "text", "text"]
    assert model_of(declared)().model_dump() == dict.fromkeys(types)


def test_an_engine_has_its_settings_its_points_and_their_options():
    assert [*EngineConfig.model_fields] == [*EngineSettings.declared, "points", "options"]
    assert all(getattr(EngineConfig(), name) == one.default for name, one in EngineSettings.declared.items())


def test_the_shape_that_users_of_vllm_know():
    config = EngineArgs(model="m", max_num_seqs=8, attention="torch", load_format="x", **{"attention.num_splits": 4})
    assert config == EngineConfig(
        model="m",
        max_num_seqs=8,
        points={"attention": "torch", "checkpoint": "x"},
        options={"attention": {"num_splits": 4}},
    )
    assert (config.asked("attention"), config.asked("executor")) == ("torch", None)
    assert config.options_for("attention") == {"num_splits": 4} and config.options_for("ops") == {}
    assert engine.EngineArgs is EngineConfig


def test_paths_and_auto():
    config = EngineConfig(model=pathlib.Path("/models/x"), attention=" auto ")
    assert config.model == "/models/x" and config.asked("attention") is None


def test_it_is_frozen():
    with pytest.raises(ValidationError):
        EngineConfig().seed = 3


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "many"}, "set max_num_seqs to 'many'"),
        ({"max_num_seqs": 0}, "greater than or equal to 1"),
        ({"dtype": "int3"}, "'auto', 'float32'"),
        ({"kv_cache_memory": "4 bananas"}, "not an amount of memory"),
        ({"in_flight": 0}, "greater than or equal to 1"),
        ({"attention": 3}, "set attention to 3"),
        ({"block_size": 0, "seed": "x"}, "block_size: .*; seed: "),
    ],
)
def test_bad_values_are_config_errors_that_name_them(keywords, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**keywords)


def test_an_error_says_where_the_value_was_set():
    with pytest.raises(ConfigError, match=r"'lots' \(environment ENGINE_MAX_NUM_SEQS\)"):
        EngineConfig.from_merged(gather({}, None, {"ENGINE_MAX_NUM_SEQS": "lots"}))


def test_strings_of_the_command_line_and_the_environment_are_read():
    flags = {"enable_prefix_caching": False, "kv-cache-memory": "1GiB"}
    config = EngineConfig.from_merged(gather(flags, None, {"ENGINE_MAX_MODEL_LEN": "64", "ENGINE_IN_FLIGHT": "1"}))
    assert config == EngineConfig(enable_prefix_caching=False, kv_cache_memory=2**30, max_model_len=64, in_flight=1)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("512MiB", 512 * 2**20),
        ("4GB", 4 * 10**9),
        ("0.5 gib", 2**29),
        ("100", 100),
        ("7B", 7),
        (" 3 KB ", 3000),
        (12, 12),
        ("1TiB", 2**40),
    ],
)
def test_amounts_of_memory(text, amount):
    assert parse_bytes(text) == amount


@given(st.one_of(st.text(), st.integers(max_value=0), st.booleans(), st.floats(), st.none()))
def test_everything_else_is_no_amount_of_memory(value):
    try:
        assert parse_bytes(value) > 0
    except ConfigError as error:
        assert repr(value) in error.asked

"""What a start that fails says: where the bad value was set, and a remedy that holds for the point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from engine.config.settings import EngineConfig
from engine.config.sources import Key, gather, resolve
from engine.frontend.launch import launch
from engine.plugin import POINTS, Candidate, Registry
from engine.plugin.loading import import_object
from engine.types.errors import DriverImportError, EngineError, UnfitDriverError
from engine_kit.setting_places import setting_places

MODEL = "dummy:0.6B,vocab=32000"


# -- where it was set ------------------------------------------------------------------------------------------------
def error_of(file: Path, text: str, environ: dict[str, str], flags: dict[str, Any]) -> EngineError:
    file.write_text(text)
    merged = gather(flags, str(file), {"ENGINE_MODEL": MODEL, **environ})
    with pytest.raises(EngineError) as caught:
        launch(EngineConfig.from_merged(merged))
    error = caught.value
    assert str(error).startswith(error.asked)
    return error


IN_FILE = {
    "a driver": ("evictor: lrru", "use driver 'lrru' for evictor (evictor in file {}:1)"),
    "a driver, by its flag's name": ("load_format: x", "use driver 'x' for checkpoint (load_format in file {}:1)"),
    "one of several": ("ops: torch, none", "use driver 'none' for ops (ops in file {}:1)"),
    "one twice": ("ops: torch, torch", "--ops=torch, torch (ops in file {}:1)"),
    "a kind": ("attention: ful=torch", "--attention=ful=torch (attention in file {}:1)"),
    "one that is not needed": ("router: least_loaded", "router=least_loaded (router in file {}:1)"),
    "an option": ("options:\n evictor:\n  x: 1", "set evictor.x to 1 (evictor.x in file {}:3)"),
    "an option of a driver that none is": (
        "options:\n drafter:\n  num_tokens: 1", "set drafter.num_tokens to 1 (drafter.num_tokens in file {}:3)",
    ),
    "an option's value": (
        "drafter: ngram\ndrafter.num_tokens: 0",
        "set options of driver 'ngram' for drafter (drafter.num_tokens in file {}:2)",
    ),
    "an option of a hook plugin": ("hooks:\n ears:\n  x: 1", "set hooks.ears.x (hooks.ears.x in file {}:3)"),
    "a setting": ("dtype: float64\nmax_model_len: 10000000", "max_model_len=10000000 (max_model_len in file {}:2)"),
}  # fmt: skip
IN_ENVIRONMENT = {
    "ENGINE_EVICTOR": ("lrru", "use driver 'lrru' for evictor (environment ENGINE_EVICTOR)"),
    "ENGINE_LOAD_FORMAT": ("x", "use driver 'x' for checkpoint (environment ENGINE_LOAD_FORMAT)"),
    "ENGINE_EVICTOR__X": ("1", "set evictor.x to '1' (environment ENGINE_EVICTOR__X)"),
    "ENGINE_HOOKS__EARS__X": ("1", "set hooks.ears.x (environment ENGINE_HOOKS__EARS__X)"),
    "ENGINE_MODEL": ("none", "open model 'none' (environment ENGINE_MODEL)"),
    "ENGINE_SWAP_SPACE": ("1", "swap_space=1 (environment ENGINE_SWAP_SPACE)"),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_what_a_file_set(tmp_path: Path, case: str) -> None:
    text, asked = IN_FILE[case]
    file = tmp_path / "e.yaml"
    assert error_of(file, text, {}, {}).asked == asked.format(file)


@pytest.mark.parametrize("variable", IN_ENVIRONMENT)
def test_what_the_environment_set(tmp_path: Path, variable: str) -> None:
    value, asked = IN_ENVIRONMENT[variable]
    assert error_of(tmp_path / "e.yaml", "", {variable: value}, {}).asked == asked


def test_what_was_typed_or_written_in_python_needs_no_word(tmp_path: Path) -> None:
    error = error_of(tmp_path / "e.yaml", "evictor: lrru", {}, {"evictor": "lrrru"})
    assert error.asked == "use driver 'lrrru' for evictor"
    with pytest.raises(EngineError) as caught:
        launch(EngineConfig(model=MODEL, evictor="lrru"))
    assert caught.value.asked == "use driver 'lrru' for evictor"


def test_a_hook_plugin_is_asked_for_by_its_options() -> None:
    error = DriverImportError("load plugin 'big-ears'", "no", point="hooks.core", driver="big-ears")
    origins = {Key("options", "hooks.big_ears", "x"): "environment ENGINE_HOOKS__BIG_EARS__X"}
    assert setting_places(error, origins, resolve) == "environment ENGINE_HOOKS__BIG_EARS__X"


# -- what to do ------------------------------------------------------------------------------------------------------
NEEDED: dict[str, dict[str, Any]] = {"router": {"data_parallel_size": 2}, "kv_connector": {"swap_space": "64MiB"}}
"""With which settings a point is used."""
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
"""config.json of a model that has what the point `experts` is asked for."""
NEVER_ASKED = "checkpoint"
"""Of a driver that is named for it nobody asks whether it fits."""


@pytest.mark.parametrize(
    "point", [point for point in POINTS.values() if point.name != NEVER_ASKED], ids=lambda point: point.name
)
def test_the_remedy_for_an_unfit_driver_promises_what_is_done(point: Any, tmp_path: Path) -> None:
    here = Candidate(point.name, "rainy", point.majors[-1], "engine-moon", "1.2", "x:Rainy")
    registry = Registry.discover(extra=[here])
    rainy = {"unsupported": classmethod(lambda cls, need: ["it rains"]), "kinds": frozenset(point.kinds)}
    registry._cards[here] = type("Rainy", (import_object(point.interface),), rainy)
    settings = {"model": MODEL, **NEEDED.get(point.name, {})}
    if point.name == "experts":
        (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
        save_file({}, tmp_path / "model.safetensors")
        settings |= {"model": str(tmp_path), "tokenizer": launch(EngineConfig(model=MODEL)).files.folder}
    with pytest.raises(UnfitDriverError) as caught:
        launch(EngineConfig(**settings, **{point.keyword: "rainy"}), registry)
    error = caught.value
    assert error.remedy == f"name another driver, or leave {point.option_flag} out {point.unnamed}"

    chosen = [s for s in launch(EngineConfig(**settings)).selections if s.point == point.name]
    promised = {"to do without": False, "to have one chosen": True, "to have them chosen": True}
    promised |= {
        "to have one chosen for each kind": True,
        "to have those alone that the requests' parameters need": True,
    }
    if point.unnamed in promised:
        assert bool(chosen) == promised[point.unnamed]
    else:
        assert any(word in point.unnamed for word in (" needed", " where ", " called like "))

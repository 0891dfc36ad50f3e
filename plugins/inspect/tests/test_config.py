"""`engine config`: the tree, where everything came from, and that it is a config file itself."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import yaml
from pydantic import BaseModel

from engine.config import declaration
from engine.config.declaration import Settings, setting
from engine.config.settings import EngineConfig
from engine.config.sources import gather
from engine.frontend.launch import launch
from engine.plugin import Registry
from engine_inspect.config import as_json, as_yaml, resolve
from engine_server.config import ServerConfig


@pytest.fixture
def model(tmp_path):
    """A folder that is a model as far as the launcher looks."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return str(folder)


def test_every_value_says_where_it_came_from(program, model, tmp_path, monkeypatch):
    path = tmp_path / "e.yaml"
    path.write_text("max_num_seqs: 7\nserver:\n  host: 0.0.0.0\n")
    monkeypatch.setenv("ENGINE_SEED", "3")
    code, out, err = program("config", model, "--config", str(path), "--kv_cache_memory=1MiB", "--attention", "torch")
    assert (code, err) == (0, "")
    lines = {line.split(":")[0].strip(): line for line in out.splitlines()}
    assert lines["model"].endswith("# flag --model")
    assert lines["max_num_seqs"].startswith("max_num_seqs: 7 ") and lines["max_num_seqs"].endswith(f"# file {path}:1")
    assert lines["host"].startswith("  host: 0.0.0.0 ") and lines["host"].endswith(f"# file {path}:3")
    assert lines["seed"].startswith("seed: 3 ") and lines["seed"].endswith("# environment ENGINE_SEED")
    assert lines["kv_cache_memory"].startswith("kv_cache_memory: 1048576 ")
    assert lines["max_model_len"].startswith("max_model_len: 128 ")
    assert lines["max_model_len"].endswith("# default: the model's")
    assert lines["kv_cache_dtype"].endswith("# default: that of activations")
    assert lines["attention"].endswith("# flag --attention")
    assert lines["executor"].startswith("  executor: inline ") and lines["executor"].endswith("# auto, priority 0")
    assert lines["model_impl"].startswith("  model_impl: LlamaForCausalLM ")


def test_the_tree_is_a_config_file_that_says_the_same(program, model, tmp_path):
    first = program("config", model, "--port", "1", "--served-model-name", "on # it: 's")[1]
    path = tmp_path / "again.yaml"
    path.write_text(first)
    again = program("config", "--config", str(path))[1]
    assert yaml.safe_load(again) == yaml.safe_load(first)
    assert yaml.safe_load(first)["served_model_name"] == "on # it: 's"


def test_secrets_are_hidden(program, model):
    for form in ([], ["--json"]):
        code, out, _ = program("config", model, "--api-key", "hunter2", *form)
        assert code == 0 and "hunter2" not in out and "(hidden)" in out and "flag --api-key" in out


def test_json_has_the_same(program, model):
    tree = json.loads(program("config", model, "--max-num-seqs=7", "--json")[1])
    assert tree["settings"]["max_num_seqs"] == {"value": 7, "origin": "flag --max-num-seqs"}
    assert tree["points"]["evictor"]["value"] == "lru" and tree["points"]["evictor"]["origin"].startswith("auto")
    assert tree["server"]["port"] == {"value": 8000, "origin": "default"}


class MoonSettings(Settings):
    """Of a command beside the server: one setting of its own, one that both have."""

    phase: str = setting("new", "how much is lit", choices=("new", "full"))
    api_key: tuple[str, ...] | None = setting(None, "the server's", secret=True, repeatable=True)


@pytest.fixture
def moon(monkeypatch):
    """A command "moon" is installed, with `MoonSettings`."""
    point = SimpleNamespace(name="moon", value="moon", load=lambda: MoonSettings)
    found = [*declaration.entry_points(declaration.GROUP), point]
    monkeypatch.setattr(declaration, "entry_points", lambda group: found)
    for known in (declaration.of_commands, declaration.settings_of_commands):
        known.cache_clear()
    yield
    for known in (declaration.of_commands, declaration.settings_of_commands):
        known.cache_clear()


@pytest.mark.usefixtures("moon")
def test_a_setting_stands_under_the_command_that_has_it(program, model, tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("moon:\n  phase: full\n")
    code, out, err = program("config", model, "--config", str(path))
    assert (code, err) == (0, "")
    tree = yaml.safe_load(out)
    assert tree["moon"] == {"phase": "full"} and "phase" not in tree["server"] and "api_key" in tree["server"]
    assert next(line for line in out.splitlines() if "phase" in line).endswith(f"# file {path}:2")
    path.write_text(out)
    assert yaml.safe_load(program("config", "--config", str(path))[1]) == tree
    path.write_text("moon:\n  port: 1\n")
    code, out, err = program("config", model, "--config", str(path))
    assert code == 2 and "the moon has no such setting" in err


class Options(BaseModel):
    num_splits: int = 2
    window: float = 1.5


def test_the_options_of_drivers_chosen_by_auto_are_there(model, monkeypatch):
    registry = Registry.discover()
    card = registry.card(registry.find("evictor", "lru"))
    monkeypatch.setattr(card, "Options", Options)
    merged = gather({"model": model, "evictor.num-splits": "4"}, None, {})
    config = EngineConfig.from_merged(merged)
    lines = [*resolve(merged, config, {"server": ServerConfig.from_merged(merged)}, launch(config, registry))]
    splits, window = [line for line in lines if line.section == ("options", "evictor")]
    owner = f"lru ({registry.find('evictor', 'lru').provenance})"
    assert splits == (("options", "evictor"), "num_splits", 4, "flag --evictor.num_splits", False, owner)
    assert (window.name, window.value, window.origin) == ("window", 1.5, "default")
    assert yaml.safe_load(as_yaml(lines))["options"]["evictor"] == {"num_splits": 4, "window": 1.5}
    assert as_json(lines)["options"]["evictor"][1] == {
        "name": "window", "value": 1.5, "origin": "default", "driver": owner}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says", "shown"),
    [
        (["/no/such/model", "--seed", "3"], "there is no folder /no/such/model", "seed: 3"),
        (["MODEL", "--evictor", "lrx"], "did you mean 'lru'", "evictor: lrx"),
        (["MODEL", "--evictor.depht", "3"], "depht", "depht: '3'"),
    ],
)
def test_where_an_engine_would_not_start_the_settings_are_shown_all_the_same(program, model, arguments, says, shown):
    code, out, err = program("config", *(model if a == "MODEL" else a for a in arguments))
    assert code == 2 and says in err and shown in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-num-seq", "3"], "did you mean '--max-num-seqs'"),
        (["--max-num-seqs", "x"], "set max_num_seqs to 'x' (flag --max-num-seqs)"),
        (["--port", "x"], "set port to 'x' (flag --port)"),
        (["--attenton.x=3"], "did you mean 'attention'"),
    ],
)
def test_slips_are_errors(program, arguments, says):
    code, out, err = program("config", *arguments)
    assert (code, out) == (2, "") and says in err


def test_it_imports_no_torch(process, model):
    code = (
        "import sys; from engine.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, [m for m in ('torch', 'transformers', 'uvicorn') if m in sys.modules], file=sys.stderr)"
    )
    assert process("-c", code, "config", model).stderr.strip() == "0 []"

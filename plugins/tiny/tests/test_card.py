"""The checkpoint driver `tiny` is found by its name alone, and opens the package's folder."""

from importlib.metadata import entry_points

from engine_tiny import model_folder
from engine_tiny.card import TinyCheckpoint


def test_it_is_registered():
    (entry,) = entry_points(group="engine.checkpoint.v0", name="tiny")
    assert entry.load() is TinyCheckpoint


def test_it_claims_its_name_and_no_path():
    assert TinyCheckpoint.claims("tiny")
    assert not any(
        TinyCheckpoint.claims(name) for name in ("./tiny", "/models/tiny", "org/tiny", "Tiny", "tiny.gguf", "")
    )
    assert TinyCheckpoint.default_model == "tiny"


def test_it_opens_the_package_folder():
    files = TinyCheckpoint.resolve("tiny")
    assert files.folder == str(model_folder())
    assert files.weights == (str(model_folder() / "model.safetensors"),)
    assert files.config["architectures"] == ["LlamaForCausalLM"]
    assert files.generation_config["eos_token_id"] == [3, 1]

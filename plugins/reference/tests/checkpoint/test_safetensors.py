"""The checkpoint driver `safetensors`: which names it claims, what it finds, how it refuses."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.types.errors import CheckpointError, EngineError, ModelNotFoundError
from engine_reference.checkpoint_safetensors import SafetensorsCheckpoint as Card
from engine_reference.checkpoint_safetensors import SafetensorsReader


@pytest.fixture
def folder(checkpoints, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoints("LlamaForCausalLM", shards=3), tmp_path / "model"))


def read(folder: Path) -> dict[str, torch.Tensor]:
    files = Card.resolve(str(folder))
    reader = SafetensorsReader(SimpleNamespace(start=SimpleNamespace(files=files)))  # type: ignore[arg-type]
    return dict(reader.weights())


def refused(folder: Path | str, error: type[EngineError], words: str) -> None:
    with pytest.raises(error, match=words):
        Card.resolve(str(folder))


def test_claims(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "sources").mkdir()
    for name in (str(folder), "model", "./model", ".", "~/model", "/no/such/folder", "org/name", "../x"):
        assert Card.claims(name), name
    for name in (
        "",
        "tiny",
        "x" * 5000,
        "sources",
        "no-such",
        "s3://bucket/model",
        "https://host/org/model",
        "/x/model.gguf",
    ):
        assert not Card.claims(name), name


def test_a_folder_of_gguf_files_is_another_drivers(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert not Card.claims(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert Card.claims(str(tmp_path))


def test_resolve(folder: Path) -> None:
    files = Card.resolve(str(folder))
    assert (files.name, files.folder) == (str(folder), str(folder))
    assert len(files.weights) >= 3 and list(files.weights) == sorted(files.weights)
    assert files.config["model_type"] == "llama" and files.generation_config["eos_token_id"] == 256
    (folder / "generation_config.json").unlink()
    assert Card.resolve(str(folder)).generation_config == {}


def test_sharded_equals_whole(checkpoints, folder: Path) -> None:
    whole = read(checkpoints("LlamaForCausalLM"))
    shards = read(folder)
    assert whole.keys() == shards.keys() and all(torch.equal(whole[name], shards[name]) for name in whole)


def test_shards_without_an_index(folder: Path) -> None:
    """Then every *.safetensors is read, but the second copy that Mistral's folders hold."""
    expected = read(folder).keys()
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(next(folder.glob("model-*.safetensors")), folder / "consolidated.safetensors")
    assert read(folder).keys() == expected


def test_index_goes_first(folder: Path) -> None:
    """A file that the index does not name is not read."""
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    assert "other" not in read(folder)


def test_missing_folder(folder: Path) -> None:
    refused(folder.parent / "modle", ModelNotFoundError, f"no folder .*modle; did you mean {folder}")
    refused(folder.parent / "no" / "such" / "thing", ModelNotFoundError, f"{folder.parent} exists")
    refused("/no/such/folder", ModelNotFoundError, "no folder /no/such/folder")
    for odd in ("/" + "x" * 5000, "~nobody-of-this-name/model", "/a\0b"):
        assert Card.claims(odd)
        refused(odd, ModelNotFoundError, "no folder")
    refused(folder / "config.json", ModelNotFoundError, f"is a file; .*{folder}")


def test_hub_name() -> None:
    refused("meta-llama/Llama-3.2-1B", ModelNotFoundError, "'meta-llama/Llama-3.2-1B'.*no model hub.*pass its folder")


def test_no_config(folder: Path) -> None:
    refused(folder.parent, ModelNotFoundError, "no config.json; it has models in it: model")
    (folder / "config.json").unlink()
    refused(folder, ModelNotFoundError, "no config.json")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["{", "[1, 2]", "\udcff"])
def test_broken_json(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    refused(folder, CheckpointError, f"{file}.*(no JSON|holds a list)")


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]])
def test_no_architecture(folder: Path, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": value}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, CheckpointError, "'architectures' of config.json.*'llama'")


def test_missing_shard(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(folder, CheckpointError, f"1 of 4 shards .* missing in {folder}: {shard.name}")


def test_empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(folder, CheckpointError, "no weight_map")


def test_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    refused(folder, CheckpointError, r"no \*.safetensors file; fetch")
    (folder / "pytorch_model.bin").touch()
    refused(folder, CheckpointError, "only pytorch_model.bin; convert")


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated(folder: Path, size: int) -> None:
    """Cut off in the length, the header, the data: the file is named."""
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=f"{shard.name}.*truncated or broken"):
        read(folder)


def test_vanished(folder: Path) -> None:
    """Gone between resolving and reading."""
    files = Card.resolve(str(folder))
    Path(files.weights[0]).unlink()
    reader = SafetensorsReader(SimpleNamespace(start=SimpleNamespace(files=files)))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=Path(files.weights[0]).name):
        list(reader.weights())

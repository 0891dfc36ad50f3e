"""A model's folder in the Hugging Face layout, for checkpoint cards: its files, and those of sentence-transformers,
which say how embeddings are made of hidden states. Torch-free, opens no tensor.

modules.json                        the chain of modules: Transformer, Pooling, Normalize
1_Pooling/config.json               which pooling
sentence_bert_config.json           max_seq_length, do_lower_case
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from engine.plugin.hints import near_matches
from engine.types.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from engine.types.model import CheckpointFiles
from engine.types.pooling import PoolerConfig, PoolingType
from engine_kit.model_config import architecture

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES = "modules.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5")
_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError naming the file."""
    content = _read(path)
    if not isinstance(content, dict):
        found = f"it holds a {type(content).__name__}, not an object"
        raise CheckpointError(f"read {path}", found, "fetch the file again")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = error.strerror or str(error)
        raise CheckpointError(f"read {path}", found, "check the file and its permissions") from error
    except ValueError as error:
        raise CheckpointError(f"read {path}", f"it is no JSON: {error}", "fetch the file again") from error


def resolve_folder(name: str, folder: Path) -> CheckpointFiles:
    """Find config.json, generation_config.json and the safetensors files in `folder`.

    Weights are, in this order: the files that model.safetensors.index.json names; model.safetensors; all other
    *.safetensors files but "consolidated*" (a second copy in Mistral's own names).

    Args:
        name: what the user asked for, for messages.

    Raises:
        ModelNotFoundError: the folder is missing or is no model.
        CheckpointError: a file is missing, unreadable or no JSON; config.json names no architecture.
    """
    asked = f"open model {name!r}"
    # os.path answers False where pathlib raises (no permission, a name too long).
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            raise ModelNotFoundError(asked, f"{folder} is a file", f"pass the folder that holds it: {folder.parent}")
        raise ModelNotFoundError(asked, f"there is no folder {folder.absolute()}", _near(folder))
    config_file = folder / "config.json"
    if not os.path.isfile(config_file):
        inner = [child for child in _folders(folder) if os.path.isfile(folder / child / "config.json")]
        remedy = f"it has models in it: {', '.join(inner[:4])}" if inner else "pass a folder in the Hugging Face layout"
        raise ModelNotFoundError(asked, f"{folder} has no config.json", remedy)
    config = read_json(config_file)
    architecture(config)
    generation_file = folder / "generation_config.json"
    return CheckpointFiles(
        name=name,
        folder=str(folder),
        weights=tuple(str(path) for path in _weights(asked, folder)),
        config=config,
        generation_config=read_json(generation_file) if generation_file.is_file() else {},
    )


def _weights(asked: str, folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        shards = weight_map.values() if isinstance(weight_map, dict) else ()
        if not shards or not all(isinstance(file, str) for file in shards):
            raise CheckpointError(asked, f"{index} has no weight_map from tensors to files", "fetch the file again")
        files = sorted(set(shards))
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise CheckpointError(
                asked,
                f"{len(missing)} of {len(files)} shards that {INDEX} names are missing in {folder}: "
                f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}",
                "fetch the missing files",
            )
        return [folder / file for file in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return [folder / file for file in files]
    other = sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern))
    raise CheckpointError(
        asked,
        f"{folder} has no *.safetensors file" + (f", only {', '.join(other[:4])}" if other else ""),
        "convert the weights to safetensors" if other else "fetch the weights too",
    )


def _near(folder: Path) -> str:
    """What to do about a missing folder: its nearest siblings, or where the path breaks off."""
    parent = folder.absolute().parent
    while not os.path.isdir(parent) and parent != parent.parent:
        folder, parent = parent, parent.parent
    near = near_matches(folder.absolute().name, _folders(parent))
    if near:
        return "did you mean " + " or ".join(str(parent / match) for match in near) + "?"
    return f"check the path; {parent} exists"


def _folders(parent: Path) -> list[str]:
    """The names of the folders in a folder; none where it cannot be listed."""
    try:
        return sorted(entry.name for entry in os.scandir(parent) if entry.is_dir())
    except OSError:
        return []


# -- sentence-transformers ---------------------------------------------------------------------------------------------
def read_pooler(folder: Path, default: PoolerConfig) -> PoolerConfig | None:
    """The pooler that the files describe; None where there are none.

    Args:
        folder: the checkpoint's.
        default: the architecture's, for what the files do not say.

    Raises:
        CheckpointError: a file is missing, or makes no sense.
        UnsupportedModelError: it names a module or a kind of pooling that this engine does not have.
    """
    path = folder / MODULES
    if not path.is_file():
        return None
    pooler = msgspec.structs.replace(default, normalize=False)
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"read {path}", "it is no list of modules", "fetch the file again")
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        inner = folder / str(module.get("path", ""))
        if kind == "Transformer":
            pooler = _transformer(inner / "sentence_bert_config.json", pooler)
        elif kind == "Pooling":
            pooler = msgspec.structs.replace(pooler, pooling_type=_pooling_type(inner / "config.json"))
        elif kind == "Normalize":
            pooler = msgspec.structs.replace(pooler, normalize=True)
        else:
            raise UnsupportedModelError(
                f"embed with the modules of {path}",
                f"it names a module {kind!r}; served are Transformer, Pooling and Normalize",
                f"remove {MODULES} to have the hidden states pooled without it",
            )
    return pooler


def _transformer(path: Path, pooler: PoolerConfig) -> PoolerConfig:
    settings = read_json(path) if path.is_file() else {}
    length = settings.get("max_seq_length")
    return msgspec.structs.replace(
        pooler,
        max_tokens=length if type(length) is int and length > 0 else None,
        lower_case=settings.get("do_lower_case") is True,
    )


def _pooling_type(path: Path) -> PoolingType:
    settings = read_json(path)
    chosen = sorted(key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True)
    if (named := settings.get("pooling_mode")) is not None:  # the form of newer versions
        names = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
        chosen = [f"pooling_mode_{names.get(str(name), name)}" for name in _names(named)]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedModelError(
            f"pool as {path} says",
            f"it chooses {', '.join(chosen) or 'nothing'}",
            f"served is one of {', '.join(_MODES)}",
        )
    return _MODES[chosen[0]]


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

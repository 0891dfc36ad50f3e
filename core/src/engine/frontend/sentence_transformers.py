"""The files of sentence-transformers beside a checkpoint: how its embeddings are made of hidden states.

modules.json                        the chain of modules: Transformer, Pooling, Normalize
1_Pooling/config.json               which pooling
sentence_bert_config.json           max_seq_length, do_lower_case
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine.types.errors import CheckpointError, UnsupportedModelError
from engine.types.pooling import Pooler, PoolingType

MODULES = "modules.json"
_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def read_pooler(folder: Path, default: Pooler) -> Pooler | None:
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
            pooler = _transformer(_settings(inner), pooler)
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


def _transformer(settings: Mapping[str, Any], pooler: Pooler) -> Pooler:
    length = settings.get("max_seq_length")
    return msgspec.structs.replace(
        pooler,
        max_tokens=length if type(length) is int and length > 0 else None,
        lower_case=settings.get("do_lower_case") is True,
    )


def _settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "sentence_bert_config.json"
    settings = _read(path) if path.is_file() else {}
    if not isinstance(settings, dict):
        raise CheckpointError(f"read {path}", "it is no object", "fetch the file again")
    return settings


def _pooling_type(path: Path) -> PoolingType:
    settings = _read(path)
    if not isinstance(settings, dict):
        raise CheckpointError(f"read {path}", "it is no object", "fetch the file again")
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


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"read {path}", error.strerror or str(error), "fetch the file again") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"read {path}", f"it is no JSON: {error}", "fetch the file again") from error

"""Whether a model and what drafts for it can lie in a device's memory, by what their files say: before any weights are
read. Without torch. The launcher calls this by the entry-point group `engine_parts`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.types.errors import ConfigError
from engine.types.model import CheckpointFiles
from engine.types.parallel import Parallel
from engine.types.start import DraftStart

ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""What safetensors calls the types that are loaded in the engine's own; others stay as they are stored."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_memory(
    config: Any,
    device: str,
    memory: int,
    dtype: str,
    parallel: Parallel,
    target: CheckpointFiles,
    drafts: Sequence[DraftStart],
) -> None:
    """Raise ConfigError where the weights alone need more than a rank may take of its device.

    What is counted is the least that the tensors in their files need. Of a model that is quantised as it is loaded,
    four bits of each weight; of a model whose files are not known (random weights) nothing. So what passes may still
    not fit, and says so later. What the bodies pass over does not count: layers for further tokens where none of the
    drafts is made of them, and the stored copy of an embedding that the head shares.

    Args:
        config: the engine's settings.
        device: what memory it has, for people.
        memory: its bytes.
        dtype: that the engine computes in.
        parallel: over which ranks the target is divided.
        target: the model's files.
        drafts: the models that draft. One whose weights lie among the target's files counts there.
    """
    size = ITEM_SIZES[dtype]
    others = [draft for draft in drafts if draft.files.weights != target.weights]
    said = target.config if len(others) == len(drafts) else {}
    model = stored_bytes(target.weights, size if config.asked("quantization") is None else 0.5, said) // parallel.world
    drafting = sum(
        stored_bytes(draft.files.weights, size, draft.files.config) // draft.parallel.world for draft in others
    )
    share = 1.0 if config.memory_utilization is None else config.memory_utilization
    if not others or model + drafting <= memory * share:
        return
    of = "" if share == 1.0 else f", of which it may take {share:.0%} (--memory-utilization)"
    raise ConfigError(
        f"draft for {target.name} with {', '.join(draft.files.name for draft in others)}",
        f"in {dtype} the weights of the model take at least {model:,} bytes on each rank, and those of what drafts "
        f"{drafting:,}; {device}{of}",
        "name a smaller draft model, quantise the model (--quantization), divide it over more devices "
        "(--tensor-parallel-size), or leave the drafter out",
    )


def stored_bytes(files: Sequence[str], itemsize: float, config: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Bytes of the tensors in these files, with so many for each number that is stored as a float.

    Of a file that is no safetensors (a pickle), or one that is broken, what it has on the disk: its reader tells more.

    Args:
        config: config.json, by which tensors that no model's body reads are told from the others.
    """
    return sum(_stored(file, itemsize, config) for file in files)


def _is_read(name: str, config: Mapping[str, Any]) -> bool:
    layers, layer = config.get("num_hidden_layers"), _LAYER.search(name)
    if layer is not None and isinstance(layers, int) and int(layer[1]) >= layers:
        return False
    return not (name.startswith("mtp.") or (name == "lm_head.weight" and config.get("tie_word_embeddings") is True))


def _stored(file: str, itemsize: float, config: Mapping[str, Any]) -> int:
    try:
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors = [
            one for name, one in header.items() if name != "__metadata__" and (not config or _is_read(name, config))
        ]
        floats: int = sum(math.prod(one["shape"]) for one in tensors if one["dtype"] in _FLOATS)
        offsets = (one["data_offsets"] for one in tensors if one["dtype"] not in _FLOATS)
        others: int = sum(end - begin for begin, end in offsets)
        return int(floats * itemsize) + others
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return os.path.getsize(file) if os.path.exists(file) else 0

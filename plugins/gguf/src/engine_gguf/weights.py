"""The tensors of GGUF files, under the names that models ask for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.quantization import EMBEDDING
from engine.types.errors import CheckpointError, ConfigError
from engine_gguf.architectures import Architecture, architecture_of, stays
from engine_gguf.dequantize import dequantize
from engine_gguf.parts import read_model
from engine_kit.ggml_blocks import TYPES

log = logging.getLogger(__name__)


class GGUFWeights:
    """Streams the tensors of `start.files.weights`, as `engine.interfaces.checkpoint.Checkpoint` says.

    Matrices come as they are stored: uint8 [O, blocks, bytes of a block], or plain; those of experts one by one. Norms
    and routers are plain, in the engine's dtype where the file has them in blocks. So is the embedding where no driver
    was chosen that looks up stored rows.

    Raises ConfigError where a driver is named for a head that is the embedding, and not for that.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._files = tuple(Path(file) for file in context.start.files.weights)
        self._dtype = getattr(torch, context.start.dtype)
        choices = {choice.kind: choice for choice in context.start.choices if choice.point == "quantization"}
        head, embedding = choices.get("head"), choices.get(EMBEDDING)
        rows = None if embedding is None else embedding.driver
        tied = context.start.model.config.get("tie_word_embeddings")
        # A model's driver may leave embeddings plain: then so is the head, unless somebody asked for something else.
        if tied and head is not None and head.asked and head.driver != rows:
            packed = f"which '{rows}' packs" if rows else "which is plain, for no driver is named for it"
            raise ConfigError(
                f"head={head.driver} of --quantization for {context.start.files.name}",
                f"the model's head is its embedding, {packed}",
                f"name one for both: head={head.driver},embedding={head.driver}; or none for the head",
            )
        self._works_out = None if rows else "model.embed_tokens"

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (name, host tensor). Raises CheckpointError for a truncated or broken file, naming it."""
        model = read_model(self._files)
        architecture, keys = architecture_of(model)
        heads = keys.whole("attention.head_count")
        turned = {
            "self_attn.q_proj": heads,
            "self_attn.k_proj": keys.whole("attention.head_count_kv", heads),
        }  # fmt: skip
        for path in self._files:
            data: np.ndarray | None = None
            for stored_name, place in model.tensors.items():
                if place.file != str(path) or stored_name.startswith("rope_"):
                    continue
                if data is None:
                    data = _mapped(path)
                tensor, kind = _tensor(data, place.start, place.size, place.shape, place.type), place.type
                name = architecture.tensor_name(stored_name)
                layer = name.rpartition(".")[0]
                if architecture.neighbours and (count := turned.get(_part(layer))):
                    if len(tensor) % (2 * count):
                        raise CheckpointError(
                            f"read {stored_name} of {path}",
                            f"its {len(tensor)} rows are no pairs for each of {count} heads",
                            "convert the model again",
                        )
                    tensor = halves_of(tensor, count)
                if stays(layer) and layer != self._works_out:
                    yield from _each(name, tensor)
                else:
                    yield name, self._plain(architecture, name, tensor, kind)

    def _plain(self, architecture: Architecture, name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if architecture.offset_norms and name.endswith("norm.weight"):
            return tensor.float() - 1
        if TYPES[kind].plain:
            return tensor
        found = dequantize(tensor, kind, self._dtype)
        log.info("%s, %s, is worked out as %s: %s bytes", name, kind, self._dtype, f"{found.nbytes:,}")
        return found


def _part(layer: str) -> str:
    """What follows a layer's number."""
    return layer.split(".", 3)[-1]


def _each(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A matrix, or those of all experts."""
    if ".*." not in name:
        yield name, tensor
        return
    for expert, one in enumerate(tensor):
        yield name.replace(".*.", f".{expert}."), one


def halves_of(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * size, ...] of which neighbours are rotated together, to those of which halves are."""
    size = len(tensor) // heads
    order = torch.arange(len(tensor)).view(heads, size // 2, 2).transpose(1, 2).flatten()
    return tensor[order]


def _mapped(path: Path) -> np.ndarray:
    """The bytes of a file, which is not read before they are. Copies are made of what is written to, and nothing is."""
    try:
        return np.memmap(path, np.uint8, mode="c")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"read tensors from {path}", str(error), "fetch the file again") from error


def _tensor(data: np.ndarray, start: int, size: int, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """A view of the mapping."""
    form = TYPES[kind]
    found = torch.from_numpy(data[start : start + size])
    if not form.plain:
        return found.view(*shape[:-1], shape[-1] // form.inputs, form.bytes)
    dtype: torch.dtype = getattr(torch, form.dtype)
    if start % form.bytes:
        found = found.clone()
    return found.view(dtype).view(shape)

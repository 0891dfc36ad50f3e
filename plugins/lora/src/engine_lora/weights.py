"""An adapter's matrices, read for the layers of one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from engine.interfaces.quantization import LayerShape
from engine.types.errors import InvalidRequestError
from engine_lora.peft_folder import PREFIX, AdapterFolder, refusal

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
A, B = ".lora_A.weight", ".lora_B.weight"


class Part(NamedTuple):
    """One of a layer's names, and what of its outputs this rank has.

    Args:
        name: of the module, in the checkpoint.
        rows: of the module's outputs, in the order in which the layer has them: int64 [outputs].
        inputs: slice of the module's inputs. total: (outputs, inputs) of the whole module.
    """

    name: str
    rows: torch.Tensor
    inputs: slice
    total: tuple[int, int]


def parts_of(shape: LayerShape) -> list[Part]:
    """The parts of a layer: one for each of its names, in order."""
    fused = len(shape.names) == 1
    parts = []
    for name, outputs in zip(shape.names, [shape.outputs] if fused else [(o,) for o in shape.outputs], strict=True):
        rows: list[int] = []
        start = 0
        for shard in outputs:
            rows += range(start + shard.start, start + shard.start + shard.length)
            start += shard.total
        if (order := shape.orders.get(name)) is not None:
            rows = [rows[row] for row in order]
        parts.append(Part(name, torch.tensor(rows), shape.inputs.part, (start, shape.inputs.total)))
    return parts


class Read(NamedTuple):
    """What was read of an adapter.

    Args:
        layers: for each of the worker's layers A [r, inputs] and B [outputs, r], scaled, of each part; None for a part
            that is left as it is.
        others: modules of the adapter that are none of the worker's.
    """

    layers: list[list[tuple[torch.Tensor, torch.Tensor] | None]]
    others: list[str]


def read_weights(folder: AdapterFolder, layers: Sequence[Sequence[Part]], max_rank: int) -> Read:
    """Read an adapter. A matrix of another rank's layers is not read.

    Raises InvalidRequestError: its file is broken, or holds what is no LoRA of these layers; says what.
    """
    path, found = folder.path, dict[str, tuple[torch.Tensor, torch.Tensor]]()
    known = {part.name: part for layer in layers for part in layer}
    try:
        with safe_open(folder.weights, framework="pt", device="cpu") as tensors:
            modules = _modules(path, list(tensors.keys()))
            for module in modules:
                if module in known:
                    a, b = (tensors.get_tensor(modules[module] + end) for end in (A, B))
                    found[module] = _cut(folder, known[module], a, b, max_rank)
    except (SafetensorError, OSError) as error:
        raise refusal(path, f"its weights are truncated or broken: {error}", "fetch them again") from error
    others = [module for module in modules if module not in known]
    return Read([[found.get(part.name) for part in layer] for layer in layers], others)


def _modules(path: str, names: Sequence[str]) -> Mapping[str, str]:
    """By the module that is adapted, the beginning of its tensors' names. Raises InvalidRequestError for tensors that
    are no pairs of A and B."""
    found: dict[str, set[str]] = {}
    for name in names:
        for end in (A, B):
            if name.startswith(PREFIX) and name.endswith(end):
                found.setdefault(name.removesuffix(end), set()).add(end)
                break
        else:
            raise refusal(path, f"it holds {name!r}, which is no matrix of a linear layer", _why(name))
    for module, ends in found.items():
        if len(ends) != 2:
            raise refusal(path, f"of {module!r} it holds {', '.join(ends)} alone", "fetch the file again")
    if not found:
        raise refusal(path, "its file holds no matrix")
    return {module.removeprefix(PREFIX): module for module in found}


def _why(name: str) -> str:
    if "lora_embedding" in name:
        return "train it without the embedding among its target_modules, or merge it into the model's weights"
    if "magnitude_vector" in name:
        return "DoRA is not served: merge it into the model's weights"
    return "save it with PEFT, whose tensors are called base_model.model.<module>.lora_A.weight"


def _cut(
    folder: AdapterFolder, part: Part, a: torch.Tensor, b: torch.Tensor, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part, B scaled. Raises InvalidRequestError where the matrices are not those of the layer."""
    path, (outputs, inputs), rank = folder.path, part.total, folder.config.rank_of(part.name)
    if a.dtype not in PLAIN or b.dtype not in PLAIN:
        raise refusal(path, f"{part.name} is stored as {a.dtype} and {b.dtype}", "save it in float32 or bfloat16")
    if tuple(a.shape) != (rank, inputs) or tuple(b.shape) != (outputs, rank):
        found = f"A of {part.name} is {list(a.shape)} and B {list(b.shape)}"
        wanted = f"of this model, and of rank {rank}, they would be [{rank}, {inputs}] and [{outputs}, {rank}]"
        raise refusal(path, f"{found}; {wanted}", "name an adapter that was trained for this model")
    check_rank(path, part.name, rank, max_rank)
    wide = torch.promote_types(b.dtype, torch.float32)
    scaled = b[part.rows].to(wide) * folder.config.scale_of(part.name)
    return a[:, part.inputs].contiguous(), scaled


def check_rank(path: str, name: str, rank: int, max_rank: int) -> InvalidRequestError | None:
    """Raise InvalidRequestError for a rank that is too high."""
    if rank > max_rank:
        found = f"its rank is {rank} at {name}, and max_lora_rank is {max_rank}"
        raise refusal(path, found, f"start the engine with --adapter.max-lora-rank {rank}")
    return None

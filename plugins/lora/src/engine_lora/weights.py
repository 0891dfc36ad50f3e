"""An adapter's matrices, read for the layers of one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from engine.interfaces.quantization import LayerShape
from engine_lora.card import MOST_RANK
from engine_lora.peft_folder import PREFIX, AdapterFolder, refusal

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LINEAR, LOOKED_UP = (".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B")
COPIES = (".base_layer.weight", ".weight")
"""Of an embedding or a head, which PEFT saves beside the matrices of one of them."""
WRAPPED = ".base_layer"
"""Behind the module whose first parameter of two is adapted."""
FIRST, LAST = ("gate_up_proj", "up_proj"), ("down_proj",)
"""The parameters of a module with all experts, as transformers calls them."""
_SWAPS = (0, 19)
"""The PEFT from which on A reads a parameter's inputs, however it lies in memory; before, its second dimension."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [r, inputs] and B [outputs, r]."""


class Part(NamedTuple):
    """One of a layer's names, and what of its outputs this rank has.

    Args:
        name: of the module, in the checkpoint.
        rows: of the module's outputs, in the order in which the layer has them: int64 [outputs].
        inputs: slice of the module's inputs. total: (outputs, inputs) of the whole module.
        kind: of layer: "linear", "head", "embedding" or "expert".
    """

    name: str
    rows: torch.Tensor
    inputs: slice
    total: tuple[int, int]
    kind: str = "linear"


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
        parts.append(Part(name, torch.tensor(rows), shape.inputs.part, (start, shape.inputs.total), shape.kind))
    return parts


class Stack(NamedTuple):
    """A projection of all experts of a layer, which PEFT may adapt as one parameter.

    Args:
        module: that has the parameter, by its name in the checkpoint.
        alone: it has no other: its name is the parameter's.
        last: it is the second projection.
        layers: the experts' places among `Model.layers`. turns: how many parts of an expert take turns in its rows.
    """

    module: str
    alone: bool
    last: bool
    layers: Sequence[int]
    turns: int = 1


@dataclass
class Model:
    """What a worker has for adapters to change.

    Args:
        files: of the checkpoint.
        layers: the parts of each layer. stacks: projections of experts among them.
    """

    files: Sequence[str] = ()
    layers: list[list[Part]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)


class Read(NamedTuple):
    """What was read of an adapter.

    Args:
        layers: for each of the worker's layers A and B, scaled, as this rank has them, of each part; None for a part
            that is left as it is.
        others: modules of the adapter that are none of the worker's.
    """

    layers: list[list[Pair | None]]
    others: list[str]


def read_weights(folder: AdapterFolder, model: Model, max_rank: int) -> Read:
    """Read an adapter. A matrix of another rank's layers is not read.

    Raises InvalidRequestError: its file is broken, or holds what is no LoRA of these layers; says what.
    """
    path, places = folder.path, _places(model)
    found: list[list[Pair | None]] = [[None] * len(parts) for parts in model.layers]
    try:
        with safe_open(folder.weights, framework="pt", device="cpu") as tensors:
            modules, copies = _modules(path, list(tensors.keys()))
            others = []
            for module, (prefix, ends) in modules.items():
                place = next((places[name] for name in _spellings(module) if name in places), None)
                stacks = _stacks_of(folder, model, module)
                if place is None and not stacks:
                    others.append(module)
                    continue
                a, b = (tensors.get_tensor(prefix + end) for end in ends)
                if place is not None:
                    layer, index = place
                    part = model.layers[layer][index]
                    if (part.kind == "embedding") != (ends == LOOKED_UP):
                        raise refusal(path, f"{module} is no {'embedding' if ends == LOOKED_UP else 'linear layer'}")
                    found[layer][index] = _cut(folder, part, a, b, max_rank)
                for stack in stacks:
                    for layer, pairs in _unstacked(folder, model, stack, a, b, max_rank):
                        found[layer] = pairs
            for name, module in copies.items():
                _check_copy(path, model, name, module, tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise refusal(path, f"its weights are truncated or broken: {error}", "fetch them again") from error
    return Read(found, others)


def _places(model: Model) -> dict[str, tuple[int, int]]:
    """Of each module its layer and its place among the parts; not of those that several layers share."""
    found: dict[str, tuple[int, int]] = {}
    shared = set()
    for layer, parts in enumerate(model.layers):
        for index, part in enumerate(parts):
            if part.name in found:
                shared.add(part.name)
            found[part.name] = (layer, index)
    return {name: place for name, place in found.items() if name not in shared}


def _spellings(module: str) -> tuple[str, ...]:
    """A module's names: those of models without a head stand without their first part in some checkpoints, and a
    mixture's block has another in some."""
    other = module.removeprefix("model.") if module.startswith("model.") else f"model.{module}"
    return (module, other, *(name.replace(".mlp.", ".block_sparse_moe.") for name in (module, other)))


def _modules(path: str, names: Sequence[str]) -> tuple[Mapping[str, tuple[str, tuple[str, str]]], Mapping[str, str]]:
    """By the module that is adapted, the beginning of its tensors' names and their ends; and by their names the modules
    of whole matrices. Raises InvalidRequestError for tensors that are no pairs of A and B."""
    found: dict[str, set[str]] = {}
    copies: dict[str, str] = {}
    for name in names:
        end = next((end for end in (*LINEAR, *LOOKED_UP) if name.endswith(end)), None)
        copy = next((end for end in COPIES if name.endswith(end)), None) if end is None else None
        if not name.startswith(PREFIX) or (end is None and (copy is None or ".lora_" in name)):
            raise refusal(path, f"it holds {name!r}, which is no matrix of a layer", _why(name))
        if end is not None:
            found.setdefault(name.removesuffix(end), set()).add(end)
        else:
            assert copy is not None
            copies[name] = name.removeprefix(PREFIX).removesuffix(copy)
    modules = {}
    for module, ends in found.items():
        pair = next((pair for pair in (LINEAR, LOOKED_UP) if ends == set(pair)), None)
        if pair is None:
            raise refusal(path, f"of {module!r} it holds {', '.join(sorted(ends))} alone", "fetch the file again")
        modules[module.removeprefix(PREFIX)] = (module, pair)
    if not found:
        raise refusal(path, "its file holds no matrix")
    return modules, copies


def _why(name: str) -> str:
    if "magnitude_vector" in name:
        return "DoRA is not served: merge it into the model's weights"
    return "save it with PEFT, whose tensors are called base_model.model.<module>.lora_A.weight"


def _check_copy(path: str, model: Model, name: str, module: str, tensor: torch.Tensor) -> None:
    """Raise InvalidRequestError where a whole matrix is not the model's own of this name."""
    part = next((part for parts in model.layers for part in parts if part.name in _spellings(module)), None)
    if part is None or part.kind not in ("embedding", "head"):
        raise refusal(path, f"it holds {name!r}, a whole matrix in place of the model's", "merge it into the model")
    rows = part.total[part.kind == "embedding"]
    if len(tensor) != rows:
        found = f"{name!r} has {len(tensor)} rows, and the vocabulary of this model {rows}"
        remedy = "train it without resizing the embedding, or merge it into the model and serve that"
        raise refusal(path, f"{found}: it adds tokens that the model has no place for", remedy)
    own = _stored(model, module)
    if own is None or own.shape != tensor.shape or not torch.equal(own.to(tensor.dtype), tensor):
        found = f"{name!r} is not the model's own"
        if own is None:
            found = f"it holds {name!r}, which cannot be compared with the model's own"
        raise refusal(path, found, "save it with save_embedding_layers=False if the model's own is meant")


def _stored(model: Model, module: str) -> torch.Tensor | None:
    """The model's own matrix of an embedding or a head, which may be the embedding's; None where the checkpoint's form
    does not tell."""
    both = [part.name for parts in model.layers for part in parts if part.kind == "embedding"]
    for wanted in (_spellings(module), both):
        for file in model.files:
            if not str(file).endswith(".safetensors"):
                return None
            with safe_open(file, framework="pt", device="cpu") as tensors:
                names = {f"{name}.weight" for name in wanted} & set(tensors.keys())
                if names:
                    return tensors.get_tensor(names.pop())
    return None


def _cut(folder: AdapterFolder, part: Part, a: torch.Tensor, b: torch.Tensor, max_rank: int, key: str = "") -> Pair:
    """This rank's part, B scaled. Raises InvalidRequestError where the matrices are not those of the layer.

    key: by which patterns know the layer, if not by its name.
    """
    path, (outputs, inputs), key = folder.path, part.total, key or part.name
    rank = folder.config.rank_of(key)
    if a.dtype not in PLAIN or b.dtype not in PLAIN:
        raise refusal(path, f"{part.name} is stored as {a.dtype} and {b.dtype}", "save it in float32 or bfloat16")
    if part.kind == "embedding" and a.ndim == 2 and a.shape[1] > inputs:
        found = f"A of {part.name} is for {a.shape[1]} tokens, and the vocabulary of this model has {inputs}"
        remedy = "train it without resizing the embedding, or merge it into the model and serve that"
        raise refusal(path, f"{found}: it adds tokens that the model has no place for", remedy)
    if tuple(a.shape) != (rank, inputs) or tuple(b.shape) != (outputs, rank):
        found = f"A of {part.name} is {list(a.shape)} and B {list(b.shape)}"
        wanted = f"of this model, and of rank {rank}, they would be [{rank}, {inputs}] and [{outputs}, {rank}]"
        raise refusal(path, f"{found}; {wanted}", "name an adapter that was trained for this model")
    if rank > max_rank:
        found, needed = f"its rank is {rank} at {part.name}, and max_lora_rank is {max_rank}", folder.config.most
        if needed > MOST_RANK:
            raise refusal(path, f"{found}; {MOST_RANK} is the most that can be", "merge it into the model's weights")
        raise refusal(path, found, f"start the engine with --adapter.max-lora-rank {needed}")
    wide = torch.promote_types(b.dtype, torch.float32)
    return a[:, part.inputs].contiguous(), b[part.rows].to(wide) * folder.config.scale_of(key)


# -- parameters of all experts -----------------------------------------------------------------------------------------
def _stacks_of(folder: AdapterFolder, model: Model, module: str) -> list[tuple[Stack, str]]:
    """The projection that a module of target_parameters adapts, and the name of the parameter.

    Of a module with two of them, PEFT wraps the first one and then the whole: its matrices stand under
    `<module>.base_layer`, those of the second under `<module>`. Where one alone is adapted it stands there.
    """
    targets = {name.rpartition(".")[2] for name in folder.config.parameters}
    both = bool(targets & set(FIRST)) and bool(targets & set(LAST))
    wrapped = module.endswith(WRAPPED)
    found = []
    for stack in model.stacks if targets else ():
        if stack.module not in _spellings(module.removesuffix(WRAPPED)):
            continue
        if stack.alone:
            found += [(stack, f"{stack.module}.weight")]
        elif stack.last == (not wrapped and (both or bool(targets & set(LAST)))):
            names = targets & set(LAST if stack.last else FIRST)
            found += [(stack, f"{module.removesuffix(WRAPPED)}.{name}") for name in names]
    return found


def _unstacked(
    folder: AdapterFolder, model: Model, stack: tuple[Stack, str], a: torch.Tensor, b: torch.Tensor, max_rank: int
) -> list[tuple[int, list[Pair | None]]]:
    """The matrices of each expert, by its layer: of A [E * r, inputs], expert after expert, and B [outputs, r * E], in
    which experts take turns. Raises InvalidRequestError where they are for other experts."""
    (of, name), path = stack, folder.path
    count, rank = len(of.layers), folder.config.rank_of(name)
    parts = model.layers[of.layers[0]]
    outputs, inputs = sum(part.total[0] for part in parts), parts[0].total[1]
    shapes, straight = (tuple(a.shape), tuple(b.shape)), ((count * rank, inputs), (outputs, count * rank))
    turned = ((count * rank, outputs), (inputs, count * rank))
    if shapes not in (straight, turned):
        found = f"A of {name} is {list(a.shape)} and B {list(b.shape)}"
        wanted = f"of {count} experts of this model, and of rank {rank}, they would be {list(straight[0])} and "
        raise refusal(path, f"{found}; {wanted}{list(straight[1])}", "name an adapter that was trained for this model")
    swapped = shapes != straight
    if straight == turned and of.turns == 1 and not of.alone:
        if not folder.config.version:
            found = f"{name} is square, and which of its sides A reads depends on the PEFT that made it"
            raise refusal(path, found, "state its peft_version in adapter_config.json")
        swapped = folder.config.version < _SWAPS
    made = []
    for place, layer in enumerate(of.layers):
        mine_a, mine_b = a.view(count, rank, -1)[place], b.view(len(b), rank, count)[:, :, place]
        if swapped:
            mine_a, mine_b = mine_b.T, mine_a.T
        mine_b = mine_b.reshape(-1, of.turns, rank).transpose(0, 1).flatten(0, 1)
        rows = mine_b.split([part.total[0] for part in model.layers[layer]])
        pairs: list[Any] = [
            _cut(folder, part, mine_a, one, max_rank, name) for part, one in zip(model.layers[layer], rows, strict=True)
        ]
        made.append((layer, pairs))
    return made

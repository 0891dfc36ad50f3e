"""The forms in which draft heads are published, read into one: a config.json as models state theirs, and one name for
each tensor. Torch-free.

    EAGLE, EAGLE-2        SafeAILab's folders: a Llama config of one layer; fc, layers.0, embed_tokens
    EAGLE-3               SafeAILab's folders, SpecForge's: midlayer, fc over three streams, norm, lm_head, d2t, t2d
    eagle, eagle3         the `speculators` library: the layer's config in `transformer_layer_config`
    Medusa                FasterDecoding's folders: medusa_num_heads, medusa_num_layers; medusa_lm_head.pt
"""

from __future__ import annotations

import json
import os
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.types.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

EAGLE = "LlamaForCausalLMEagle"
EAGLE3 = "LlamaForCausalLMEagle3"
MEDUSA = "MedusaModel"
TENSORS = "draft_tensors"
"""Key of the config that is made here: the names of the tensors, of which some decide what the model computes."""

_RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    EAGLE: (("model.", ""), ("fusion_fc.", "fc."), ("transformer.", "layers.0.")),
    EAGLE3: (("model.", ""), ("midlayer.", "layers.0.")),
    MEDUSA: (("medusa_head.", ""),),
}
_PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
_ASKED = "open draft head {!r}"


class Head(NamedTuple):
    """A published head.

    Args:
        folder: where it lies.
        config: as a model's config.json, with `architectures`; `TENSORS` has the tensors' names.
        weights: files with tensors.
        shapes: of each tensor, by its name here; None for a second name of one, in a pickle.
        verifier: the model that it says it was trained for; "" where it says nothing.
    """

    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...] | None]
    verifier: str

    @property
    def architecture(self) -> str:
        """The name of its model's driver."""
        return str(self.config["architectures"][0])


def read_head(name: str) -> Head:
    """Read the folder's config.json and its tensors' names.

    Raises:
        ModelNotFoundError: there is no such folder, or no config.json in it.
        UnsupportedModelError: it is a head of a kind that is not served.
        CheckpointError: a file is missing or broken, or the tensors are none of such a head.
    """
    folder, asked = Path(os.path.expanduser(name)), _ASKED.format(name)
    if not os.path.isdir(folder):
        raise ModelNotFoundError(asked, f"there is no folder {folder.absolute()}", "name the folder of a draft head")
    if not os.path.isfile(folder / "config.json"):
        found = f"{folder} has no config.json"
        raise ModelNotFoundError(asked, found, "fetch it beside the weights: it says what kind of head they are")
    from engine_kit.hf_folder import read_json  # here: it takes a fifth of the time in which cards may be imported

    stated = read_json(folder / "config.json")
    verifier = stated.get("base_model_name_or_path")
    if "speculators_model_type" in stated:
        config, verifier = _of_speculators(asked, stated)
    elif "medusa_num_heads" in stated:
        config = {**stated, "architectures": [MEDUSA]}
    else:
        config = {**stated, "architectures": [_eagle_of(stated)]}
    architecture = config["architectures"][0]
    weights = _weights(asked, folder)
    stored = {name: shape for file in weights for name, shape in _tensors(file).items()}
    shapes = {renamed(architecture, name): shape for name, shape in stored.items()}
    blocks = config.get("medusa_num_layers", 1)
    marker = ("0.0.linear.weight" if blocks else "0.0.weight") if architecture == MEDUSA else "fc.weight"
    if marker not in shapes:
        kind = {EAGLE: "EAGLE head", EAGLE3: "EAGLE-3 head", MEDUSA: "set of Medusa heads"}[architecture]
        raise CheckpointError(
            asked,
            f"its tensors are those of no {kind}: {marker} is not among {', '.join(sorted(shapes)[:6]) or 'none'}",
            "name the folder of a draft head (an ordinary model drafts with --drafter draft_model)",
        )
    if architecture == MEDUSA and isinstance(count := config["medusa_num_heads"], int):
        # FasterDecoding's own configs say 2 beside files of 5 heads, which its code then takes.
        stored_heads = {name.partition(".")[0] for name in shapes if name[:1].isdigit()}
        config["medusa_num_heads"] = max(count, len(stored_heads))
    config[TENSORS] = sorted(shapes)
    return Head(folder, config, weights, shapes, str(verifier or ""))


def renamed(architecture: str, name: str) -> str:
    """A stored tensor's name as the model's body has it."""
    for old, new in _RENAMED.get(architecture, ()):
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def stream_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers behind which EAGLE-3 reads the residual stream, in the order in which fc joins them.

    SafeAILab's code reads what enters layers 2, L / 2 and L - 3, and a `speculators` config names layers that way;
    that of SpecForge and ModelOpt (`eagle_config`) names the layers that the stream leaves.

    Raises CheckpointError where the target has no such layers.
    """
    nested, entered = config.get("eagle_config"), config.get("eagle_aux_hidden_state_layer_ids")
    left = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, Mapping) else None
    if not left:
        left = [index - 1 for index in entered or (2, num_layers // 2, num_layers - 3)]
    if any(type(index) is not int or index not in range(num_layers) for index in left):
        raise CheckpointError(
            f"read the streams of layers {list(left)}, as the EAGLE-3 head asks for them",
            f"the target has layers 0 to {num_layers - 1}",
            "the head was made for another target",
        )
    return tuple(left)


def num_streams(config: Mapping[str, Any]) -> int:
    """How many streams EAGLE-3's fc joins."""
    nested = config.get("eagle_config")
    named = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, Mapping) else None
    return len(named or config.get("eagle_aux_hidden_state_layer_ids") or range(3))


def _eagle_of(stated: Mapping[str, Any]) -> str:
    """EAGLE-3's config has a vocabulary of its own, or says so by the name of its architecture; EAGLE's is Llama's."""
    named = str((stated.get("architectures") or [""])[0])
    return EAGLE3 if "draft_vocab_size" in stated or "eagle3" in named.lower() else EAGLE


def _of_speculators(asked: str, stated: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(config, the verifier's name)."""
    kind, layer = stated["speculators_model_type"], stated.get("transformer_layer_config")
    served = {"eagle": EAGLE, "eagle3": EAGLE3}
    if kind not in served:
        raise UnsupportedModelError(asked, f"its speculators_model_type is {kind!r}", f"served are {', '.join(served)}")
    if not isinstance(layer, dict):
        raise CheckpointError(asked, "config.json has no transformer_layer_config", "fetch config.json again")
    speculators = stated.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    own = {key: value for key, value in stated.items() if key not in ("speculators_config", "transformer_layer_config")}
    config = {**layer, **own, "architectures": [served[kind]]}
    config.setdefault("num_hidden_layers", 1)
    return config, (verifier.get("name_or_path") or "") if isinstance(verifier, dict) else ""


def _weights(asked: str, folder: Path) -> tuple[Path, ...]:
    """The files with tensors: safetensors where there are any, else a pickle of tensors."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return tuple(files)
    for name in _PICKLED:
        if (folder / name).is_file():
            return (folder / name,)
    raise CheckpointError(
        asked, f"{folder} has no *.safetensors, and none of {', '.join(_PICKLED)}", "fetch the weights"
    )


def _tensors(file: Path) -> dict[str, tuple[int, ...] | None]:
    """The names of a file's tensors, with their shapes, without torch."""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            return {name: tuple(found["shape"]) for name, found in header.items() if name != "__metadata__"}
        with zipfile.ZipFile(file) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
        return _pickled_shapes(pickled)
    except Exception as error:  # a file that is no such file breaks its reader in many ways
        raise CheckpointError(
            f"read the names of the tensors in {file}",
            f"the file is truncated or broken: {error!r:.80}",
            "fetch it again",
        ) from error


def _pickled_shapes(pickled: bytes) -> dict[str, tuple[int, ...] | None]:
    """Of named tensors, as `torch.save` writes them: a name, then a storage, an offset in it, and the sizes.

    Nothing is executed: the pickle's instructions are read.
    """
    shapes: dict[str, tuple[int, ...] | None] = {}
    name = ""
    numbers: list[int] | None = None
    for instruction, value, _ in pickletools.genops(pickled):
        if isinstance(value, str) and (value.endswith((".weight", ".bias")) or value in ("d2t", "t2d")):
            name, shapes[value] = value, None
        elif instruction.name == "BINPERSID" and name:
            numbers = []
        elif numbers is not None and isinstance(value, int) and instruction.name.startswith("BININT"):
            numbers.append(value)
        elif numbers is not None and "TUPLE" in instruction.name:
            shapes[name], name, numbers = tuple(numbers[1:]), "", None
    return shapes

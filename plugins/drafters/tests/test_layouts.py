"""Published heads are read, in each form; what is not one, is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import published
import pytest
import torch
from published import LAYER

from engine.types.errors import CheckpointError, EngineError, ModelNotFoundError, UnsupportedModelError
from engine_drafters.checkpoint import SCHEME, DraftHeadCheckpoint, DraftHeadReader
from engine_drafters.layouts import TENSORS, num_streams, read_head, stream_layers

LLAMA = {**LAYER, "architectures": ["LlamaForCausalLM"]}
EAGLE3 = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": published.DRAFTED}
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "somebody/target"}


def forms() -> dict[str, tuple[str, dict[str, Any], dict[str, Any], str]]:
    """By name: (architecture, config.json, tensors, file)."""
    eagle, eagle3, medusa = published.eagle(), published.eagle3(), published.medusa()
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in medusa.items()}
    return {
        "EAGLE": ("LlamaForCausalLMEagle", LLAMA, eagle, "model.safetensors"),
        "EAGLE, pickled": ("LlamaForCausalLMEagle", LLAMA, eagle, "pytorch_model.bin"),
        "EAGLE-3": ("LlamaForCausalLMEagle3", EAGLE3, eagle3, "model.safetensors"),
        "EAGLE-3, pickled": ("LlamaForCausalLMEagle3", EAGLE3, eagle3, "pytorch_model.bin"),
        "speculators, eagle": (
            "LlamaForCausalLMEagle", *published.of_speculators("eagle", eagle), "model.safetensors",
        ),
        "speculators, eagle3": (
            "LlamaForCausalLMEagle3",
            *published.of_speculators("eagle3", eagle3, draft_vocab_size=published.DRAFTED),
            "model.safetensors",
        ),
        "Medusa": ("MedusaModel", MEDUSA, medusa, "medusa_lm_head.pt"),
        "Medusa, safetensors": ("MedusaModel", MEDUSA, prefixed, "medusa_lm_head.safetensors"),
    }  # fmt: skip


def read(folder: Path) -> dict[str, torch.Tensor]:
    context: Any = SimpleNamespace(start=SimpleNamespace(files=DraftHeadCheckpoint.resolve(SCHEME + str(folder))))
    return dict(DraftHeadReader(context).weights())


@pytest.mark.parametrize("form", forms())
def test_every_form_gives_the_same_tensors_by_the_same_names(form: str, tmp_path: Path) -> None:
    architecture, config, tensors, file = forms()[form]
    published.write(tmp_path, config, tensors, file)
    head = read_head(str(tmp_path))
    assert head.architecture == architecture
    plain = {"LlamaForCausalLMEagle": published.eagle, "LlamaForCausalLMEagle3": published.eagle3}
    made = plain.get(architecture, published.medusa)()
    expected = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.items()}
    found = read(tmp_path)
    assert found.keys() == expected.keys() == head.shapes.keys() == set(head.config[TENSORS])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(tuple(expected[name].shape) == shape for name, shape in head.shapes.items())
    if architecture != "MedusaModel":
        assert head.config["hidden_size"] == published.HIDDEN and head.config["num_hidden_layers"] == 1
    assert head.verifier == ("somebody/target" if form.startswith(("spec", "Med")) else "")


def test_medusas_heads_are_counted(tmp_path: Path) -> None:
    """FasterDecoding's published configs say 2 where the file has 5."""
    published.write(tmp_path, MEDUSA | {"medusa_num_heads": 2}, published.medusa(heads=5), "medusa_lm_head.pt")
    assert read_head(str(tmp_path)).config["medusa_num_heads"] == 5
    published.write(tmp_path, MEDUSA | {"medusa_num_heads": 6}, published.medusa(heads=5), "medusa_lm_head.pt")
    assert read_head(str(tmp_path)).config["medusa_num_heads"] == 6


def test_shapes_of_a_pickled_module(tmp_path: Path) -> None:
    """What `torch.save(module.state_dict())` writes beside the tensors, and parameters in place of tensors."""
    stored = torch.nn.Sequential(torch.nn.Conv2d(1, 300, 2), torch.nn.Linear(70000, 2)).state_dict()
    stored["fc.weight"], stored["d2t"] = torch.nn.Parameter(torch.ones(4, 5)), torch.tensor(1)
    stored["again.weight"] = stored["fc.weight"]
    published.write(tmp_path, LLAMA, stored, "pytorch_model.bin")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert read_head(str(tmp_path)).shapes == shapes | {"again.weight": None}


def test_a_pickle_that_does_something_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    tensors: dict[str, Any] = {**published.medusa(), "evil": Evil()}
    published.write(tmp_path, MEDUSA, tensors, "medusa_lm_head.pt")
    assert read_head(str(tmp_path)).shapes == {name: tuple(t.shape) for name, t in published.medusa().items()}
    with pytest.raises(CheckpointError, match="weights_only"):
        read(tmp_path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_broken_file_is_named(file: str, tmp_path: Path) -> None:
    published.write(tmp_path, LLAMA, published.eagle(), file)
    whole = (tmp_path / file).read_bytes()
    for size in (4, len(whole) // 2):
        (tmp_path / file).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=file):
            read(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "error", "said"),
    [
        (LLAMA, {"model.embed_tokens.weight": torch.ones(2, 2)}, CheckpointError, "of no EAGLE head.*draft_model"),
        (MEDUSA, published.eagle(), CheckpointError, "of no set of Medusa heads"),
        (
            published.of_speculators("eagle", {})[0] | {"speculators_model_type": "mlp"},
            {},
            UnsupportedModelError,
            "mlp",
        ),
        ({"speculators_model_type": "eagle3"}, {}, CheckpointError, "transformer_layer_config"),
    ],
)
def test_what_is_no_head_is_refused(
    config: dict[str, Any], tensors: dict[str, Any], error: type[EngineError], said: str, tmp_path: Path
) -> None:
    published.write(tmp_path, config, tensors)
    with pytest.raises(error, match=said):
        read_head(str(tmp_path))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        read_head(str(tmp_path / "head"))
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read_head(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_head(str(tmp_path))


def test_which_streams_are_read() -> None:
    """SafeAILab's code and `speculators` name the layers that a stream enters, ModelOpt's those that it leaves."""
    assert stream_layers({}, 32) == (1, 15, 28)
    assert stream_layers({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, 32) == (1, 15, 28)
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 5]}}
    assert stream_layers(nested, 6) == (0, 2, 4, 5) and num_streams(nested) == 4 and num_streams({}) == 3
    for config, layers in ((nested, 5), ({}, 3), ({"eagle_aux_hidden_state_layer_ids": [0]}, 6)):
        with pytest.raises(CheckpointError, match="another target"):
            stream_layers(config, layers)

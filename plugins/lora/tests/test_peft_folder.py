"""Folders of PEFT: what is read of them, and what is refused, with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_adapters import write_adapter

from engine.types.errors import InvalidRequestError
from engine_lora.peft_folder import read_folder


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True: DoRA scales"),
        ({"bias": "lora_only"}, "changes the model's biases"),
        ({"lora_bias": True}, "biases of its own"),
        ({"modules_to_save": ["lm_head"]}, "brings whole modules in place of the model's, perhaps an embedding"),
        ({"trainable_token_indices": [1]}, "rows of the embedding"),
        ({"target_parameters": {"experts": 1}}, "no list of names"),
        ({"init_lora_weights": "pissa_niter_4"}, "whose weights were changed"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"kasa_config": {"beta": 1}}, "'kasa_config', which is not known here"),
        ({"rank_pattern": {"(": 4}}, "no pattern of names"),
        ({"rank_pattern": {"([a-z0-9._]+)+!": 4}}, "no pattern of names"),
        ({"rank_pattern": {"(" + "a" * 900 + "!": 4}}, "no pattern of names"),
        ({"rank_pattern": {"(a|b|)": 4}}, "no pattern of names"),
        ({"rank_pattern": {".*.*.*.*X": 4}}, "more than 3 places"),
        ({"rank_pattern": {"a{99999999999}": 4}}, "no pattern of names"),
        ({"lora_alpha": 10**400}, "an alpha is"),
        ({"rank_pattern": {"q_proj": 0}}, "a rank is 0"),
        ({"r": "8"}, "a rank is '8'"),
        ({"lora_alpha": float("nan")}, "an alpha is nan"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1], not an object"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    write_adapter(tmp_path / "a", 0)
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(InvalidRequestError) as error:
        read_folder(str(tmp_path / "a"))
    assert found in str(error.value) and str(tmp_path / "a") in str(error.value)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "adapter_config.json: No such file"),
        ({"adapter_config.json": "{"}, "is no JSON"),
        ({"adapter_config.json": "[]"}, "holds [], not an object"),
        ({"adapter_config.json": '{"peft_type": "LORA"}'}, "it has no adapter_model.safetensors"),
        ({"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.bin": ""}, "would run whatever code is in it"),
    ],
)
def test_folders_that_are_no_adapter(tmp_path: Path, files: dict[str, str], found: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidRequestError) as error:
        read_folder(str(tmp_path))
    assert found in str(error.value)
    with pytest.raises(InvalidRequestError, match="there is no such folder"):
        read_folder(str(tmp_path / "nowhere"))


def test_scales_are_those_of_peft(tmp_path: Path) -> None:
    """By the first pattern that is the end of a layer's name; by the root of the rank with rsLoRA."""
    patterns = {"rank_pattern": {"(q_proj|of_none)": 2, "mlp.up_proj": 16}, "alpha_pattern": {"layers.1.*.q_proj": 6}}
    plain = read_folder(write_adapter(tmp_path / "plain", 0, rank=4, **patterns)).config
    names = [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "x.up_proj",
    ]
    assert [plain.rank_of(name) for name in names] == [2, 2, 16, 4]
    assert [plain.scale_of(name) for name in names] == [4.0, 3.0, 0.5, 2.0] and plain.most == 16
    rooted = read_folder(write_adapter(tmp_path / "rooted", 0, rank=4, use_rslora=True)).config
    assert rooted.scale_of("any") == 8 / 4**0.5


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json", "added_tokens.json", "tekken.json", "tokenizer.model.v3", "own.model.v7",
        "additional_chat_templates/tools.jinja", "chat_templates/tools.jinja",
    ],
)  # fmt: skip
def test_another_revision_where_its_tokenizer_changes(tmp_path: Path, name: str) -> None:
    path = write_adapter(tmp_path / "a", 1)
    revisions = {read_folder(path).revision}
    for content in ("1", "2"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(content)
        revisions.add(read_folder(path).revision)
    assert len(revisions) == 3


def test_another_revision_where_anything_changes(tmp_path: Path) -> None:
    revisions = {read_folder(write_adapter(tmp_path / "a", seed)).revision for seed in (0, 1)}
    revisions.add(read_folder(write_adapter(tmp_path / "a", 1, lora_alpha=7)).revision)
    assert len(revisions) == 3
    assert read_folder(write_adapter(tmp_path / "b", 1, lora_alpha=7)).revision in revisions, (
        "the same files, elsewhere"
    )

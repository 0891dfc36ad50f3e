"""What is shipped for the bundled model: in the published layouts, small, and found by the model that it is for."""

import json
from typing import get_args

import msgspec
import pytest

from engine.types.model import ModelDescription
from engine_drafters.heads import FOLDER, TRAINED_FOR, Kind, find
from engine_drafters.layouts import EAGLE3, MEDUSA, read_head, stream_layers
from engine_reference.models.llama_card import Llama
from engine_tiny import model_folder

HIDDEN, VOCAB = 256, 4096


@pytest.fixture
def tiny() -> ModelDescription:
    return Llama.describe(json.loads((model_folder() / "config.json").read_text()))


def test_each_is_found_for_the_bundled_model_and_for_no_other(tiny: ModelDescription) -> None:
    other = msgspec.structs.replace(tiny, config=tiny.config | {"num_hidden_layers": 5})
    for kind in get_args(Kind):
        assert find(tiny, kind) == FOLDER / kind
        assert find(other, kind) is None
    assert TRAINED_FOR.items() <= tiny.config.items()


def test_together_they_have_less_than_six_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".safetensors", ".json")) < 6e6


def test_the_eagle_head_is_in_safeailabs_layout(tiny: ModelDescription) -> None:
    head = read_head(str(FOLDER / "eagle3"))
    inner, own = head.config["intermediate_size"], head.config["draft_vocab_size"]
    assert head.architecture == EAGLE3
    assert stream_layers(head.config, tiny.num_layers) == (1, 3, 5)
    assert head.shapes == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (256, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (128, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (128, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, 256),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.mlp.gate_proj.weight": (inner, HIDDEN),
        "layers.0.mlp.up_proj.weight": (inner, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, inner),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (own, HIDDEN),
        "d2t": (own,),
        "t2d": (VOCAB,),
    }


def test_the_medusa_heads_are_in_fasterdecodings_layout_and_share_the_models_head() -> None:
    head = read_head(str(FOLDER / "medusa"))
    assert head.architecture == MEDUSA and head.verifier == "tiny"
    assert head.config["original_lm_head"] is True
    assert head.shapes == {
        f"{number}.{block}.linear.{part}": shape
        for number in range(head.config["medusa_num_heads"])
        for block in range(head.config["medusa_num_layers"])
        for part, shape in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
    }


def test_the_draft_model_is_a_llama_of_one_layer_with_the_models_vocabulary() -> None:
    described = Llama.describe(json.loads((FOLDER / "draft" / "config.json").read_text()))
    assert (described.num_layers, described.vocab_size, described.max_model_len) == (1, VOCAB, 2048)

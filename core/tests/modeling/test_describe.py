"""What cards say of a config.json, in transformers 4's and 5's forms, and how they refuse."""

import json
import subprocess
import sys
from typing import Any

import pytest
from checkpoints import ARCHITECTURES
from plain import CARDS, LLAMA_FAMILY

from engine.interfaces.model import ModelNeed
from engine.types.errors import CheckpointError, UnsupportedModelError
from engine.types.parallel import Parallel
from engine_reference.models.llama_card import Llama, Mistral, Qwen2, Qwen3


def config_of(architecture: str = "LlamaForCausalLM", **more: Any) -> dict[str, Any]:
    """A small config.json."""
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 7,
        "bos_token_id": 1,
    } | more


def reasons(card: Any, **more: Any) -> list[str]:
    architecture = next(name for name, known in CARDS.items() if known is card)
    need = ModelNeed(architecture=architecture, config=config_of(architecture, **more))
    return card.mismatches(need) + card.unsupported(need)


def windows(card: Any, **more: Any) -> list[int | None]:
    architecture = next(name for name, known in CARDS.items() if known is card)
    specs = card.describe(config_of(architecture, **more)).kv_specs
    assert all((spec.kind == "sliding") == (spec.sliding_window is not None) for spec in specs)
    return [spec.sliding_window for spec in specs]


def test_llama() -> None:
    model = Llama.describe(config_of(rope_theta=1e4))
    assert (model.architecture, model.dtype, model.vocab_size, model.hidden_size) == (
        "LlamaForCausalLM",
        "bfloat16",
        100,
        64,
    )
    assert (model.num_layers, model.num_q_heads, model.max_model_len, model.soft_cap) == (4, 8, 512, None)
    assert (model.eos_token_ids, model.bos_token_id) == ((7,), 1)
    assert [(s.kind, s.num_kv_heads, s.head_size, s.sliding_window) for s in model.kv_specs] == [
        ("full", 2, 8, None)
    ] * 4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_by_transformers(checkpoints, architecture: str) -> None:
    """What this version of transformers writes, equals what version 4 wrote of the same model."""
    config = json.loads((checkpoints(architecture, rope="llama3") / "config.json").read_text())
    assert "rope_parameters" in config and "rope_scaling" not in config
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    parameters = dict(config["rope_parameters"])
    old |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters, "torch_dtype": config["dtype"]}
    card = CARDS[architecture]
    new_form, old_form = card.describe(config), card.describe(old)
    assert [getattr(new_form, f) for f in new_form.__struct_fields__ if f != "config"] == [
        getattr(old_form, f) for f in old_form.__struct_fields__ if f != "config"
    ]
    for form in (config, old):
        assert card.unsupported(ModelNeed(architecture=architecture, config=form)) == []


def test_token_ids_and_dtypes() -> None:
    assert Llama.describe(config_of(eos_token_id=[3, 4], bos_token_id=None)).eos_token_ids == (3, 4)
    silent = Llama.describe(config_of(eos_token_id=None, bos_token_id=None, torch_dtype=None))
    assert (silent.eos_token_ids, silent.bos_token_id, silent.dtype) == ((), None, "float32")
    assert Llama.describe(config_of(dtype="float16")).dtype == "float16"
    assert Llama.describe(config_of(torch_dtype="torch.float64")).dtype == "float64"


def test_head_sizes() -> None:
    assert Llama.describe(config_of(head_dim=48)).kv_specs[0].head_size == 48
    assert Llama.describe(config_of(head_dim=None)).kv_specs[0].head_size == 8
    assert Qwen2.describe(config_of("Qwen2ForCausalLM")).kv_specs[0].head_size == 8
    assert Qwen3.describe(config_of("Qwen3ForCausalLM")).kv_specs[0].head_size == 128  # transformers' default
    assert Qwen3.describe(config_of("Qwen3ForCausalLM", head_dim=16)).kv_specs[0].head_size == 16
    alone = config_of()
    del alone["num_key_value_heads"]
    assert Llama.describe(alone).kv_specs[0].num_kv_heads == 8


def test_windows() -> None:
    full = [None] * 4
    assert windows(Llama, sliding_window=9) == full  # transformers' Llama has none
    assert windows(Mistral, sliding_window=9) == [9] * 4
    assert windows(Mistral, sliding_window=None) == full
    assert windows(Mistral) == [4096] * 4
    for card in (Qwen2, Qwen3):
        assert windows(card) == full
        assert windows(card, sliding_window=9) == full
        assert windows(card, sliding_window=9, use_sliding_window=False, max_window_layers=1) == full
        assert windows(card, sliding_window=9, use_sliding_window=True, max_window_layers=1) == [None, 9, 9, 9]
        assert windows(card, sliding_window=9, use_sliding_window=True, max_window_layers=0) == [9] * 4
        assert windows(card, sliding_window=None, use_sliding_window=True, max_window_layers=0) == full
        assert windows(card, sliding_window=9, use_sliding_window=True) == full  # 28 layers come first
        types = ["sliding_attention", "full_attention"] * 2
        assert windows(card, sliding_window=9, use_sliding_window=True, layer_types=types) == [9, None, 9, None]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": None}, "'architectures'.*None.*llama"),
        ({"architectures": []}, "'architectures'"),
        ({"hidden_size": None}, "'hidden_size'.*missing"),
        ({"vocab_size": 0}, "'vocab_size'.*0"),
        ({"num_hidden_layers": "4"}, "'num_hidden_layers'.*'4'"),
        ({"num_attention_heads": 7}, "'hidden_size'.*64.*7"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads'.*3.*8"),
        ({"max_position_embeddings": None}, "max_position_embeddings.*missing"),
        ({"torch_dtype": "float8_e4m3fn"}, "'dtype'.*float8"),
        ({"eos_token_id": "</s>"}, "'eos_token_id'"),
        ({"head_dim": 9}, "9 of 9"),
    ],
)
def test_bad_keys_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Llama.describe(config_of(**change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["full_attention"]}, "each of the 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"use_sliding_window": 1}, "use_sliding_window"),
    ],
)
def test_bad_layer_types_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        Qwen2.describe(config_of("Qwen2ForCausalLM", **change))
    assert len(reasons(Qwen2, **change)) == 1


@pytest.mark.parametrize("card", LLAMA_FAMILY.values())
def test_unsupported(card: Any) -> None:
    """Features that the body lacks are each named."""
    assert reasons(card) == []
    assert reasons(card, hidden_act="swish", partial_rotary_factor=1.0, logits_scaling=1.0) == []
    for change, word in (
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "longrope", "long_factor": []}}, "longrope"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, "whole heads"),
        ({"vocab_size": None}, "vocab_size"),
    ):
        found = reasons(card, **change)
        assert len(found) == 1 and word in found[0], (change, found)
    architecture = next(name for name, known in CARDS.items() if known is card)
    need = ModelNeed(architecture=architecture, config=config_of(architecture), parallel=Parallel(tp=3))
    found = card.unsupported(need)
    assert found and all("3 ranks" in reason for reason in found)


def test_foreign_layer_types() -> None:
    assert reasons(Llama, layer_types=["full_attention"] * 4) == []
    assert "layer_types" in reasons(Llama, layer_types=["sliding_attention"] * 4)[0]
    assert reasons(Mistral, sliding_window=9, layer_types=["sliding_attention"] * 4) == []
    assert "layer_types" in reasons(Mistral, sliding_window=9, layer_types=["full_attention"] * 4)[0]
    with pytest.raises(UnsupportedModelError, match="proportional"):
        Llama.describe(config_of(rope_scaling={"type": "proportional"}))


def test_cards_are_light() -> None:
    """No card, and nothing that a card needs, imports torch."""
    code = (
        "import sys, engine_reference.models.llama_card, engine_reference.checkpoint_safetensors, engine.modeling\n"
        "import engine_kit.model_config, engine_kit.hf_folder\n"
        "heavy = {'torch', 'safetensors', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

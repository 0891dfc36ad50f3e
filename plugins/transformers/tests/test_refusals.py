"""What the fallback does not serve: by name, with the reason, before anything is computed."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, tokenizer
from fallback_table import ALONE
from greedy import make
from transformers.models.helium.modeling_helium import HeliumMLP

from engine import LLM
from engine.interfaces.model import ModelContext, ModelNeed
from engine.plugin import Registry, choose
from engine.plugin.points import MODEL
from engine.types.errors import CheckpointError, EngineError, UnsupportedModelError
from engine.types.parallel import Parallel
from engine_inspect.why import explain
from engine_sdk.conformance.model.small import small_config
from engine_transformers.body import TransformersBody
from engine_transformers.card import TransformersModel

HELIUM = "HeliumForCausalLM"
AT_HAND = f"transformers {transformers.__version__}"


def config_of(architecture: str, **changed: Any) -> dict[str, Any]:
    own = small_config(architecture, ALONE.get(architecture, {}))
    return {**own, **changed, "architectures": [architecture]}


def built(config: dict[str, Any], tp_size: int = 1) -> TransformersBody:
    """The body of such a model, on the last rank, without weights."""
    context = ModelContext(
        description=TransformersModel.describe(config),
        ops=cast("Any", SimpleNamespace(linear=None)),
        attention=cast("Any", None),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        tp_rank=tp_size - 1,
        tp_size=tp_size,
        group=cast("Any", object()),
    )
    return TransformersBody(context)


@pytest.mark.parametrize(
    ("architecture", "changed", "reason"),
    [
        ("NewForCausalLM", {}, f"{AT_HAND} has no decoder 'NewForCausalLM'$"),
        (
            "NewForCausalLM",
            {"auto_map": {"AutoModel": "x"}},
            "'NewForCausalLM'; the code that its auto_map names is not",
        ),
        ("T5ForConditionalGeneration", {}, "has no decoder 'T5ForConditionalGeneration'"),
        ("NewModel", {}, "has no decoder 'NewForCausalLM'"),
        (HELIUM, {"is_encoder_decoder": True}, "it is an encoder and a decoder"),
        (HELIUM, {"vision_config": {}}, "vision_config: it is made of several models"),
        (HELIUM, {"kv_lora_rank": 16}, "kv_lora_rank: its cache holds latent vectors"),
        (HELIUM, {"layer_types": ["conv", "full_attention"]}, "it has layers of type 'conv'"),
        (HELIUM, {"layers_block_type": ["mamba", "attention"]}, "layers of type 'attention'.*layers of type 'mamba'"),
        (HELIUM, {"layer_types": ["full_attention"]}, "'layer_types'.*each of the 2 layers"),
        (HELIUM, {"layer_types": ["sliding_attention"] * 2}, "'sliding_window'.*missing"),
        (HELIUM, {"num_hidden_layers": None}, "'num_hidden_layers'.*missing"),
        (HELIUM, {"vocab_size": "many"}, "'vocab_size'.*'many'"),
        (HELIUM, {"num_key_value_heads": 3}, "'num_key_value_heads'.*3 does not divide"),
        (HELIUM, {"rope_parameters": {"rope_type": "yarn", "factor": -1.0}}, "'factor'"),
    ],
)
def test_by_the_config(architecture: str, changed: dict[str, Any], reason: str) -> None:
    need = ModelNeed(architecture=architecture, config=config_of(HELIUM, **changed))
    assert re.search(reason, "; ".join(TransformersModel.unsupported(need)))


def test_ranks() -> None:
    need = ModelNeed(architecture=HELIUM, config=config_of(HELIUM), parallel=Parallel(tp=4))
    assert TransformersModel.unsupported(need) == ["2 KV heads are not divided over 4 ranks, and not copied"]
    experts = replace(need, architecture="FlexOlmoForCausalLM", config=config_of("FlexOlmoForCausalLM"))
    assert "it has routed experts, which are not divided over ranks here" in TransformersModel.unsupported(experts)


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert TransformersModel.unsupported(ModelNeed(architecture=HELIUM)) == ["transformers is not installed"]


@pytest.mark.parametrize(
    ("architecture", "changed", "tp_size", "found"),
    [
        ("PersimmonForCausalLM", {}, 2, "no tensor parallel plan .base_model_tp_plan. for PersimmonConfig"),
        ("FlexOlmoForCausalLM", {}, 2, "plan for ranks says 'moe_tp_experts' of model.layers.0.mlp.experts"),
        (
            "CwmForCausalLM",
            {"layer_types": None},
            1,
            "of types full_attention, sliding_attention for transformers, and by",
        ),
        ("MptForCausalLM", {}, 1, "its modules compute their attention themselves"),
        (HELIUM, {"hidden_act": "none such"}, 1, "cannot be built .KeyError.*none such"),
    ],
)
def test_by_what_transformers_knows(architecture: str, changed: dict[str, Any], tp_size: int, found: str) -> None:
    with pytest.raises(UnsupportedModelError, match=found):
        built(config_of(architecture, **changed), tp_size)


@pytest.mark.parametrize(
    ("architecture", "over", "left_out", "found"),
    [
        ("GptOssForCausalLM", {}, "", "layer 0 asks of attention what the engine's has not: s_aux"),
        ("JetMoeForCausalLM", {}, "", "layer 0 of transformers' model has num_key_value_heads on this rank = 4, not 2"),
        ("Gemma2ForCausalLM", {}, "attn_logit_softcapping", "has soft cap = 50.0, not None"),
        ("BertLMHeadModel", {"is_decoder": False}, "", "has causal = False, not True"),
    ],
)
def test_by_what_its_layers_ask(
    architecture: str, over: dict[str, Any], left_out: str, found: str, tmp_path: Path
) -> None:
    """Seen when the weights are there, by some tokens, before the engine has started."""
    make(tmp_path, architecture, over)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop(left_out, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=found):
        LLM(model=str(tmp_path), dtype="float32", model_impl="transformers")


def refused(folder: Path, architecture: str, config: dict[str, Any]) -> str:
    """What is said of a random checkpoint of this config."""
    model = getattr(transformers, architecture)
    torch.manual_seed(0)
    model(model.config_class(**config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model=str(folder), dtype="float32", model_impl="transformers")
    return caught.value.found


def test_positions_that_a_module_counts_itself(tmp_path: Path) -> None:
    """From 0 on in every step: the tokens of a prompt's second chunk would get the first one's."""
    usual = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    own = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    config = {**usual, **own, "is_encoder_decoder": False, "is_decoder": True, "vocab_size": VOCAB_SIZE}
    found = refused(tmp_path, "BartForCausalLM", {**config, "max_position_embeddings": 64, "init_std": 0.2})
    assert "counts positions by itself" in found


def test_a_module_that_looks_at_the_token_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a convolution does: it would be another request's."""
    plain = HeliumMLP.forward
    monkeypatch.setattr(HeliumMLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    found = refused(tmp_path, HELIUM, config_of(HELIUM, vocab_size=VOCAB_SIZE, initializer_range=0.2))
    assert "looks at other tokens of the step" in found


def test_an_architecture_that_nobody_serves(tmp_path: Path) -> None:
    config = {**config_of(HELIUM), "architectures": ["NewForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match=r"load NewForCausalLM.*\* \(engine-transformers .*has no decoder 'NewFor"):
        LLM(model=str(tmp_path))


def test_stages_and_listeners() -> None:
    need = ModelNeed(architecture=HELIUM, config=config_of(HELIUM), features=frozenset({"stages", "listeners"}))
    assert TransformersModel.mismatches(need) == [
        f"it does not serve {feature}, for its body does not walk its layers" for feature in ("listeners", "stages")
    ]


def test_why() -> None:
    """It is taken for what no other serves; of others it says that theirs come before."""
    registry = Registry.discover()
    for architecture, chosen, others in (
        (HELIUM, "*", {"transformers": ("fits", "it is '*' by another name")}),
        (
            "GraniteForCausalLM",
            "GraniteForCausalLM",
            {"*": ("fits", "is for this architecture alone, and comes before")},
        ),
    ):
        need = ModelNeed(architecture=architecture, config=config_of(architecture))
        (selection,) = choose(registry, MODEL, {architecture: need})
        assert selection.candidate.name == chosen
        outcomes = {outcome.candidate.name: outcome for outcome in explain(registry, "model", [selection])}
        assert outcomes[chosen].verdict == "chosen"
        for name, (verdict, reason) in others.items():
            assert outcomes[name].verdict == verdict and reason in outcomes[name].reasons[0]


def test_a_tensor_of_a_stack(tmp_path: Path) -> None:
    """One expert's tensor is missing, of another form, or there twice: the checkpoint's own name is said."""
    from safetensors.torch import load_file, save_file

    make(tmp_path, "FlexOlmoForCausalLM", {})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "experts.1." in name)
    for changed, found in (
        ({}, f"1 missing: {name}"),
        ({name: tensors[name][:, :3].contiguous()}, f"1 of the wrong form: {name}"),
        (
            {name: tensors[name], name.replace("experts.1.", "experts.9."): tensors[name].clone()},
            "1 unexpected: .*experts.9.",
        ),
    ):
        save_file({k: v for k, v in tensors.items() if k != name} | changed, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=found):
            LLM(model=str(tmp_path), dtype="float32")

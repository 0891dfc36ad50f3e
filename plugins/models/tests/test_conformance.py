"""Every model through the suite of engine-sdk, beside transformers: one row each."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from model_table import ENCODER_DECODERS, ENCODERS, ORACLES, POOLED, READS_SOUND, TABLE, WITH_STATES, WITHOUT_ORACLE

from engine_sdk.conformance import EncoderDecoderConformance, EncoderModelConformance, ModelConformance

QUICK = (
    r"^(?!test_(card_is_light|dtypes|padding|weights_are_cast|a_missing_tensor|a_tensor_of_another_form"
    r"|nothing_is_kept_between_calls"
    r"|an_unexpected_tensor|the_order_of_tensors|spellings_of_the_config|variants_of_the_config|every_tensor_matters))"
)
"""What all models have from the same loader and layers is tried quickly with one of them, and with all by
`make test-all`."""

OPTIONAL = ("final_logits_bias",)
"""What checkpoints of encoder-decoder models need not have."""

ENCODE = {**ENCODER_DECODERS, **READS_SOUND}
SUITES = {**dict.fromkeys(ENCODE, EncoderDecoderConformance), **dict.fromkeys(ENCODERS, EncoderModelConformance)}
for architecture, config in {**TABLE, **WITH_STATES, **WITHOUT_ORACLE, **POOLED, **ENCODERS, **ENCODE}.items():
    words = {"driver": architecture, "config": config}
    words |= {} if architecture == "GemmaForCausalLM" else {"quick": QUICK}
    words |= {"oracle": ORACLES[architecture]} if architecture in ORACLES else {}
    words |= {} if architecture not in ENCODE else {"unused": OPTIONAL}
    words |= {"copied": ("shared.weight",)} if architecture == "MT5ForConditionalGeneration" else {}
    globals()[f"Test{architecture}"] = type(f"Test{architecture}", (SUITES.get(architecture, ModelConformance),), words)

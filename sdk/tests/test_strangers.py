"""Models that strangers wrote out of tree, right ones: each passes the suite by three lines, without further words."""

from __future__ import annotations

from engine_gpt2.card import GPT2Card
from engine_mixtral.card import MixtralCard

from engine_sdk.conformance import ModelConformance


class TestGPT2(ModelConformance):
    card, architecture = GPT2Card, "GPT2LMHeadModel"


class TestMixtral(ModelConformance):
    card, architecture = MixtralCard, "MixtralForCausalLM"

"""The card of Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer, number
from engine_models.hybrid_card import HybridCard, factors, mamba2_form
from engine_states.forms import Mamba2Form


class FalconH1(HybridCard):
    """FalconH1ForCausalLM (TII 2025): every layer has attention and Mamba-2's mixer side by side, and multipliers."""

    body = "engine_models.falcon_h1:FalconH1Model"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024}

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba2Form:
        """Of every mixer."""
        if config.get("mamba_d_ssm") is None:
            inner = int(number(config, "mamba_expand", 2) * integer(config, "hidden_size"))
        else:
            inner = integer(config, "mamba_d_ssm")
        by = factors(config, "ssm_multipliers", 5)
        gate_last = flag(config, "mamba_norm_before_gate", True)
        return mamba2_form(config, inner)._replace(
            out_bias=flag(config, "projectors_bias", False),
            norm=("before_gate" if gate_last else "behind_gate") if flag(config, "mamba_rms_norm", False) else "none",
            factors=() if set(by) == {1.0} else by,
        )

    @classmethod
    def attends(cls, config: Mapping[str, Any]) -> list[bool]:
        """All."""
        return [True] * integer(config, "num_hidden_layers")

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """None; raises where the multipliers of feed-forward blocks make no sense."""
        factors(config, "mlp_multipliers", 2)
        return []

"""The card of drafter `mtp`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftModel
from engine.types.errors import ConfigError
from engine.types.model import ModelDescription
from engine_kit.model_config import integer

LAYERS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"DeepseekV3ForCausalLM": ("DeepSeekMTPModel", 0), "Qwen3NextForCausalLM": ("Qwen3NextMTP", 1)}
)
"""By the architecture of a model that of its layer for further tokens, and how many there are where the config is
silent: Qwen's says nothing of them."""
_COUNT = "num_nextn_predict_layers"


class MTPDrafter(DrafterCard):
    """Multi-token prediction (DeepSeek-AI, "DeepSeek-V3", 2024), from the target's own files."""

    framework = "torch"
    needs = frozenset({"hidden", "models"})
    body = "engine_drafters.eagle.body:EagleDrafterBody"

    @classmethod
    def models(cls, target: ModelDescription, options: DrafterOptions) -> tuple[DraftModel, ...]:
        """The layer behind the target's last one. Raises ConfigError where the target has none."""
        asked = f"drafter=mtp for a {target.architecture}"
        if target.architecture not in LAYERS:
            served = f"the layers for further tokens of {', '.join(LAYERS)} are served"
            raise ConfigError(asked, f"{served}; those of other models are not", "name another drafter")
        architecture, silent = LAYERS[target.architecture]
        if (count := integer(target.config, _COUNT, silent, low=0)) != 1:
            found = f"{_COUNT} of its config.json is {count}, and served is one layer"
            raise ConfigError(asked, found, "name another drafter")
        shares = frozenset({"embed", "head"})
        return (DraftModel(architecture=architecture, shares=shares, features=target.hidden_size),)

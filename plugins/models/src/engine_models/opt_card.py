"""The card of OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.interfaces.ops import MODEL_OPERATIONS
from engine_kit.model_config import integer
from engine_models.decoder_card import GELU, DecoderCard


class OPT(DecoderCard):
    """OPTForCausalLM (2022), but for OPT-350m, whose norms stand behind the blocks."""

    body = "engine_models.opt:OPTModel"
    operations = frozenset((*MODEL_OPERATIONS, "relu"))
    activation = "activation_function"
    activations: ClassVar[Mapping[str, str]] = {"relu": "relu", **GELU}
    foreign: ClassVar[Mapping[str, Any]] = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    }

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the feed-forward blocks' width."""
        return {**super().filled(config), "intermediate_size": integer(config, "ffn_dim")}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Embeddings of another size than the layers'."""
        size = integer(config, "hidden_size")
        other = integer(config, "word_embed_proj_dim", size)
        return (
            [] if other == size else [f"word_embed_proj_dim {other} is not hidden_size {size}: nothing projects them"]
        )

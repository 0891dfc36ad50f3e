"""The cards of the JAX models. What configs mean, and why one may not be served, the same models' torch cards say."""

from __future__ import annotations

from engine.interfaces.model import ModelCard, ModelNeed
from engine_models import gemma_card, mixtral_card, qwen_moe_card
from engine_reference.models import llama_card

_DIVIDED = (
    "the worker is one process, which divides a model over its own devices: leave the settings for ranks out, such as "
    "--tensor-parallel-size"
)


class JaxModel(ModelCard):
    """What they have in common. It stands before the other card among a class's bases."""

    framework = "jax"
    priority = -1  # who asks for a name alone means the torch card
    quantized = frozenset()
    operations = frozenset()
    captured_by = None
    walks = False
    batch_invariant = False
    body = "engine_tpu.models.decoder:Decoder"

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """Those of the same model for torch, and what this worker does without."""
        reasons = super().unsupported(need)
        if need.parallel.world > 1 or need.parallel.ep_size > 1:
            reasons.append(_DIVIDED)
        if stored := need.config.get("quantization_config"):
            method = stored.get("quant_method") if isinstance(stored, dict) else stored
            reasons.append(f"its weights are stored in the form of {method!r}, which this worker does not read")
        return reasons


class Llama(JaxModel, llama_card.Llama):
    """LlamaForCausalLM."""


class Mistral(JaxModel, llama_card.Mistral):
    """MistralForCausalLM."""


class Qwen2(JaxModel, llama_card.Qwen2):
    """Qwen2ForCausalLM."""


class Qwen3(JaxModel, llama_card.Qwen3):
    """Qwen3ForCausalLM."""


class Gemma2(JaxModel, gemma_card.Gemma2):
    """Gemma2ForCausalLM."""


class Gemma3(JaxModel, gemma_card.Gemma3):
    """Gemma3ForCausalLM."""


class Mixtral(JaxModel, mixtral_card.Mixtral):
    """MixtralForCausalLM."""


class Qwen3Moe(JaxModel, qwen_moe_card.Qwen3Moe):
    """Qwen3MoeForCausalLM."""

"""LoRA adapters: `LoRARequest` names one for `LLM.generate`."""

from engine_lora.requests import LoRARequest

__all__ = ["LoRARequest"]

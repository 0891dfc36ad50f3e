"""What adapters cost: 32 requests at once by the model alone, and over 8 adapters, in turns in one engine.

python plugins/lora/benchmarks/many_adapters.py --model dummy:0.6B --adapters 8 --requests 32 --rank 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine import LLM, SamplingParams
from engine.types.request import Adapter
from engine_lora import LoRARequest


def write(folder: Path, config: dict[str, Any], rank: int, seed: int) -> None:
    """An adapter of every linear layer of a Llama or Qwen3 with this config.json, in PEFT's form."""
    folder.mkdir()
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    shapes = {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (config["num_key_value_heads"] * size, hidden),
        "self_attn.v_proj": (config["num_key_value_heads"] * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = (torch.randn(rank, inputs) * 0.01).bfloat16()
            tensors[f"{module}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shapes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain))
    save_file(tensors, folder / "adapter_model.safetensors")


def seconds(llm: LLM, adapters: list[Adapter | None], requests: int, prompt: int, tokens: int) -> float:
    """A round's time: each request by the next of the adapters. Prompts are not found again."""
    salt = str(time.monotonic())
    prompts = [{"prompt_token_ids": [7 + i, *range(9, 9 + prompt)], "cache_salt": salt} for i in range(requests)]
    each = [adapters[i % len(adapters)] for i in range(requests)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(prompts, params, lora_request=each, use_tqdm=False)
    return time.perf_counter() - begin


def main() -> None:
    """Print the medians of the rounds, and what adapters cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dummy:0.6B")
    parser.add_argument("--dtype", default="auto")
    for name, default in (("adapters", 8), ("requests", 32), ("rank", 16), ("prompt", 32), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    settings = {"adapter": "lora", "adapter.max_loras": given.adapters, "adapter.max_lora_rank": given.rank}
    plain = {"model": given.model, "dtype": given.dtype, "max_num_seqs": given.requests, "max_model_len": 1024}
    with tempfile.TemporaryDirectory() as folder, LLM(**plain, **settings) as llm:
        assert llm.llm_engine.plan is not None
        adapters: list[Adapter | None] = []
        for number in range(given.adapters):
            write(Path(folder) / str(number), llm.llm_engine.plan.model.config, given.rank, number)
            adapters.append(LoRARequest(f"a{number}", number, Path(folder) / str(number)))
        sizes = given.requests, given.prompt, given.tokens
        kinds: dict[str, list[Adapter | None]] = {"none": [None], "one": adapters[:1], "all": adapters}
        for kind in kinds.values():
            seconds(llm, kind, *sizes)  # what is read, packed and placed for the first
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(given.rounds):
            for kind, of_kind in kinds.items():
                times[kind].append(seconds(llm, of_kind, *sizes))
    none = statistics.median(times["none"])
    for kind, found in times.items():
        median = statistics.median(found)
        speed = given.requests * given.tokens / median
        print(f"{kind:>4}: {median:.3f} s, {speed:,.0f} tokens/s, {100 * (median / none - 1):+.1f} %")


if __name__ == "__main__":
    main()

"""What dividing a model gains on processors: `python -m tests.benchmarks.parallel`.

One process of one thread against two, each of one thread: as two pipeline stages, as two ranks that share each layer,
or each sequence, by communicator `shm`, and as two engine cores with the whole model, which serve twice the requests.
All engines stand side by side and serve in turns (A B C A B C); idle ranks wait on a socket. Prints the median of
tokens per second of each, and the ratios; the bars are 1.7, 1.6, and 1.9 for cores. Ranks that share sequences divide
attention alone, so there is none: they gain where contexts are long. And so of the processor time that all processes
take for a token, which is what dividing costs: others who compute on the machine hardly change that. Waiting is not in
it.
Beside cores stand two engines that know nothing of each other, in turns with the rest: what the machine has for two,
which share its memory and its cache. Copies of a whole model cannot have more.
Stages overlap on different steps, and each step reads all weights of a stage: where reading them takes the time, as in
decodes of few rows, stages gain nothing but the second processor's bandwidth, and prompts (--input-len) gain most.
Nothing else should compute on the machine, which needs two processors and memory for three models.

With --model 1B-A0.3B, a mixture of the peers' benchmark, the third engine deals whole experts over two ranks, where the
second has a part of each on both: the bar is 0.9 times the second, within 10 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil

from engine import LLM, SamplingParams
from engine_reference.checkpoint_dummy.sizes import config_of
from tests.benchmarks.peers.checkpoint import checkpoint
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.peers.environment import default_cache

BARS = {"pipeline": ("one", 1.7), "tensor": ("one", 1.6), "data": ("one", 1.9), "experts": ("tensor", 0.9)}
"""Beside which, and how many times its tokens."""


def balanced_split(model: str, input_len: int, output_len: int) -> str:
    """Layers of two stages: the second has as many fewer as its head weighs, which computes for drawn tokens alone."""
    config = config_of(model)
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 3 * hidden * config["intermediate_size"] + 2 * hidden * heads * config["head_dim"]
    layers, head = config["num_hidden_layers"], hidden * config["vocab_size"] * output_len / (input_len + output_len)
    first = min(layers - 1, max(1, round((layers + head / layer) / 2)))
    return f"{first},{layers - first}"


def tokens_per_second(engines: Sequence[LLM], options: argparse.Namespace, seed: int, cores: int) -> float:
    """Of one batch for each core, prompts and all; engines work at the same time, each on its share."""
    ids = np.random.default_rng(seed).integers(0, 250, (cores * options.requests, options.input_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in ids]

    def share(place: int) -> int:
        outputs = engines[place].generate(prompts[place :: len(engines)], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    with ThreadPoolExecutor(len(engines)) as threads:
        began = time.perf_counter()
        tokens = sum(threads.map(share, range(len(engines))))
        return tokens / (time.perf_counter() - began)


def processor_seconds() -> float:
    """Of this process and all that it has started, since each began."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dummy:0.6B")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--step-tokens", type=int, default=256, help="at most: stages overlap where prompts take several"
    )
    parser.add_argument("--kinds", nargs="+", help="which beside the one process (default: all)")
    parser.add_argument("--split", help="layers of the two stages (default: by what they and the head weigh)")
    options = parser.parse_args()
    common: dict[str, Any] = {
        "model": options.model, "dtype": options.dtype, "executor": "process", "executor.threads": 1,
        "max_num_seqs": options.requests, "max_model_len": options.input_len + options.output_len + 1,
        "kv_cache_memory": "512MiB", "enable_prefix_caching": False, "max_num_batched_tokens": options.step_tokens,
    }  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {"one": {}, "tensor": {"tensor_parallel_size": 2, "communicator": "shm"}}
    names = {"one": "one process", "tensor": "2 ranks by shm"}
    mixture = MODELS.get(options.model)
    if mixture is None:
        split = options.split or balanced_split(options.model, options.input_len, options.output_len)
        kinds |= {
            "pipeline": {"pipeline_parallel_size": 2, "pipeline_parallel_split": split},
            "context": {"context_parallel_size": 2, "communicator": "shm"},
            "data": {"data_parallel_size": 2},
            "apart": {},
        }
        names |= {
            "pipeline": f"2 stages ({split})",
            "context": "2 share sequences",
            "data": "2 engine cores",
            "apart": "2 engines apart",
        }
    else:
        common["model"] = str(checkpoint(mixture, default_cache()))
        kinds["experts"] = {**kinds["tensor"], "enable_expert_parallel": True}
        names["experts"] = "2 ranks, whole experts"
    kinds = {kind: settings for kind, settings in kinds.items() if kind in ("one", *(options.kinds or kinds))}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        engines = {kind: [stack.enter_context(LLM(**common, **settings))] for kind, settings in kinds.items()}
        if "apart" in engines:
            engines["apart"] += engines["one"]
        for turn in range(options.rounds + 1):
            for kind, several in engines.items():
                cores = kinds[kind].get("data_parallel_size", len(several))
                before = processor_seconds()
                figure = tokens_per_second(several, options, turn, cores)
                if turn:  # the first warms up
                    found[kind].append(figure)
                    tokens = cores * options.requests * options.output_len
                    spent[kind].append((processor_seconds() - before) / tokens)
    medians = {kind: statistics.median(figures) for kind, figures in found.items()}
    costs = {kind: statistics.median(figures) for kind, figures in spent.items()}
    print(
        f"{options.model}, {options.requests} requests of {options.input_len} + {options.output_len} tokens, one thread"
    )
    for kind in kinds:
        beside, bar = BARS.get(kind, ("one", 0.0))
        beside = beside if beside in medians else "one"
        ratio = f"  {medians[kind] / medians[beside]:.2f} times {names[beside]}" if kind != "one" else ""
        ratio += f" (bar {bar})" if bar and beside == BARS[kind][0] else ""
        cost = f", {costs[kind] / costs['one']:.3f} times its processor time" if kind != "one" else ""
        print(f"{names[kind]:22}  {medians[kind]:8.1f} tokens/s{ratio}{cost}")
    figures = {f"{kind}_tokens_per_s": round(value, 2) for kind, value in medians.items()}
    print(json.dumps(figures | {f"{kind}_cpu_s_per_token": round(value, 4) for kind, value in costs.items()}))


if __name__ == "__main__":
    main()

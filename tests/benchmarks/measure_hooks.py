"""What hooks cost: `python -m tests.benchmarks.measure_hooks [--without | --listen]`, with a worker that does nothing.

Prints one line of JSON: the median of `LLMEngine.step` with 256 requests decoding, and requests of one token a second.
Both are of processor time, so that what else the machine does counts little.
With `--without` there is no relay at all, so that no call site has a hook to look at. With `--listen` a plugin that
does nothing implements every hook of the frontend and the core. No other hook plugin that is installed takes part.
Compare the three in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from types import ModuleType

from engine.config.settings import EngineConfig
from engine.frontend.assemble import InProcessClient, assemble_frontend
from engine.frontend.launch import launch
from engine.frontend.output_processor import OutputProcessor
from engine.llm import LLMEngine
from engine.plugin import HookRelay, PluginList, Registry, hookimpl
from engine.plugin.candidate import Candidate
from engine.plugin.hookspecs import HOOKSPECS
from engine.types.params import SamplingParams
from tests.benchmarks.null_core import VOCABULARY, NullSizes, null_core

RUNNING, STEPS, REQUESTS = 256, 300, 4000


def listener(process: str) -> Candidate:
    """A plugin that implements every hook of a process and does nothing; a filter lets all text pass."""
    module = ModuleType(f"silent_{process}")
    for name in (n for n in vars(HOOKSPECS[process]) if not n.startswith("_")):
        value = "lambda text, last: text" if name == "output_filter" else "app" if name == "http_middleware" else "None"
        arguments = {"rewrite_prompt": "prompt", "http_middleware": "app"}.get(name, "")
        space: dict[str, object] = {}
        exec(f"def {name}({arguments}): return {value}", space)
        setattr(module, name, hookimpl(space[name]))
    sys.modules[module.__name__] = module
    return Candidate(f"hooks.{process}", "silent", 0, "silent", "0", module.__name__)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without", action="store_true")
    which.add_argument("--listen", action="store_true")
    options = parser.parse_args()
    extra = [listener("frontend"), listener("core")] if options.listen else []
    registry = Registry.discover(extra, PluginList("engine,silent" if options.listen else "engine"))
    frontend = assemble_frontend(launch(EngineConfig(model="dummy:tiny"), registry))
    sizes = NullSizes(max_num_seqs=RUNNING, max_num_batched_tokens=8192, max_model_len=1024)
    core = null_core(EngineConfig(), sizes)
    core._hooks = None if options.without else HookRelay("core", registry)
    if options.without:
        frontend.inputs._hooks = None
        outputs = OutputProcessor(frontend.tokenizer, None, "tiny")
        frontend = replace(frontend, outputs=outputs)
    engine = LLMEngine(frontend, InProcessClient(core))
    vocabulary = min(VOCABULARY, frontend.inputs.vocab_size) - 8
    one = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
    rates, times = [], []
    for turn in range(5):
        began = time.thread_time()
        for index in range(REQUESTS // 5):
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": [8 + index % vocabulary] * 4}, one)
        while engine.has_unfinished_requests():
            engine.step()
        rates.append(REQUESTS / 5 / (time.thread_time() - began))
    long = SamplingParams(max_tokens=800, ignore_eos=True, seed=0)
    for index in range(RUNNING):
        engine.add_request(f"r-{index}", {"prompt_token_ids": [8 + index % vocabulary] * 4}, long)
    for _ in range(20):
        engine.step()
    for _ in range(STEPS):
        began = time.thread_time()
        engine.step()
        times.append(time.thread_time() - began)
    print(
        json.dumps({"step_us": statistics.median(times) * 1e6, "requests_per_s": statistics.median(rates)}), flush=True
    )


if __name__ == "__main__":
    main()

"""Mamba-2 beside transformers: `python -m tests.benchmarks.beside_transformers`, from the top of the repository.

A model of the form of Mamba-2 130M with random weights, the same for both, on the same threads: tokens a second of one
stream that decodes, and of a prompt, in turns (A B A B). transformers takes its path of plain torch: its other one is
of CUDA kernels, which a processor does not have. The time of a stream is that of its answer less that of its first
token. With `--clock processor` it is the processor's, of all processes: with one thread, so that other work on the
machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import transformers

from engine import LLM, SamplingParams

FORM = {
    "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1,
    "vocab_size": 50288, "tie_word_embeddings": True, "time_step_limit": [0.0, 1e6], "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
"""Of state-spaces/mamba2-130m."""


def processor_time() -> float:
    """Seconds of this process and of those that it has started."""
    here = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (here, *here.children(recursive=True)))


CLOCKS = {"wall": time.perf_counter, "processor": processor_time}


def timed(clock: Callable[[], float], call: Callable[[], object]) -> float:
    """Seconds."""
    start = clock()
    call()
    return clock() - start


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens of a stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = transformers.Mamba2Config(**FORM)
    model = transformers.Mamba2ForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    generator = torch.Generator().manual_seed(1)
    short, prompt = (torch.randint(1, 50000, (1, n), generator=generator) for n in (8, options.prompt))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _tokenizer(Path(folder))
        settings = {"max_num_seqs": 1, "num_kv_pages": 64, "block_size": 1024, "platform.threads": options.threads}
        with LLM(model=folder, dtype=options.dtype, **settings) as llm:
            print("engine: decode steps captured:", llm.llm_engine.client.worker.captured, flush=True)

            def ours(ids: torch.Tensor, count: int) -> None:
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                llm.generate({"prompt_token_ids": ids[0].tolist()}, params, use_tqdm=False)

            def theirs(ids: torch.Tensor, count: int) -> None:
                with torch.inference_mode():
                    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)

            rates: dict[str, list[tuple[float, float]]] = {"engine": [], "transformers": []}
            for number in range(options.rounds + 1):  # the first one is not counted
                for name, generate in (("engine", ours), ("transformers", theirs)):
                    # A prompt that is new each time: nothing of it is found in a cache.
                    whole = torch.randint(1, 50000, prompt.shape, generator=generator)
                    first = timed(clock, lambda generate=generate: generate(short, 1))
                    stream = timed(clock, lambda generate=generate: generate(short, 1 + options.new)) - first
                    of_prompt = timed(clock, lambda generate=generate, whole=whole: generate(whole, 1))
                    if number:
                        rates[name].append((options.new / stream, options.prompt / of_prompt))
    for place, what in enumerate(("decode of one stream", f"prompt of {options.prompt}")):
        mine, other = (statistics.median(rate[place] for rate in rates[name]) for name in rates)
        ratio = statistics.median(a[place] / b[place] for a, b in zip(*rates.values(), strict=True))
        unit = "tokens/s" if options.clock == "wall" else "tokens a second of processor time"
        rate = f"engine {mine:,.1f}, transformers {other:,.1f} {unit}"
        print(f"{what}, {options.dtype}, {options.threads} threads: {rate}; median of the rounds' ratios {ratio:.1f}")
    return 0


def _tokenizer(folder: Path) -> None:
    """One that the engine can load: of words that nobody uses."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(FORM["vocab_size"])}, unk_token="w0"))  # type: ignore[call-overload]
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

"""The fallback (`--model-impl transformers`) beside `transformers.generate`, on a random checkpoint of Qwen3's form.

    python -m tests.benchmarks.fallback

The same 16 requests, greedy, in turns: transformers computes them as one padded batch (`generate`, attention `sdpa`),
and one after another; Engine by its own scheduler. All in processes of their own, so that no memory is shared; each
first computes one short batch that does not count. The tokens of both are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

Work = list[tuple[list[int], int]]
"""Of each request the prompt and how many tokens are asked for."""
Answers = list[list[int]]
"""Of each request the tokens."""
REQUESTS = 16
SEED = 7


def make(folder: Path, layers: int) -> None:
    """Save the checkpoint: Qwen3-0.6B's sizes, with so many layers and a vocabulary of 32,768, in float32 rounded to
    bfloat16, so that both dtypes have the same numbers."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))  # prompts and answers are token ids
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def requests(longest: int, most: int) -> Work:
    """Prompts and output lengths: from a quarter of the longest to it, spread evenly, in random order."""
    import random

    numbers = random.Random(SEED)
    spread = [0.25 + 0.75 * i / (REQUESTS - 1) for i in range(REQUESTS)]
    prompts = [[numbers.randrange(3, 30000) for _ in range(round(longest * part))] for part in spread]
    outputs = [round(most * part) for part in numbers.sample(spread, REQUESTS)]
    return list(zip(prompts, outputs, strict=True))


def by_transformers(folder: str, dtype: str, work: Work, together: bool) -> Answers:
    """`generate` over one padded batch, as long as its longest request; or over each request alone."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def run(batch: Work) -> Answers:
        width = max(len(prompt) for prompt, _ in batch)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        most = max(count for _, count in batch)
        with torch.inference_mode():
            found = model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=most)
        return [row[width : width + count].tolist() for row, (_, count) in zip(found, batch, strict=True)]

    return timed(lambda w: run(w) if together else [row for one in w for row in run([one])], work)


def by_engine(folder: str, dtype: str, work: Work) -> Answers:
    """The offline engine, whose model is the fallback."""
    from engine import LLM, SamplingParams

    llm = LLM(model=folder, dtype=dtype, model_impl="transformers", max_num_seqs=REQUESTS)

    def run(batch: Work) -> Answers:
        params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in batch]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in batch], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    try:
        return timed(run, work)
    finally:
        llm.shutdown()


def timed(run: Callable[[Work], Answers], work: Work) -> Answers:
    """Warm up, run, print the seconds, and those of all processor cores together, as the last but one line."""
    run([(prompt[:8], 2) for prompt, _ in work])
    start, used = time.perf_counter(), time.process_time()
    found = run(work)
    print(time.perf_counter() - start, time.process_time() - used)
    return found


WAYS: dict[str, Callable[[str, str, Work], Answers]] = {
    "engine": by_engine,
    "batch": lambda *given: by_transformers(*given, together=True),
    "alone": lambda *given: by_transformers(*given, together=False),
}


def main() -> None:
    """Measure in turns, and print medians and ratios; or, with --way, one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--most", type=int, default=64, help="tokens of the longest output")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ways", default="engine,batch")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(WAYS[asked.way](asked.folder, asked.dtype, requests(asked.longest, asked.most))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), asked.layers)
        seconds: dict[str, list[float]] = {way: [] for way in asked.ways.split(",")}
        processor: dict[str, list[float]] = {way: [] for way in seconds}
        tokens: dict[str, Answers] = {}
        for _ in range(asked.pairs):
            for way in seconds:
                words = [sys.executable, "-m", "tests.benchmarks.fallback", *sys.argv[1:], f"--way={way}"]
                done = subprocess.run([*words, f"--folder={folder}"], check=True, stdout=subprocess.PIPE, text=True)
                took, answers = done.stdout.strip().splitlines()[-2:]
                for measured, part in zip((seconds, processor), took.split(), strict=True):
                    measured[way].append(float(part))
                tokens[way] = json.loads(answers)
                print(f"{way} {seconds[way][-1]:.2f} s, processor {processor[way][-1]:.2f} s", flush=True)
    total = sum(count for _, count in requests(asked.longest, asked.most))
    for name, measured in (("wall", seconds), ("processor", processor)):
        median = {way: statistics.median(found) for way, found in measured.items()}
        for way, took in median.items():
            beside = f", {took / median['engine']:.2f} times engine's" if "engine" in median else ""
            print(f"{name} seconds of {way}: {took:.2f}, {total / took:.1f} tokens a second{beside}")
    for way, answers in tokens.items():
        same = sum(a == b for a, b in zip(tokens.get("engine", answers), answers, strict=True))
        print(f"{same} of {REQUESTS} answers of {way} are engine's")


if __name__ == "__main__":
    main()

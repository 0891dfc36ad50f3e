"""What the bundled model can do: `python -m engine_tiny.evaluate [--backend engine|transformers]`.

Questions are held out: a fact is asked in a text that never occurs in training, sums have numbers that never do,
invented words and tool names likewise (well-known names and cities are shared, and follow-ups are drawn anew, not
held out). Greedy decoding; a bar that is missed is printed with by how much.
"""

import argparse
import itertools
import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from engine_tiny import model_folder
from engine_tiny.corpus import arithmetic, chat, smalltalk, stories
from engine_tiny.corpus.base import Message
from engine_tiny.generation import Backend, EngineBackend, TransformersBackend
from engine_tiny.layout import BOS, TOKEN_IDS
from engine_tiny.probe import Question, questions
from engine_tiny.render import Encoder
from engine_tiny.tokenizer import load_tokenizer

BARS = {"facts": 0.90, "tool call": 0.90, "tool call, unseen tools": 0.80, "JSON extraction": 0.90}
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def parse_tool_calls(text: str) -> list[tuple[str, Any]] | None:
    """(name, arguments) of each call, or None where one is not well formed."""
    calls = []
    for body in TOOL_CALL.findall(text):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return None
    return calls


def is_right(question: Question, text: str) -> bool:
    expected: Message = question.expected
    if expected.get("tool_calls"):
        wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]]
        return parse_tool_calls(text) == wanted
    if question.kind == "JSON extraction":
        try:
            return bool(json.loads(text) == json.loads(expected["content"]))
        except ValueError:
            return False
    return bool(text.strip() == expected["content"])


def exact_match(backend: Backend, encoder: Encoder, count: int, show: int = 0) -> dict[str, float]:
    asked = list(questions(count))
    answers = backend.generate([encoder.prompt(q.messages, q.tools) for q in asked], 128)
    right: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    for question, ids in zip(asked, answers, strict=True):
        text = encoder.tokenizer.decode(ids)
        if is_right(question, text):
            right[question.kind] += 1
        elif shown[question.kind] < show:
            shown[question.kind] += 1
            print(f"  wrong ({question.kind}): {question.messages[-1]['content']!r}\n    said {text!r}")
            print(f"    expected {question.expected.get('tool_calls') or question.expected['content']!r}")
    return {kind: right[kind] / total for kind, total in Counter(q.kind for q in asked).items()}


def repetition(backend: Backend, encoder: Encoder, count: int) -> tuple[float, float]:
    """Of greedy story continuations: the share that loops (a run of 8 tokens three times), and of repeated 4-grams."""
    rng = random.Random("repetition")
    prompts = []
    for _ in range(count):
        opening = stories.story(rng, "held_out").split(". ")[0] + "."
        prompts.append([TOKEN_IDS[BOS], *encoder.tokenizer.encode(opening, add_special_tokens=False).ids])
    loops = repeated = total = 0
    for ids in backend.generate(prompts, 300):
        eights = Counter(tuple(ids[i : i + 8]) for i in range(len(ids) - 7))
        loops += any(times >= 3 for times in eights.values())
        fours = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        repeated, total = repeated + len(fours) - len(set(fours)), total + len(fours)
    return loops / count, repeated / max(total, 1)


def far_memory(backend: Backend, encoder: Encoder, count: int, tokens: int) -> float:
    """What was told at the beginning of a conversation, asked for when so many tokens have been said."""
    rng = random.Random(f"far {tokens}")
    prompts, wanted = [], []
    for _ in range(count):
        messages, asked = smalltalk.memory(rng, "held_out")
        while len(prompt := encoder.prompt([*messages, asked[0]])) < tokens:
            messages += arithmetic.exchange(rng, "held_out")
        prompts.append(prompt)
        wanted.append(asked[1]["content"])
    answers = [encoder.tokenizer.decode(ids) for ids in backend.generate(prompts, 32)]
    return sum(answer == right for answer, right in zip(answers, wanted, strict=True)) / count


def perplexity(folder: Path, encoder: Encoder, count: int) -> dict[str, float]:
    """Of held-out documents, a token: of stories every token counts, of conversations what the assistant says."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses: dict[str, list[float]] = {}
    for document in itertools.islice(chat.documents(99, "held_out"), count):
        ids, targets = encoder.document(document)
        ids, targets = ids[:2048], targets[:2048]
        tokens = torch.tensor([ids])
        with torch.inference_mode():
            logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = -logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        losses.setdefault(document.kind, []).extend(chosen[targets[1:]].tolist())
    losses["all"] = [loss for part in losses.values() for loss in part]
    return {kind: math.exp(float(np.mean(part))) for kind, part in losses.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("engine", "transformers"), default="engine")
    parser.add_argument("--model", type=Path, default=model_folder())
    parser.add_argument("--count", type=int, default=200, help="questions of each kind")
    parser.add_argument("--show-wrong", type=int, default=0, help="print so many wrong answers of each kind")
    options = parser.parse_args()
    encoder = Encoder(load_tokenizer(options.model))
    backend: Backend = (
        EngineBackend(str(options.model)) if options.backend == "engine" else TransformersBackend(options.model)
    )
    rates = exact_match(backend, encoder, options.count, options.show_wrong)
    print(f"exact match, greedy, {options.count} held-out questions of each kind ({options.backend}):")
    for kind, rate in rates.items():
        verdict = ""
        if kind in BARS:
            short = BARS[kind] - rate
            verdict = f"   bar {BARS[kind]:.0%}: " + ("met" if short <= 0 else f"missed by {100 * short:.1f} points")
        print(f"  {kind:26s} {rate:7.1%}{verdict}")
    for tokens in (500, 1000, 1900):
        rate = far_memory(backend, encoder, min(options.count, 100), tokens)
        print(f"  {f'memory, {tokens} tokens back':26s} {rate:7.1%}")
    loops, repeated = repetition(backend, encoder, 50)
    print(f"greedy repetition, 50 stories: {loops:.1%} loop, {repeated:.1%} of 4-grams repeat one in the same story")
    try:
        figures = perplexity(options.model, encoder, 400)
    except ImportError:
        print("held-out perplexity: needs the extra `train` (torch, transformers)")
    else:
        print("held-out perplexity: " + ", ".join(f"{kind} {value:.3f}" for kind, value in sorted(figures.items())))


if __name__ == "__main__":
    main()

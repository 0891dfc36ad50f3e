"""Greedy tokens through the whole engine beside `transformers.generate`, of a random checkpoint of an architecture.

float32, as in plugins/reference/tests/parity: tokens are equal except after a position where the oracle's two best
logits are within 1e-4; the engine's log probabilities are within 1e-3 of the oracle's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, tokenizer

from engine import LLM, SamplingParams
from engine_sdk.conformance.model.small import quiet, small_config

NEW_TOKENS = 8
MARGIN = 1e-4
TOLERANCE = 1e-3
PROMPTS = (19, 5, 33, 1, 40, 16)
"""Lengths of the prompts; beside and across the blocks of 8, and longer than a step's budget."""
BUDGET = 24
PAGES = 16
"""Fewer than the requests need together (6 to 7 for the longest): they preempt each other."""


class Answer(NamedTuple):
    """The oracle's: tokens [n], and the logits [n, V] that they were taken from."""

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor


def saved(folder: Path, architecture: str, over: Mapping[str, Any]) -> Any:
    """Transformers' model of a random checkpoint that is saved; its config has `over` beside the suite's own."""
    config = small_config(architecture, {**over, "initializer_range": 0.2, "vocab_size": VOCAB_SIZE})
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    with quiet(), torch.no_grad():
        model = kind(kind.config_class(**config)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at 0 and norms at 1, where a mistake would not show
                parameter.normal_(std=0.2)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 0)  # states fade slowly, so that one that is lost shows
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == [architecture]
    return model


def make(folder: Path, architecture: str, over: Mapping[str, Any], repeated: bool = False) -> list[Answer]:
    """Transformers' answers of a random checkpoint that is saved, to each prompt alone, whose tokens may be few."""
    model = saved(folder, architecture, over)
    with quiet(), torch.no_grad():
        model.generation_config.eos_token_id = None
        generator = torch.Generator().manual_seed(1)
        return [
            _answer(model, torch.randint(3, 5 if repeated else VOCAB_SIZE, (1, n), generator=generator))
            for n in PROMPTS
        ]


def _answer(model: Any, prompt: torch.Tensor) -> Answer:
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Answer(prompt[0].tolist(), out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(out.logits))


def compare(expected: Answer, output: Any) -> int:
    """One completion against the oracle's; gives how many undecided positions there were."""
    assert len(output.token_ids) == NEW_TOKENS
    for position, (ours, theirs) in enumerate(zip(output.token_ids, expected.tokens, strict=True)):
        logprobs = expected.logits[position].log_softmax(-1)
        best = expected.logits[position].topk(2).values
        for token, entry in output.logprobs[position].items():
            assert entry.logprob == pytest.approx(logprobs[token].item(), rel=TOLERANCE, abs=TOLERANCE)
        if ours != theirs:
            assert (best[0] - best[1]).item() < MARGIN, f"position {position}: {ours} for {theirs}"
            return 1
    return 0


def served(folder: Path, answers: list[Answer], **settings: Any) -> int:
    """Hold an engine's completions, and once more that of the last but one, against the oracle's; gives how many tokens
    of the latter's prompt were cached."""
    settings = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "num_kv_pages": PAGES, **settings}
    llm = LLM(model=str(folder), dtype="float32", block_size=8, **settings)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
        prompts = [{"prompt_token_ids": answer.prompt} for answer in answers]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts[-2], params, use_tqdm=False)[0]
    finally:
        llm.shutdown()
    ties = sum(compare(answer, out.outputs[0]) for answer, out in zip(answers, outputs, strict=True))
    ties += compare(answers[-2], again.outputs[0])
    assert ties <= 1
    return int(again.num_cached_tokens)

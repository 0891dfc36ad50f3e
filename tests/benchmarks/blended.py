"""`python -m tests.benchmarks.blended`: answers with the same documents in other orders, beside full prefill.

The documents are stories that the model itself tells, so that it is at home in them. They are put in front of a
question, in shuffled orders; each order's answer (greedy) is compared with that of full prefill. Printed for each
ratio, over all orders: how often the first token is the same, how many tokens of an answer are the same before the
first that is not, and how many answers are the same to their end. The last row is what would come of it if the wrong
order were answered: how much the order itself matters.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from engine import LLM, SamplingParams
from engine.errors import EngineError

SEPARATOR = " # # "
QUESTION = "One day, the little dog"
BEGINNINGS = (
    "Once upon a time there was a girl named",
    "Tom had a red ball. He",
    "The cat sat on the",
    "A bear lived in the wood.",
    "Mum and Dad went to the",
    "There was a boat on the",
    "Lily wanted to bake a",
    "The bird could not",
    "Ben and Sue played in",
    "It was a cold day and",
)


class Agreement(NamedTuple):
    """Of answers with full prefill's.

    Args:
        reused: share of the prompts' tokens that were taken from elsewhere.
        first: share of the orders whose first token is the same.
        leading: share of an answer's tokens before the first that differs, on average.
        whole: share of the answers that are the same to their end.
    """

    reused: float
    first: float
    leading: float
    whole: float


def compared(found: Sequence[list[int]], expected: Sequence[list[int]], reused: float = 0.0) -> Agreement:
    """Answer by answer."""
    pairs = list(zip(found, expected, strict=True))
    leading = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(other)) for one, other in pairs
    ]
    n = len(pairs)
    return Agreement(
        reused,
        sum(at > 0 for at in leading) / n,
        sum(at / len(other) for at, (_, other) in zip(leading, pairs, strict=True)) / n,
        sum(at == len(other) for at, (_, other) in zip(leading, pairs, strict=True)) / n,
    )


def measure(
    model: str = "tiny",
    dtype: str = "float32",
    documents: int = 10,
    orders: int = 40,
    ratios: Sequence[float] = (0.0, 0.15, 0.5, 1.0),
    document_len: int = 80,
    output_len: int = 32,
    seed: int = 0,
) -> dict[str, Agreement]:
    """By ratio, and for "another order". Raises EngineError where the prompts do not fit the model."""
    settings: dict[str, Any] = {"model": model, "dtype": dtype, "max_num_seqs": 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    telling = [
        SamplingParams(temperature=0.8, seed=seed + i, max_tokens=document_len, ignore_eos=True)
        for i in range(documents)
    ]
    with LLM(**settings, enable_prefix_caching=False) as llm:
        beginnings = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(documents)]
        told = llm.generate(beginnings, telling, use_tqdm=False)
        texts = [begin + output.outputs[0].text for begin, output in zip(beginnings, told, strict=True)]
        draw = random.Random(seed)
        first, *shuffled = [SEPARATOR.join([*draw.sample(texts, documents), QUESTION]) for _ in range(orders + 1)]
        expected = [answer(llm, prompt, greedy)[0] for prompt in shuffled]
    found = {}
    for ratio in ratios:
        with LLM(**settings, evictor="cacheblend", options={"evictor": {"ratio": ratio}}) as llm:
            answer(llm, first, greedy)
            answers, lengths = zip(*[answer(llm, prompt, greedy) for prompt in shuffled], strict=True)
            found[f"ratio {ratio:g}"] = compared(answers, expected, llm.llm_engine.stats().reused_tokens / sum(lengths))
    found["another order"] = compared([*expected[1:], expected[0]], expected)
    return found


def answer(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[int], int]:
    """Its tokens, and how many the prompt has."""
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids, len(output.prompt_token_ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    made = argparse.ArgumentParser(prog="python -m tests.benchmarks.blended", allow_abbrev=False)
    made.add_argument("--model", default="tiny", help="a name or a folder (default: %(default)s)")
    made.add_argument("--dtype", default="float32", help="of weights and cache (default: %(default)s)")
    made.add_argument("--documents", type=int, default=10, metavar="N", help="of each prompt (default: %(default)s)")
    made.add_argument("--orders", type=int, default=40, metavar="N", help="shuffled ones (default: %(default)s)")
    made.add_argument("--ratios", default="0,0.15,0.5,1", metavar="R,...", help="default: %(default)s")
    made.add_argument("--document-len", type=int, default=80, metavar="N", help="tokens (default: about %(default)s)")
    made.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of documents and orders (default: %(default)s)")
    named = vars(made.parse_args(argv))
    named["ratios"] = [float(ratio) for ratio in named["ratios"].split(",")]
    try:
        found = measure(**named)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    prompts = f"{named['documents']} documents of {named['document_len']} tokens in {named['orders']} orders"
    print(
        f"{named['model']}, {named['dtype']}: {prompts}; answers of {named['output_len']} tokens, beside full prefill"
    )
    print(f"  {'':<16}{'reused':>8}{'first token':>14}{'leading tokens':>17}{'whole answer':>15}")
    for name, one in found.items():
        print(f"  {name:<16}{one.reused:>8.2f}{one.first:>14.2f}{one.leading:>17.2f}{one.whole:>15.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

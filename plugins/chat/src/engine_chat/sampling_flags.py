"""The flags of `engine generate` and `engine chat` that say how tokens are chosen."""

from __future__ import annotations

import argparse
from typing import Any

_PREFIX = "sampling."

NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "most tokens to generate"),
    ("min_tokens", int, "no end before this many tokens"),
    ("temperature", float, "0 takes the most likely token; higher is more random"),
    ("top_p", float, "keep the likeliest tokens whose probabilities sum to this"),
    ("top_k", int, "keep the k likeliest tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("presence_penalty", float, "against tokens that the output has already"),
    ("frequency_penalty", float, "the same, for each occurrence"),
    ("repetition_penalty", float, "divides the logits of tokens in prompt and output"),
)

DEFAULT_MAX_TOKENS = 128


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None = DEFAULT_MAX_TOKENS) -> None:
    """Add the flags; `max_tokens` is that flag's default, None for as many as fit.

    `--seed` is among the engine's: it seeds requests that bring no seed of their own.
    """
    group = parser.add_argument_group("sampling", "What is not given is as --generation-config says.")
    for name, number, text in NUMBERS:
        flag = "--" + name.replace("_", "-")
        if name == "max_tokens":
            text += f" (default: the model's, or {'as many as fit' if max_tokens is None else max_tokens})"
        group.add_argument(flag, type=number, metavar="N" if number is int else "X", dest=_PREFIX + name, help=text)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", dest=_PREFIX + "stop", help="end before this text; may be repeated"
    )
    group.add_argument(
        "--stop-token-ids",
        type=_ids,
        action="extend",
        metavar="ID,...",
        dest=_PREFIX + "stop_token_ids",
        help="end at these token ids",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        dest=_PREFIX + "ignore_eos",
        help="go on past the model's end of sequence",
    )


def sampling_keywords(namespace: argparse.Namespace) -> dict[str, Any]:
    """What was given, as keywords of `SamplingParams`."""
    return {name.removeprefix(_PREFIX): v for name, v in vars(namespace).items() if name.startswith(_PREFIX)}


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]

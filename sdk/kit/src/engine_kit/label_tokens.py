"""A classifier's head that is made, when a decoder is loaded, of those rows of its output matrix that belong to some
tokens: Qwen3-Reranker as it was published answers "yes" or "no". The config's keys are vLLM's:

classifier_from_token           the tokens, e.g. ["no", "yes"]
is_original_qwen3_reranker      one label: the second token's row less the first's: its sigmoid is the softmax of both
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.types.errors import CheckpointError
from engine.types.model import CheckpointFiles
from engine_kit.hf_folder import read_json
from engine_kit.model_config import architecture, flag, label_tokens

_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")


def with_label_rows(
    weights: Iterable[tuple[str, torch.Tensor]], files: CheckpointFiles
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, and behind them "score.weight" [labels, hidden_size] where the config asks for it: rows of
    "lm_head.weight", which is left out; of the embedding, where the two are tied.

    Raises CheckpointError where a token is not one of the tokenizer's, or the matrix is missing.
    """
    tokens = label_tokens(files.config)
    ids = [_id_of(token, Path(files.folder)) for token in tokens]
    tied = flag(files.config, "tie_word_embeddings", False)
    rows: torch.Tensor | None = None
    for name, tensor in weights:
        if ids and name in (_EMBEDDINGS if tied else ("lm_head.weight",)):
            rows = tensor[ids].clone()
        if not ids or name != "lm_head.weight":
            yield name, tensor
    if not ids:
        return
    if rows is None:
        asked = f"make the head of {architecture(files.config)} of the tokens {', '.join(tokens)}"
        raise CheckpointError(asked, "the checkpoint has no lm_head.weight", "use one of a model that generates")
    if flag(files.config, "is_original_qwen3_reranker", False):
        rows = rows[1:].double() - rows[:1].double()
    yield "score.weight", rows


def _id_of(token: str, folder: Path) -> int:
    tokenizer = read_json(folder / "tokenizer.json")
    for one in tokenizer.get("added_tokens") or ():
        if one.get("content") == token:
            return int(one["id"])
    vocabulary: Any = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of Unigram: pieces with their scores
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    if token not in vocabulary:
        asked, found = f"read classifier_from_token of {folder / 'config.json'}", f"{token!r} is no token"
        raise CheckpointError(asked, f"{found} of tokenizer.json", "write a token as tokenizer.json has it")
    return int(vocabulary[token])

"""The target in plain torch, and batches of texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_drafters.train.texts import Text


@dataclass(frozen=True)
class Batch:
    """B texts of up to T tokens, and their N roots: the tokens behind which drafts are made.

    Behind the root at p the target has just said the token p + 1, and draft number `step` is for the token
    p + 2 + step. The roots of one turn stand one after the other, so root n + step is so many tokens behind root n.

    Args:
        tokens: int64 [B, T].
        row: int64 [N]; whose root it is, ascending.
        root: int64 [N]; its position p, ascending in each text.
        place: int64 [N]; its number among the roots of its text.
        drafted: int64 [N]; how many tokens behind p + 1 the target says before its turn ends, at least 1.
    """

    tokens: torch.Tensor
    row: torch.Tensor
    root: torch.Tensor
    place: torch.Tensor
    drafted: torch.Tensor

    def behind(self, values: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """[B, T, ...] -> [N, ...]: of the tokens so many behind the roots (the text's last one, behind its end)."""
        return values[self.row, (self.root + ahead).clamp(max=values.shape[1] - 1)]


def make_batch(texts: Sequence[Text]) -> Batch:
    """Texts side by side, filled up with zeros at their ends, where no token of theirs can see them."""
    tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), dtype=np.int64)
    found = []
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        left = np.zeros(len(text.tokens) + 2, dtype=np.int64)  # how many are spoken from here on without a break
        for position in range(len(text.tokens) - 1, -1, -1):
            left[position] = left[position + 1] + 1 if text.spoken[position] else 0
        drafted = left[1:-1] - 1
        roots = np.flatnonzero(drafted > 0)
        found.append(np.stack([np.full(len(roots), row), roots, np.arange(len(roots)), drafted[roots]]))
    return Batch(torch.from_numpy(tokens), *torch.from_numpy(np.concatenate(found, axis=1)))


def batches(texts: Sequence[Text], rng: np.random.Generator, size: int) -> Iterator[Batch]:
    """Endless: batches of about `size` tokens, of texts of like lengths, in an order drawn anew for each round."""
    while True:
        order = rng.permutation(len(texts))
        made: list[list[int]] = []
        for at in range(0, len(order), 1024):
            made.extend(_cut(sorted(order[at : at + 1024], key=lambda i: len(texts[i].tokens)), texts, size))
        for number in rng.permutation(len(made)):
            batch = make_batch([texts[i] for i in made[number]])
            if len(batch.root):
                yield batch


def _cut(order: Sequence[int], texts: Sequence[Text], size: int) -> Iterator[list[int]]:
    """Indices into lists whose texts have `size` tokens when side by side."""
    part: list[int] = []
    for index in order:
        if part and (len(part) + 1) * len(texts[index].tokens) > size:
            yield part
            part = []
        part.append(index)
    yield part


class Target:
    """The model that the heads draft for, frozen.

    Args:
        model: a `transformers.LlamaForCausalLM`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.embedding: torch.Tensor = model.model.embed_tokens.weight
        self.head: torch.Tensor = model.lm_head.weight
        self._streams: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _module, _inputs, output: self._streams.append(output))

    @torch.no_grad()
    def states(self, tokens: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Tokens [B, T] -> the streams behind each layer, and the normed state behind the last: [B, T, H] each."""
        self._streams.clear()
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return list(self._streams), hidden

    @torch.no_grad()
    def says(self, batch: Batch, hidden: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The distribution [N, V] of the token that the first draft behind each root is for; of later drafts, that of
        the roots behind it.

        rows: int64 [v]; of these tokens alone ([N, v]).
        """
        head = self.head if rows is None else self.head[rows]
        return (batch.behind(hidden, 1) @ head.T).float().softmax(-1)

"""Pooling: one vector for each prompt (or one for each of its tokens) instead of text. What a request asks,
and what a model does. The names are vLLM's."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.types.checks import MAX_INT, check_flags, check_ranges, invalid
from engine.types.errors import InvalidRequestError

PoolingType = Literal["last", "cls", "mean"]
"""What stands for a prompt: the hidden state of its last token, of its first token, or the mean over all tokens."""
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
Activation = Literal["softmax", "sigmoid", "identity"]

_OPTIONAL = frozenset({"dimensions", "second_text_start", "step_tag_id"})

_VECTORS = ("embed", "token_embed")
_OF_TASKS = {
    "pooling_type": (
        ("embed",),
        "only 'embed' has a choice: 'token_embed' pools nothing, a classifier pools as it was trained",
    ),
    "normalize": (_VECTORS, "it is for embeddings"),
    "dimensions": (_VECTORS, "it is for embeddings"),
    "use_activation": (("classify", "token_classify"), "embeddings have no activation"),
    "step_tag_id": (("token_classify",), "it chooses tokens for the head to score"),
    "returned_token_ids": (("token_classify",), "it chooses labels of single tokens"),
}
"""What a parameter goes with, and why it does not go with other tasks."""

POOLING_TYPES: tuple[PoolingType, ...] = ("last", "cls", "mean")
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "token_embed", "classify", "token_classify")


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a request wants made of its hidden states.

    Args:
        task: "embed" (one vector), "token_embed" (one vector for each prompt token), "classify" (one number for each
            label), "token_classify" (the same for each prompt token); None takes what the call asks for, or what the
            model is for.
        pooling_type: "last", "cls" or "mean", for "embed"; None takes the model's own.
        normalize: scale vectors to length 1; None takes the model's own choice (True where it says nothing).
        dimensions: keep the first so many elements, before the scaling (Matryoshka embeddings, Kusupati et al. 2022);
            None keeps all.
        use_activation: False gives the head's bare logits instead of probabilities; None means True.
        step_tag_id: "token_classify" tells of the prompt tokens with this id alone, by which a process reward model's
            prompt ends each step; None: of all.
        returned_token_ids: of the labels "token_classify" tells these alone, by number and in this order, and the
            activation is over them; None: all.
        second_text_start: for pairs of texts: the first prompt token of the second one, for models that tell the two
            apart by token types. `LLM.score` fills it in; None: there is one text.

    Raises (from `verify`): InvalidRequestError.
    """

    task: str | None = None
    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    second_text_start: int | None = None

    def verify(self) -> None:
        """Check types and ranges, and that nothing is asked that the task does not have."""
        for name, known in (("task", POOLING_TASKS), ("pooling_type", POOLING_TYPES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise invalid(name, value, "there is no such one", f"use {', '.join(map(repr, known))}")
        check_flags(self, "normalize", "use_activation", optional=True)
        ranges = {"dimensions": (1, MAX_INT), "second_text_start": (1, MAX_INT), "step_tag_id": (0, MAX_INT)}
        check_ranges(self, ranges, _OPTIONAL)
        chosen = self.returned_token_ids
        if chosen is not None and not (chosen and all(type(one) is int and one >= 0 for one in chosen)):
            raise invalid("returned_token_ids", chosen, "these are no numbers of labels", "list one or more")
        for name, (tasks, found) in _OF_TASKS.items():
            value = getattr(self, name)
            if value is not None and self.task not in (None, *tasks):
                raise InvalidRequestError(f"{name}={value!r} with task={self.task!r}", found, f"leave {name} out")


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model pools where a request does not say.

    Args:
        pooling_type: see `PoolingType`.
        normalize: embeddings are scaled to length 1.
        dimensions: the sizes that embeddings may be cut to, as the config lists them; empty: any.
        num_labels: of the classification head; 0: the model has none, and embeds.
        activation: what makes the head's logits probabilities (or scores).
        token_labels: the head was trained on each token's hidden state, so that "token_classify" is served, too.
        max_tokens: of a prompt, where the model's files say less than it has positions for; None: they do not.
        lower_case: texts are lower-cased before they are tokenised.
    """

    pooling_type: PoolingType = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    num_labels: int = 0
    activation: Activation = "softmax"
    token_labels: bool = False
    max_tokens: int | None = None
    lower_case: bool = False

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What may be asked; the first is meant where a request names none."""
        labels: tuple[PoolingTask, ...] = ("token_classify", "classify") if self.token_labels else ("classify",)
        return labels if self.num_labels else ("embed", "token_embed")

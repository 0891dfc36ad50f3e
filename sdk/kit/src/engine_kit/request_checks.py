"""Whether the drivers at work can do what a request asks of them, checked before it is sent: grammars, and logits
processors; and whether its model pools so (entry-point group `engine_parts`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.interfaces.logits_processor import PARAMETERS, LogitsProcessorCard
from engine.interfaces.tokenizer import Tokenizer
from engine.plugin.hints import did_you_mean, how_to_install
from engine.types.checks import invalid
from engine.types.errors import InvalidRequestError, shown
from engine.types.model import ModelDescription
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine_kit.bad_words import bad_word_ids

if TYPE_CHECKING:
    from engine.interfaces.grammar import GrammarCard
    from engine.plugin import Selection
    from engine.types.structured_outputs import StructuredOutputsParams


class ConstraintCheck:
    """Refuses constraints that cannot be enforced.

    Args:
        grammars: the chosen drivers, for each kind of constraint in the order of their turns; () where there is none.
    """

    def __init__(self, grammars: Sequence[Selection[GrammarCard]]) -> None:
        self._cards = {chosen.candidate.name: chosen.card for chosen in grammars}
        self._turns: dict[str, list[str]] = {}
        for chosen in grammars:
            self._turns.setdefault(chosen.kind, []).append(chosen.candidate.name)

    @property
    def kinds(self) -> list[str]:
        """The kinds of constraint that some driver enforces."""
        return list(self._turns)

    @property
    def names(self) -> str:
        """The drivers, as an error names them: "'a', 'b'"."""
        return ", ".join(f"'{name}'" for name in self._cards)

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError, which names the keyword, for a constraint that no driver enforces."""
        constraint = params.structured_outputs
        if constraint is None:
            return
        try:
            self.verify(constraint)
        except InvalidRequestError as error:
            raise constraint.renamed(error) from error

    def verify(self, constraint: StructuredOutputsParams) -> None:
        """The same for a verified constraint, by its own name."""
        (kind,) = constraint.kinds
        refusals: list[tuple[str, InvalidRequestError]] = []
        for name in self._turns.get(kind, ()):
            try:
                self._cards[name].verify(constraint)
                return
            except InvalidRequestError as error:
                refusals.append((name, error))
        if refusals:
            raise constraint.refused(refusals)
        served = "; ".join(
            f"'{name}' enforces {', '.join(sorted(card.constraints)) or 'nothing'}"
            for name, card in self._cards.items()
        )
        raise InvalidRequestError(
            constraint.asked,
            f"no grammar driver at work enforces it: {served or 'there is none'}",
            f"{how_to_install('grammar')} and start without --grammar",
        )


class ProcessorArguments:
    """Checks requests against the logits processors at work, whose `cards` it is given."""

    def __init__(self, cards: Sequence[type[LogitsProcessorCard]], vocab_size: int) -> None:
        self._cards = tuple(cards)
        self._vocab_size = vocab_size
        self._served = {name for card in cards for name in card.parameters}
        self._keys = {key for card in cards for key in card.extra_args}

    def complete(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters with the ids of `bad_words` by the request's tokenizer, if every processor accepts them.

        Raises InvalidRequestError: a processor is not at work, a key is claimed by none, or an argument is refused.
        """
        for name in PARAMETERS:
            if getattr(params, name) and name not in self._served:
                raise InvalidRequestError(
                    f"{name}={shown(getattr(params, name))}", "no logits processor at work honours it", "install one"
                )
        for key in params.extra_args or ():
            if key not in self._keys:
                raise InvalidRequestError(
                    f"extra_args={{{key!r}: ...}}",
                    "no logits processor at work takes an argument of this name",
                    did_you_mean(key, self._keys) or "start the engine with --logits-processors and the one that does",
                )
        if params.bad_words:
            ids = params.bad_words_token_ids + bad_word_ids(params.bad_words, tokenizer)
            params = msgspec.structs.replace(params, bad_words=[], bad_words_token_ids=ids)
            params.verify_bad_words()
        for card in self._cards:
            if card.used_by(params):
                card.verify(params, self._vocab_size)
        return params

    def need_host_tokens(self, params: SamplingParams) -> bool:
        """Whether the request uses a processor that reads its tokens on the host."""
        return any(card.host_tokens and card.used_by(params) for card in self._cards)

    def check_something_is_left(self, params: SamplingParams, end_ids: Sequence[int]) -> None:
        """Raise InvalidRequestError where all tokens may be forbidden at some position.

        end_ids: that `min_tokens` forbids at first.
        """
        allowed = params.allowed_token_ids
        ends = frozenset(end_ids) if params.min_tokens else frozenset()
        if len(params.bad_words_token_ids) + len(ends) < (self._vocab_size if allowed is None else len(set(allowed))):
            return
        left = frozenset(range(self._vocab_size) if allowed is None else allowed) - ends
        if any(left <= forbidden for forbidden in _forbidden_together(params.bad_words_token_ids)):
            raise InvalidRequestError(
                "bad_words=..." if allowed is None else f"allowed_token_ids={shown(allowed)}",
                "bad_words, and min_tokens which forbids the ends, can leave no token to draw",
                "allow more tokens, or forbid fewer",
            )


def _forbidden_together(words: Sequence[Sequence[int]]) -> Iterator[set[int]]:
    """The largest sets of tokens that words forbid at one position: those whose beginnings are all ends of one another,
    as an output ends in all of them at once."""
    lasts: dict[tuple[int, ...], set[int]] = {(): set()}
    for *before, last in words:
        lasts.setdefault(tuple(before), set()).add(last)
    for ending in lasts:
        together: set[int] = set()
        for start in range(len(ending) + 1):
            together |= lasts.get(ending[start:], set())
        yield together


# -- pooling -----------------------------------------------------------------------------------------------------------
def check_pooling(params: PoolingParams, model: ModelDescription) -> None:
    """Raise InvalidRequestError where they make no sense, or this model cannot do what they ask."""
    params.verify()
    task = params.task or model.pooler.tasks[0]
    check_task(task, model)
    msgspec.structs.replace(params, task=task).verify()  # again: what does not go with a task that was left out
    labels = model.pooler.num_labels
    if max(params.returned_token_ids or (0,)) >= max(labels, 1):
        raise invalid("returned_token_ids", params.returned_token_ids, f"this model's head has {labels} labels")
    listed, dimensions = model.pooler.dimensions, params.dimensions
    if dimensions is not None and dimensions > model.hidden_size:
        found = f"this model's vectors have {model.hidden_size} elements"
        raise invalid("dimensions", dimensions, found, f"ask for {model.hidden_size} or fewer")
    if dimensions is not None and listed and dimensions not in (*listed, model.hidden_size):
        sizes = ", ".join(map(str, listed))
        raise invalid("dimensions", dimensions, f"this model was trained for {sizes}", "ask for one of these")


def check_task(task: Any, model: ModelDescription) -> None:
    """Raise InvalidRequestError where this engine does not serve the task."""
    if model.generates:
        raise InvalidRequestError(
            f"{task} with {model.architecture}",
            "this engine was started to generate text",
            'start it with runner="pooling" (--runner pooling)',
        )
    tasks = model.pooler.tasks
    if task not in tasks:
        found = "it has a classification head" if model.pooler.num_labels else "it has no classification head"
        raise InvalidRequestError(f"{task} with {model.architecture}", found, f"ask for {' or '.join(tasks)}")

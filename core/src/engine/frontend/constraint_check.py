"""Whether the grammar driver at work can enforce what a request asks for; checked before the request is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from engine.plugin.known import how_to_install
from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.interfaces.grammar import GrammarCard
    from engine.plugin import Selection
    from engine.types.params import SamplingParams
    from engine.types.structured_outputs import StructuredOutputsParams


class ConstraintCheck:
    """Refuses constraints that cannot be enforced.

    Args:
        grammar: the chosen driver; None where there is none.
    """

    def __init__(self, grammar: Selection | None) -> None:
        self._name = "" if grammar is None else grammar.candidate.name
        self._card = None if grammar is None else cast("type[GrammarCard]", grammar.card)

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError, which names the keyword, for a constraint that the driver does not enforce."""
        constraint = params.structured_outputs
        if constraint is None:
            return
        try:
            self._check(constraint)
        except InvalidRequestError as error:
            raise constraint.renamed(error) from error

    def _check(self, constraint: StructuredOutputsParams) -> None:
        (kind,) = constraint.kinds
        if self._card is None or kind not in self._card.constraints:
            served = "there is none" if self._card is None else f"'{self._name}' enforces {_list(self._card)}"
            raise InvalidRequestError(
                constraint.asked,
                f"the grammar driver at work does not enforce it: {served}",
                f"{how_to_install('grammar')} and start without --grammar",
            )
        self._card.verify(constraint)


def _list(card: type[GrammarCard]) -> str:
    return ", ".join(sorted(card.constraints)) or "nothing"

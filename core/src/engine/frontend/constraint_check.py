"""Whether a grammar driver at work can enforce what a request asks for; checked before the request is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.plugin.hints import how_to_install
from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.interfaces.grammar import GrammarCard
    from engine.plugin import Selection
    from engine.types.params import SamplingParams
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
        served = "; ".join(f"'{name}' enforces {_list(card)}" for name, card in self._cards.items())
        raise InvalidRequestError(
            constraint.asked,
            f"no grammar driver at work enforces it: {served or 'there is none'}",
            f"{how_to_install('grammar')} and start without --grammar",
        )


def _list(card: type[GrammarCard]) -> str:
    return ", ".join(sorted(card.constraints)) or "nothing"

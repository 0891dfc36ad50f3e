"""The operations that a model's card names, and no others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, cast

from engine.interfaces.context import WorkerContext
from engine.interfaces.experts import Experts, ExpertsNeed
from engine.interfaces.ops import FURTHER_OPERATIONS, OPERATIONS, OpsCard
from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
from engine.types.parallel import Parallel


class NamedOperations:
    """Reference operations for a body under test: what its card does not name is not there, as in a worker.

    Args:
        ops: all of them.
        named: by the model's card.
        defined: the bodies of those that are none of the reference's, see `defined_operations`.
    """

    def __init__(self, ops: Any, named: Collection[str], defined: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._ops = ops
        self._defined = defined
        self._named = {*(name for name in OPERATIONS if name not in FURTHER_OPERATIONS), *named}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert name in self._named, f"the body calls '{name}', which the card does not name among its operations"
        return getattr(self._defined.get(name, self._ops), name)


def defined_operations(named: Collection[str], context: WorkerContext) -> dict[str, Any]:
    """The bodies of the operations that installed drivers' cards define, by name: what they mean."""
    found: dict[str, Any] = {}
    if set(named) <= {*OPERATIONS}:
        return found
    for _, card in ranked(Registry.discover(), "ops")[0]:
        mine = cast("type[OpsCard]", card).defines.intersection(named)
        if mine:
            found |= dict.fromkeys(mine, load_body(card)(context))
    return found


def installed_experts(context: WorkerContext, size: int) -> Experts | None:
    """The first driver of the point `experts` that serves so many ranks; None where none is installed."""
    need = ExpertsNeed(device=str(context.device), parallel=Parallel(tp=size))
    for _, card in ranked(Registry.discover(), "experts")[0]:
        if not card.unsupported(need):
            return cast("Experts", load_body(card)(context))
    return None

"""A checkpoint's tensors under the names that transformers' modules give them."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from engine.types.errors import CheckpointError

logger = logging.getLogger(__name__)

_SHOWN = 6
_NOT_TOGETHER = "config.json and the weights do not belong together, or the architecture is another one"


class Conversion:
    """transformers' own mapping of a model's names: renames, and tensors that are made of several.

    Args:
        model: as transformers built it; the names are noted, and it is not kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._names = dict.fromkeys(model.state_dict(), True)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._of_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._prefix = model.base_model_prefix
        self._config = model.config
        heads = (r"^lm_head\.",) if model.base_model is model else ()  # of a bare model's files
        self._ignored = [re.compile(pattern) for pattern in (*(model._keys_to_ignore_on_load_unexpected or ()), *heads)]
        self._sources = self._expected(model) if self._converters else {}

    def _expected(self, model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
        """The checkpoint's names and shapes of what converters put together; nothing where they only work forwards."""
        try:
            stored = revert_weight_conversion(model, model.state_dict())
        except Exception as error:
            logger.debug("what %s stores is not known: %s", type(model).__name__, error)
            return {}
        return {name: tuple(tensor.shape) for name, tensor in stored.items() if self._renamed(name)[1] is not None}

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]], asked: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(the module's name, tensor) of each; those that are made of several come last. What has no place in the model
        keeps the checkpoint's name, unless transformers knows that it may be there.

        Raises CheckpointError where the tensors that belong together do not fit each other.
        """
        parts: dict[str, list[tuple[str, str, torch.Tensor]]] = {}
        waiting, problems = dict(self._sources), list[str]()
        for name, tensor in weights:
            renamed, pattern = self._renamed(name)
            if pattern is not None and renamed in self._names and (name in waiting or not self._sources):
                shape = waiting.pop(name, tuple(tensor.shape))
                if tuple(tensor.shape) != shape:
                    problems.append(f"1 of the wrong form: {name} {list(tensor.shape)} for {list(shape)}")
                parts.setdefault(renamed, []).append((name, pattern, tensor))
            elif name in self._sources:
                problems.append(f"1 there twice: {name}")
            elif renamed in self._names or not any(known.search(renamed) for known in self._ignored):
                yield renamed if pattern is None else name, tensor
        if waiting:
            problems.append(f"{len(waiting)} missing: {_some(list(waiting))}")
        if problems:
            raise CheckpointError(asked, "of its tensors " + "; ".join(problems), _NOT_TOGETHER)
        for target, found in parts.items():
            yield from self._converted(target, found, asked)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The module's name, and the pattern of the converter that makes its tensor."""
        found = rename_source_key(name, self._renamings, self._converters, self._prefix, self._names)
        if found[0] in self._names:
            return found
        plain = rename_source_key(name, [], [], self._prefix, self._names)
        return plain if plain[0] in self._names else found

    def _converted(
        self, target: str, found: list[tuple[str, str, torch.Tensor]], asked: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        converter = copy.deepcopy(self._of_pattern[found[0][1]])
        ordered = sorted(found, key=lambda part: dot_natural_key(part[0]))
        found.clear()  # the stream's tensors go as soon as they are put together
        names = [name for name, _, _ in ordered]
        for name, pattern, tensor in ordered:
            converter.add_tensor(target, name, pattern, tensor)
        ordered.clear()
        try:
            made: dict[str, Any] = converter.convert(target, config=self._config)
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
            found_out = f"{target} cannot be made of {_some(names)}: {error}"
            raise CheckpointError(asked, found_out, _NOT_TOGETHER) from error
        for name, tensor in made.items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

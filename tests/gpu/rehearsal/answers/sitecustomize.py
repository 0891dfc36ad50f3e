"""Where the host reads what a kernel should have written, it is told what a sound GPU would say.

Python imports this module at start in every process that has this folder in its path: the engine's own ones too.
Two answers cannot be zeros: tensors on the device that are compared (captured steps beside plain ones) are equal where
their shapes are, and of a row's drafts at least one token counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def of_torch(torch: Any) -> None:
    """`torch.equal` on the device."""
    real = torch.equal

    def equal(a: Any, b: Any) -> bool:
        if not a.is_cuda and not b.is_cuda:
            return bool(real(a, b))
        assert a.device == b.device, (a.device, b.device)
        return bool(a.shape == b.shape)

    torch.equal = torch.Tensor.equal = equal


def of_steps(drawing: Any) -> None:
    """How many tokens each row of a step with drafts gives."""
    real = drawing._put_drafted

    def put(*arguments: Any) -> None:
        *others, (drawn, counts, *rest) = arguments
        real(*others, [drawn, counts.clip(1), *rest])

    drawing._put_drafted = put


ANSWERS: dict[str, Callable[[Any], None]] = {"torch": of_torch, "engine.runner.drawing": of_steps}


class Finder(MetaPathFinder):
    """Changes the modules of `ANSWERS` once they have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for all other modules: the next finder has them."""
        change = ANSWERS.get(fullname)
        spec = None if change is None else PathFinder.find_spec(fullname, path, target)
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())

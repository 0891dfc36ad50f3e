"""The dispatch guard: proof that model code computes only through ops, attention, communicators and views.

A step that is recorded on a CPU as a list of native calls would silently lose anything else that torch computed
between them. While the guard is active, such an operation raises an error that names it and the line it stands on.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.interfaces.model import ModelContext, PagedAttention, PagedLatentAttention
from engine.types.errors import ContractError

T = TypeVar("T")
_TORCH = str(Path(torch.__file__).parent)


class DispatchGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active (`with guard:`), every tensor operation must be a view, or lie inside an object of `wrap`.

    Wrapping is done once, before the model is built, and costs one Python call when the guard is not active:

        guard = DispatchGuard()
        model = LlamaModel(guard.context(context))
        ...
        with guard:
            model.forward(state, walk)

    Raises (from the offending line):
        ContractError: names the operation, the file, the line and the function.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch is asked not to wrap `__torch_dispatch__` in `torch._dynamo.disable`: nothing here is compiled, and the
        first call of the wrapper imports the compiler (and sympy, and Triton), longer than torch itself takes."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, anything may be computed: for a walk's listeners and other code of the runner."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def wrap(self, target: T) -> T:
        """A stand-in for `target` (an `Ops`, a `PagedAttention`, a communicator) whose methods may compute."""
        return cast(T, _Allowed(self, target))

    def context(self, context: ModelContext) -> ModelContext:
        """The same context with its ops, its layers' attention and quantization, and its process group wrapped."""

        def attention(*args: Any, **named: Any) -> PagedAttention:
            return self.wrap(context.attention(*args, **named))

        def latent_attention(*args: Any, **named: Any) -> PagedLatentAttention:
            assert context.latent_attention is not None
            return self.wrap(context.latent_attention(*args, **named))

        group = None if context.group is None else self.wrap(context.group)
        quantization = {kind: self.wrap(driver) for kind, driver in context.quantization.items()}
        return dataclasses.replace(
            context,
            ops=self.wrap(context.ops),
            attention=attention,
            group=group,
            quantization=quantization,
            latent_attention=None if context.latent_attention is None else latent_attention,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let views and allowed operations through, refuse the rest."""
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        # In inference mode composite operations arrive whole. Some of them (reshape, contiguous) call themselves views
        # but may copy, so it is their parts that are judged.
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        return self.refuse(func, culprit(sys._getframe(1)), args, kwargs)

    def refuse(self, func: Any, line: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What becomes of an operation that is neither a view nor allowed: raises ContractError. `line` is where it
        stands. A guard that lets more through overrides this."""
        raise ContractError(
            "run the model with nothing but ops, attention, communicators and views",
            f"{func} at {line}",
            "compute it through an operation of engine.interfaces.ops, or once, when the model is built or loaded",
            point="model",
        )


class _Allowed:
    """Calls to it and to its methods run with the guard's permission."""

    def __init__(self, guard: DispatchGuard, target: Any) -> None:
        self._guard = guard
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._guard.allowed():
            return self._target(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        call = _permitted(self._guard, value)
        self.__dict__[name] = call  # found without __getattr__ from now on
        return call


def _permitted(guard: DispatchGuard, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with guard.allowed():
            return function(*args, **kwargs)

    return call


def culprit(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor this file's."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__ and not code.co_filename.startswith(_TORCH):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_qualname})"
        frame = frame.f_back
    return "an unknown line"

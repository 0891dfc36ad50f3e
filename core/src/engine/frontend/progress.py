"""The progress bar of offline use."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from engine.types.outputs import RequestOutput


class Progress:
    """A progress bar, or nothing.

    Args:
        use_tqdm: True for tqdm's bar, False for none, or what makes a bar from tqdm's arguments.
        total: requests.
    """

    def __init__(self, use_tqdm: bool | Callable[..., Any], total: int) -> None:
        self._bar: Any = None
        self._tokens = 0
        if use_tqdm and total:
            make: Any = use_tqdm
            if not callable(use_tqdm):
                from tqdm.auto import tqdm

                make = tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def advance(self, output: RequestOutput) -> None:
        """One more request has ended."""
        if self._bar is not None:
            self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = self._bar.format_dict["elapsed"] if hasattr(self._bar, "format_dict") else 0
            if elapsed:
                self._bar.set_postfix_str(f"{self._tokens / elapsed:.1f} tokens/s", refresh=False)
            self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

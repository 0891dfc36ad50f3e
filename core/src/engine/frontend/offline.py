"""Offline use at a terminal: a progress bar, and Ctrl-C between steps, never within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from engine.types.outputs import RequestOutput


@contextlib.contextmanager
def progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A progress bar, or nothing. What is entered is to be called with each request that has ended.

    Args:
        use_tqdm: True for tqdm's bar, False for none, or what makes a bar from tqdm's arguments.
        total: requests.
    """
    if not use_tqdm or not total:
        yield lambda output: None
        return
    make: Any = use_tqdm
    if not callable(use_tqdm):
        from tqdm.auto import tqdm

        make = tqdm
    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
    tokens = 0

    def advance(output: RequestOutput) -> None:
        nonlocal tokens
        tokens += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = bar.format_dict["elapsed"] if hasattr(bar, "format_dict") else 0
        if elapsed:
            bar.set_postfix_str(f"{tokens / elapsed:.1f} tokens/s", refresh=False)
        bar.update(1)

    with contextlib.closing(bar):
        yield advance


class DeferredInterrupt:
    """While it is entered, Ctrl-C is kept until `check` is called, which raises KeyboardInterrupt.

    A step that is torn apart would leave the engine core with half a plan. Only so many are kept: whoever insists gets
    out at once. Where the program has a handler of its own, or runs this off its main thread, nothing is changed.

    Args:
        patience: how often Ctrl-C is kept before it is raised where it falls.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._pressed = 0
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt where Ctrl-C was pressed."""
        if self._pressed:
            self._pressed = 0
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pressed >= self._patience:
            raise KeyboardInterrupt
        self._pressed += 1

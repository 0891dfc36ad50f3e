"""A progress bar of requests, as `LLM` shows one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from engine.types.outputs import RequestOutput


@contextlib.contextmanager
def progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar; what is entered is to be called with each request that has ended.

    Args:
        use_tqdm: True for tqdm's, or what makes a bar from tqdm's arguments.
        total: requests.
    """
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

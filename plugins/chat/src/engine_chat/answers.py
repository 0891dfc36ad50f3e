"""What a terminal shows of an answer, and why there may be nothing to show."""

from __future__ import annotations

_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters other than newline and tab: a model's output must not move the cursor,
    retitle the window or worse."""
    return text.translate(_CONTROL)


def why_empty(finish_reason: str | None, stop_reason: int | str | None) -> tuple[str, bool]:
    """The reason, and whether the model chose to end it.

    Args:
        finish_reason, stop_reason: see `engine.types.outputs.CompletionOutput`.
    """
    if finish_reason == "length":
        return "as many tokens as it may have were made, and they have no text to show", False
    if finish_reason != "stop":
        return f"it ended with {finish_reason!r}", False
    if isinstance(stop_reason, str):
        return f"the stop text {stop_reason!r} came first; leave it out of --stop", False
    if stop_reason is not None:
        return f"the stop token {stop_reason} came first; leave it out of --stop-token-ids", False
    return "the model ended it at once, with its end of sequence", True

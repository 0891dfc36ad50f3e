"""What a request's body says about the request itself, for what stands around the routes."""

from __future__ import annotations

from fastapi import Request

LONGEST_LABEL = 256
"""Characters of the client's own user that are logged."""


def note(request: Request, *users: str | None, cache_salt: str | None = None) -> None:
    """Remember of a request whom the client names as its own user (the first that is given), for the access log, and
    the salt of its prompts in the prefix cache, beside that of its API key."""
    state = request.scope.setdefault("state", {})
    if user := next(filter(None, users), None):
        state["end_user"] = user[:LONGEST_LABEL]
    if cache_salt is not None:
        state["own_salt"] = cache_salt

"""What the driver has to know of an engine, without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """One engine.

    Args:
        name: as it is asked for, and printed.
        module: run with `-m` as the worker.
        weights: the forms of weights that it serves.
        steps: arguments of pip, one call after the other; None means that the driver's own interpreter is used.
        install_environment: variables for the installation; "{jobs}" is filled in.
        environment: variables for the worker; "{compiled}" is a folder for what the engine compiles at run time,
            "{cores}" the cores' range ("0-3"), "{kv_gib}" the cache's size in whole GiB.
        about: how it is used, one sentence for the page.
    """

    name: str
    module: str
    weights: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...] | None
    about: str
    install_environment: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

"""A worker that writes down what it is told to sample."""

from __future__ import annotations

from typing import Any


class SamplingWorker:
    def __init__(self, message: object) -> None:
        self._heard: list[Any] = []

    def start(self) -> None:
        pass

    def sample(self, step_id: int, masks: object) -> None:
        self._heard.append((step_id, masks))

    def heard(self) -> list[Any]:
        return self._heard

    def shutdown(self) -> None:
        pass

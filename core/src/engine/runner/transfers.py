"""The connectors' worker halves around a step: pages out, pages in, and what could not be brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np
import torch

from engine.interfaces.executor import StepFuture
from engine.interfaces.kv_connector import KVConnectorWorker
from engine.runner.futures import FailedStep
from engine.types.plan import StepPlan, StepResult


class Transfers:
    """Runs the transfers of each plan before the plan's own work.

    Args:
        connectors: by driver, bound to the pool.
    """

    def __init__(self, connectors: Mapping[str, KVConnectorWorker]) -> None:
        self._connectors = dict(connectors)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, execute: Callable[[StepPlan], StepFuture]) -> StepFuture:
        """Launch a plan that has metadata for connectors. An error of a transfer is the future's.

        execute: launches the step itself.
        """
        metadata = plan.kv_metadata
        assert metadata is not None
        try:
            for name, content in metadata.items():
                self._connectors[name].save(content)
            for name, content in metadata.items():
                self._connectors[name].start_load(plan.step_id, content)
        except Exception as error:
            return FailedStep(error)
        return TransferStep(execute(plan), plan.step_id, [self._connectors[name] for name in metadata])


class TransferStep:
    """A step with transfers: implements `engine.interfaces.executor.StepFuture`.

    Args:
        inner: the step's own future.
        step_id: of the plan.
        connectors: those that had something to do.
    """

    def __init__(self, inner: StepFuture, step_id: int, connectors: list[KVConnectorWorker]) -> None:
        self._inner, self._step_id, self._connectors = inner, step_id, connectors
        self._result: StepResult | None = None

    def done(self) -> bool:
        """True once `result` would not block."""
        return self._inner.done()

    def result(self, timeout: float | None = None) -> StepResult:
        """The step's result, with the pages that could not be filled. Raises TimeoutError after `timeout` seconds."""
        if self._result is None:
            result = self._inner.result(timeout)
            failed = np.concatenate([c.step_result(self._step_id).failed_pages for c in self._connectors])
            self._result = msgspec.structs.replace(result, failed_pages=failed) if failed.size else result
        return self._result

"""What `LLMEngine.step` adds to a step of an engine core whose worker computes nothing: every request's text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engine.embedding import EngineConfig, LLMEngine, OutputKind, RequestState, launch
from engine.frontend.assemble import InProcessClient, assemble_frontend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.frontend.assemble import Frontend
    from engine.loop.engine_core import EngineCore
    from engine.types.request import EngineRequest

_MODEL = "dummy:tiny"
"""Its tokenizer makes text of the worker's tokens; the model is not loaded."""


def null_frontend() -> Frontend:
    """Tokenizer and processors. Raises the launcher's errors."""
    return assemble_frontend(launch(EngineConfig(model=_MODEL)))


def measure_engine_steps(
    core: EngineCore, frontend: Frontend, running: Iterable[EngineRequest], steps: int
) -> list[float]:
    """Whole calls of `LLMEngine.step()` over a core in which these requests run already; each with its new text."""
    for request in running:
        frontend.outputs.add(
            RequestState(request.request_id, None, request.prompt_token_ids, request.params, [request]),
            OutputKind.DELTA,
        )
    engine = LLMEngine(frontend, InProcessClient(core))
    measured: list[float] = []
    now = time.perf_counter
    for _ in range(steps):
        began = now()
        outputs = engine.step()
        measured.append(now() - began)
        assert len(outputs) == len(frontend.outputs)
    return measured

"""An engine in this process, with what a measurement has to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.bench.counting import Counter
from engine.bench.workload import Lengths
from engine.frontend.assemble import assemble_frontend, start_in_process
from engine.frontend.launch import launch
from engine.llm import LLMEngine
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.bench.report import Figure
    from engine.config.settings import EngineConfig
    from engine.frontend.launch import Launch
    from engine.types.start import WorkerReady


@dataclass(frozen=True)
class Session:
    """A started engine.

    Attributes:
        engine: to be stepped by the caller.
        plan: what the launcher decided.
        ready: what the worker answered.
        counter: counts its work.
    """

    engine: LLMEngine
    plan: Launch
    ready: WorkerReady
    counter: Counter

    @property
    def dtype(self) -> str:
        """Of weights and cache."""
        return self.plan.start.worker.dtype

    def check_lengths(self, inputs: Lengths, outputs: Lengths) -> None:
        """Raise ConfigError where a request of these lengths would not fit the model."""
        if inputs.high + outputs.high > self.plan.max_model_len:
            raise ConfigError(
                f"prompts of {inputs} tokens with {outputs} to generate",
                f"together that can be {inputs.high + outputs.high}, the engine's max_model_len is "
                f"{self.plan.max_model_len}",
                "lower --input-len or --output-len",
            )

    def figures(self) -> dict[str, Figure]:
        """The engine as figures."""
        return {
            "model": self.plan.model_name,
            "dtype": self.dtype,
            "num_parameters": self.ready.num_parameters,
            "weight_bytes": self.ready.weight_bytes,
            "step_weight_bytes": int(self.counter.step_bytes),
        }

    def title(self) -> str:
        """The engine in a line."""
        millions = self.ready.num_parameters / 1e6
        return f"{self.plan.model_name} ({millions:.1f} M parameters, {self.dtype})"


@contextmanager
def open_session(config: EngineConfig) -> Iterator[Session]:
    """Start an engine, and shut it down at the end. Raises the launcher's and the worker's errors."""
    plan = launch(config)
    frontend = assemble_frontend(plan)
    client = start_in_process(plan)
    engine = LLMEngine(frontend, client, plan)
    try:
        counter = Counter(plan.model, client.worker, plan.start.worker.dtype)
        yield Session(engine, plan, client.worker, counter)
    finally:
        engine.shutdown()

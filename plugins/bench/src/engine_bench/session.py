"""An engine in this process, with what a measurement has to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.embedding import LLMEngine, launch
from engine.frontend.assemble import assemble_frontend, start_in_process
from engine.types.errors import ConfigError
from engine_bench.counting import Counter
from engine_bench.workload import Lengths

if TYPE_CHECKING:
    from engine.embedding import EngineConfig, Launch
    from engine.loop.engine_core import EngineCore
    from engine.types.start import WorkerReady
    from engine_bench.report import Figure


@dataclass(frozen=True)
class Session:
    """A started engine.

    Attributes:
        engine: to be stepped by the caller.
        plan: what the launcher decided.
        ready: what the worker answered.
        counter: counts its work.
        core: what the engine steps.
    """

    engine: LLMEngine
    plan: Launch
    ready: WorkerReady
    counter: Counter
    core: EngineCore

    @property
    def dtype(self) -> str:
        """Of weights and cache."""
        return self.plan.start.worker.dtype

    def check_lengths(self, inputs: Lengths, outputs: Lengths, flags: str = "--input-len or --output-len") -> None:
        """Raise ConfigError where a request of these lengths would not fit the model; `flags` set them."""
        if inputs.high + outputs.high > self.plan.max_model_len:
            raise ConfigError(
                f"prompts of {inputs} tokens with {outputs} to generate",
                f"together that can be {inputs.high + outputs.high}, the engine's max_model_len is "
                f"{self.plan.max_model_len}",
                f"lower {flags}",
            )

    def check_running(self, running: int) -> None:
        """Raise ConfigError where so many requests do not find a slot each."""
        if running > self.plan.start.worker.max_num_seqs:
            raise ConfigError(
                f"{running} requests at once",
                f"the engine's max_num_seqs is {self.plan.start.worker.max_num_seqs}",
                "raise --max-num-seqs, or measure fewer",
            )

    @property
    def tokens_per_step(self) -> int:
        """The most that a request gets in one step: more than one where there is a drafter."""
        speculation = self.core.scheduler.drafts.speculation
        return 1 if speculation is None else 1 + speculation.num_tokens

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
        own_head = any((choice.point, choice.kind) == ("quantization", "head") for choice in plan.manifest.choices)
        counter = Counter(plan.model, client.worker, plan.start.worker.dtype, own_head)
        yield Session(engine, plan, client.worker, counter, client.core)
    finally:
        engine.shutdown()

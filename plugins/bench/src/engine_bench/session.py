"""An engine in this process, with what a measurement has to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.embedding import LLMEngine
from engine.types.errors import ConfigError
from engine_bench.counting import Counter
from engine_bench.workload import Lengths

if TYPE_CHECKING:
    from engine.embedding import EngineConfig, Launch
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
    """

    engine: LLMEngine
    plan: Launch
    ready: WorkerReady
    counter: Counter

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
    """Start an engine, and shut it down at the end.

    Raises ConfigError where the settings ask for several cores, and the launcher's and the worker's errors.
    """
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}",
            "this measures one engine core in its own process",
            "leave data_parallel_size out here",
        )
    with LLMEngine.from_engine_args(config) as engine:
        plan, ready = engine.plan, engine.client.worker
        assert plan is not None
        worker = plan.start.worker
        own_head = any((choice.point, choice.kind) == ("quantization", "head") for choice in worker.choices)
        counter = Counter(plan.model, ready, worker.dtype, own_head, worker.kv_cache_dtype)
        yield Session(engine, plan, ready, counter)

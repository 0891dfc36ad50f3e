"""`python -m tests.benchmarks scheduler --all`: every figure of the engine's own work in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from engine.plugin import Registry, choose_one
from engine.plugin.points import EVICTOR
from engine_bench.report import Report
from tests.benchmarks.kv_parts import PAGES_PER_CALL, PROMPT, time_evictor, time_hashing
from tests.benchmarks.scheduler import SchedulerOptions, measure_scheduler

if TYPE_CHECKING:
    from engine.embedding import EngineConfig


class _Case(NamedTuple):
    """One run of the scheduler: the name of its figures, and what is asked."""

    name: str
    running: int
    waiting: int = 0
    drafts: int = 0
    kv_tables: int = 1


_CASES = (
    _Case("one", 1),
    _Case("full", 256),
    _Case("queue", 256, 10000),
    _Case("drafts", 256, 10000, drafts=3, kv_tables=3),
)
_COLUMNS = ("step_ms", "cpu_ms", "core_step_ms", "engine_step_ms")


def measure_all(config: EngineConfig, steps: int, input_len: int) -> Report:
    """Run all cases, and the KV manager's parts. Raises PluginError where a driver cannot be had."""
    report = Report(
        f"the engine's own work without a model, {steps} steps each: median, and the best in brackets; "
        f"drafts: {_CASES[-1].drafts} for each request, {_CASES[-1].kv_tables} KV tables",
        {"bench": "scheduler_all", "steps": steps, "input_len": input_len, "block_size": config.block_size},
    )
    report.row("running + waiting", "step, ms", "of processor", "EngineCore.step", "LLMEngine.step")
    for case in _CASES:
        options = SchedulerOptions(
            running=case.running, waiting=case.waiting, steps=steps, input_len=input_len,
            drafts=case.drafts, kv_tables=case.kv_tables,
        )  # fmt: skip
        figures = measure_scheduler(config, options).figures
        for name in _COLUMNS:
            for quantile in ("p0", "p50", "p99"):
                report.figures[f"{case.name}_{name}_{quantile}"] = figures[f"{name}_{quantile}"]
        label = f"{case.running} + {case.waiting}" + (", drafts" if case.drafts else "")
        report.row(label, *(f"{figures[f'{n}_p50']:.4f} ({figures[f'{n}_p0']:.4f})" for n in _COLUMNS))
    _measure_parts(report, config)
    return report


def _measure_parts(report: Report, config: EngineConfig) -> None:
    registry = Registry.discover(plugins=config.plugin_list)
    asked, given = config.asked("evictor"), config.options_for("evictor")
    evictor = choose_one(registry, EVICTOR, None, asked, given).candidate.name
    page = time_evictor(registry, evictor, config.seed)
    prompt = time_hashing(config.block_size, config.seed)
    for name, times, scale in (("page_us", page, 1e6), ("hash_32k_ms", prompt, 1e3)):
        report.figures |= {
            f"{name}_p0": times.best * scale,
            f"{name}_p50": times.median * scale,
            f"{name}_cpu": times.cpu * scale,
        }
    report.figures["evictor"] = evictor
    report.row(
        f"a page through {evictor}",
        f"{page.median * 1e6:.3f} ({page.best * 1e6:.3f}) us, in calls of {PAGES_PER_CALL}",
    )
    report.row(f"hashes of {PROMPT} tokens", f"{prompt.median * 1e3:.3f} ({prompt.best * 1e3:.3f}) ms")

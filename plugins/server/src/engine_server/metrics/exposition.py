"""`/metrics`: what the engine measured, in Prometheus' text form.

Names and buckets are vLLM's with `engine:` in place of `vllm:`, so that dashboards made for it need one replacement.
Nothing is counted here: the numbers are read when somebody asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.embedding import NOTHING, AsyncLLM, broken_plugins
from engine.plugin import HookRelay
from engine.plugin.hook_calls import FailureCounts, Failures, Implementation, sum_failures
from engine.types.outputs import StepStats
from engine_server.metrics.gathering import OWN_PREFIXES, Families, Family, Gathered, Snapshot, family_of
from engine_server.metrics.measures import Histogram, Measures

if TYPE_CHECKING:
    from engine_server.plugins import ServerView

log = logging.getLogger("engine.server")

_Read = Callable[[StepStats], float]

_GAUGES: Mapping[str, tuple[_Read, str]] = MappingProxyType(
    {
        "num_requests_running": (lambda s: s.num_running, "Sequences in the running batch."),
        "num_requests_waiting": (lambda s: s.num_waiting, "Sequences that wait for a place in it."),
        "kv_cache_usage_perc": (
            lambda s: s.pages_used / s.pages_total if s.pages_total else 0.0,
            "Part of the KV cache in use; 1 is all.",
        ),
        "kv_pages_used": (lambda s: s.pages_used, "Pages of the KV cache that requests hold."),
        "kv_pages_total": (lambda s: s.pages_total, "Pages of the KV cache; 0 before the first step."),
        "num_requests_swapped": (lambda s: s.num_swapped, "Of the waiting sequences those that are swapped out."),
        "swap_pages_used": (lambda s: s.swap_pages_used, "Pages of the swap space that sequences hold."),
        "swap_pages_total": (lambda s: s.swap_pages_total, "Pages of the swap space; 0 where nothing is swapped."),
    }
)
_COUNTERS: Mapping[str, tuple[_Read, str]] = MappingProxyType(
    {
        "prefix_cache_queries": (lambda s: s.prefix_queries, "Prompt tokens looked up in the prefix cache."),
        "prefix_cache_hits": (lambda s: s.prefix_hits, "Prompt tokens found in the prefix cache."),
        "num_preemptions": (lambda s: s.num_preemptions, "Preemptions, by all modes."),
        "num_swap_preemptions": (lambda s: s.num_swap_preemptions, "Preemptions that swapped the pages out."),
        "num_swap_full": (lambda s: s.num_swap_full, "Preemptions that found the swap space full and recomputed."),
        "prompt_tokens": (
            lambda s: s.prompt_tokens,
            "Prompt tokens of sequences that got a token; cached ones count.",
        ),
        "generation_tokens": (lambda s: s.generation_tokens, "Generated tokens."),
        "spec_decode_num_draft_tokens": (lambda s: s.num_drafts, "Drafts that steps computed."),
        "spec_decode_num_accepted_tokens": (lambda s: s.num_accepted_drafts, "Drafts that became output."),
        "jump_forward_tokens": (lambda s: s.num_jump_tokens, "Tokens forced by constraints, computed ahead."),
        "jump_forward_accepted_tokens": (lambda s: s.num_accepted_jump_tokens, "Those of them that became output."),
    }
)
"""Of each engine core: by name, how it is read from what the core told last, and its line of help."""


class Exposition:
    """One server's metrics, in a registry of their own. Observes the engine's requests.

    Args:
        server: whose they are.
    """

    def __init__(self, server: ServerView) -> None:
        llm = server.llm
        self._server = server
        self._measures = Measures(llm.max_model_len)
        llm.observe(self._measures)
        self._plugins = PluginMetrics(llm.hooks)
        self._collector = _EngineCollector(llm, server.responses, self._measures, self._plugins.failures.told)
        self._process = ProcessCollector(registry=None)
        server.count_for_others(self.snapshot)

    async def metrics(self) -> Response:
        """Prometheus' text form; of several API processes as of one. Without a key."""
        others = self._server.others
        text = self.text() if others is None else self.merged(await others.gather())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def text(self) -> bytes:
        """All metrics as of now."""
        return generate_latest(self._collector) + generate_latest(self._process) + self._plugins.text()

    def snapshot(self) -> Snapshot:
        """What this process has counted, for another that tells of all."""
        return Snapshot(
            measured=self._measures.plain(),
            responses=dict(self._server.responses),
            hook_failures=self._plugins.failures.told(),
            families=self._plugins.families(),
        )

    def merged(self, gathered: Gathered) -> bytes:
        """All metrics, over several processes: what each has counted together, and the state of the cores once."""
        llm = self._server.llm
        measures = gathered.measures(llm.max_model_len)
        own = _EngineCollector(llm, gathered.responses, measures, lambda: gathered.hook_failures)
        return b"".join(map(generate_latest, (own, gathered.processes(), gathered.of_plugins())))


class _EngineCollector(Collector):
    """Of the cores as they are, and of what was counted: answers by status code, requests, failures of hooks."""

    def __init__(
        self,
        llm: AsyncLLM,
        responses: Mapping[int, int],
        measures: Measures,
        hook_failures: Callable[[], FailureCounts],
    ) -> None:
        self._llm = llm
        self._model_name = llm.model_name
        self._responses = responses
        self._measures = measures
        self._hook_failures = hook_failures

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._distributions()
        finished = self._counter("request_success", "Finished sequences (n of each request).", "finished_reason")
        for reason, count in self._measures.finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished
        responses = self._counter("http_responses", "Answers of the server.", "code")
        for status, count in self._responses.items():
            responses.add_metric([self._model_name, str(status)], count)
        yield responses
        info = GaugeMetricFamily("engine:build_info", "The version.", labels=["model_name", "version"])
        info.add_metric([self._model_name, version("engine-base")], 1)
        yield info

    def _state(self) -> Iterator[Metric]:
        """Of each engine core, by its number, as vLLM labels them."""
        cores = [(str(core.dp_rank), core, core.stats or NOTHING) for core in self._llm.cores]
        for name, (value, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"engine:{name}", text, labels=["model_name", "engine"])
            for label, _, stats in cores:
                gauge.add_metric([self._model_name, label], value(stats))
            yield gauge
        for name, (value, text) in _COUNTERS.items():
            counter = self._counter(name, text, "engine")
            for label, _, stats in cores:
                counter.add_metric([self._model_name, label], value(stats))
            yield counter
        up = GaugeMetricFamily("engine:engine_up", "1 while the core lives.", labels=["model_name", "engine"])
        for label, rank, _ in cores:
            up.add_metric([self._model_name, label], int(rank.alive))
        yield up
        retries = self._counter("num_requests_retried", "Requests sent again because their core had died.")
        retries.add_metric([self._model_name], self._measures.retries)
        yield retries
        broken = GaugeMetricFamily("engine:quarantined_drivers", "Drivers installed but broken.", labels=["model_name"])
        plugins = broken_plugins(self._llm.plan, self._llm.worker)
        broken.add_metric([self._model_name], len(plugins))
        yield broken
        which = ["point", "driver", "distribution", "version"]
        named = GaugeMetricFamily("engine:quarantined_plugin_info", "1 for each.", labels=["model_name", *which])
        for plugin in plugins:
            named.add_metric([self._model_name, *(str(getattr(plugin, name)) for name in which)], 1)
        yield named
        failures = self._counter("hook_failures", "How often hooks of plugins raised.", "plugin", "hook")
        worker = self._llm.worker
        told = [] if worker is None else [worker.hook_failures]
        told += [stats.hook_failures for _, _, stats in cores]
        told.append(self._hook_failures())
        for name, hook, count in sum_failures(told):
            failures.add_metric([self._model_name, name, hook], count)
        yield failures

    def _distributions(self) -> Iterator[Metric]:
        m = self._measures
        yield self._histogram("iteration_tokens_total", m.step_tokens, "Tokens computed in a step.")
        yield self._histogram("time_to_first_token_seconds", m.time_to_first_token, "From arrival to the first token.")
        between = "Between the tokens of a sequence."
        yield self._histogram("inter_token_latency_seconds", m.inter_token_latency, between)
        # Its name before vLLM 0.11, which many dashboards still ask for.
        yield self._histogram("time_per_output_token_seconds", m.inter_token_latency, between)
        yield self._histogram(
            "request_time_per_output_token_seconds", m.request_time_per_output_token, "Its mean over a sequence."
        )
        yield self._histogram("e2e_request_latency_seconds", m.e2e_latency, "From arrival to the end.")
        yield self._histogram("request_queue_time_seconds", m.queue_time, "From arrival in the core to admission.")
        yield self._histogram("request_prefill_time_seconds", m.prefill_time, "From admission to the first token.")
        yield self._histogram("request_decode_time_seconds", m.decode_time, "From the first token to the last.")
        yield self._histogram("request_inference_time_seconds", m.inference_time, "From admission to the last token.")
        yield self._histogram("request_prompt_tokens", m.prompt_tokens, "Prompt tokens of finished sequences.")
        yield self._histogram("request_generation_tokens", m.generation_tokens, "Tokens of finished sequences.")
        yield self._histogram("request_params_n", m.params_n, "The parameter n.")
        yield self._histogram("request_params_max_tokens", m.params_max_tokens, "The parameter max_tokens.")

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"engine:{name}", text, labels=["model_name", *labels])

    def _histogram(self, name: str, values: Histogram, text: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"engine:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], values.buckets(), values.sum)
        return family


class PluginMetrics:
    """The metrics of hook plugins, a registry each, shown below the engine's own. One that fails takes nobody else's
    with it.

    Args:
        hooks: the frontend's.
    """

    def __init__(self, hooks: HookRelay) -> None:
        self._hooks = hooks
        self._registries: list[tuple[Implementation, CollectorRegistry]] = []
        for one in hooks.metrics.listening if hooks.metrics else ():
            registry = CollectorRegistry()
            try:
                one.call({"registry": registry})
            except Exception:
                one.count_failure()
                log.exception("%s raised, its metrics are not shown", one.who)
            else:
                self._registries.append((one, registry))

    @property
    def failures(self) -> Failures:
        """How often hooks of this process raised."""
        return self._hooks.failures

    def families(self) -> list[Family]:
        """All, as plain data. Those that cannot be read are left out, and that is counted."""
        found: list[Family] = []
        for one, registry in self._registries:
            try:
                families = [family_of(metric) for metric in registry.collect()]
                if twice := {f.name for f in found} & {f.name for f in families}:
                    raise ValueError(f"somebody has the metric {sorted(twice)[0]} already")
                if taken := next((f.name for f in families if f.name.startswith(OWN_PREFIXES)), None):
                    raise ValueError(f"the name {taken} begins as the server's own")
            except Exception:
                first = one.count_failure() == 1
                log.warning("%s: its metrics are left out of /metrics", one.who, exc_info=first)
            else:
                found += families
        return found

    def text(self) -> bytes:
        """The same as Prometheus reads it."""
        return generate_latest(Families(self.families()))

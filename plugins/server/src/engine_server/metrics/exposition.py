"""`/metrics`: what the engine measured, in Prometheus' text form.

Names and buckets are vLLM's with `engine:` in place of `vllm:`, so that dashboards made for it need one replacement.
Nothing is counted here: the numbers are read when somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import zip_longest
from typing import TYPE_CHECKING

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily as _Counter
from prometheus_client.core import GaugeMetricFamily as _Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.embedding import broken_plugins
from engine.plugin import HookRelay
from engine.plugin.hooks import FailureCounts, Implementation
from engine.types.errors import EngineError
from engine.types.outputs import StepStats
from engine_kit.async_llm import AsyncLLM
from engine_kit.lifecycle import NOTHING
from engine_kit.prompt_sources import prompt_sources
from engine_kit.ranks import sum_failures
from engine_server.metrics.gathering import OWN_PREFIXES, Families, Family, Snapshot, family_of
from engine_server.metrics.measures import Measured, Measures

if TYPE_CHECKING:
    from engine_server.plugins import ServerView

log = logging.getLogger("engine.server")

_GAUGES: Sequence[tuple[str, Callable[[StepStats], float], str]] = (
    ("num_requests_running", lambda s: s.num_running, "Sequences in the running batch."),
    ("num_requests_waiting", lambda s: s.num_waiting, "Sequences that wait for a place in it."),
    ("kv_cache_usage_perc", lambda s: s.pages_used / (s.pages_total or 1), "Part of the KV cache in use; 1 is all."),
    ("kv_pages_used", lambda s: s.pages_used, "Pages of the KV cache that requests hold."),
    ("kv_pages_total", lambda s: s.pages_total, "Pages of the KV cache; 0 before the first step."),
    ("num_requests_swapped", lambda s: s.num_swapped, "Of the waiting sequences those that are swapped out."),
    ("swap_pages_used", lambda s: s.swap_pages_used, "Pages of the swap space that sequences hold."),
    ("swap_pages_total", lambda s: s.swap_pages_total, "Pages of the swap space; 0 where nothing is swapped."),
)
_COUNTERS: Sequence[tuple[str, Callable[[StepStats], float], str]] = (
    ("prefix_cache_queries", lambda s: s.prefix_queries, "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", lambda s: s.prefix_hits, "Prompt tokens found in the prefix cache."),
    ("num_preemptions", lambda s: s.num_preemptions, "Preemptions, by all modes."),
    ("num_swap_preemptions", lambda s: s.num_swap_preemptions, "Preemptions that swapped the pages out."),
    ("num_swap_full", lambda s: s.num_swap_full, "Preemptions that found the swap space full and recomputed."),
    ("prompt_tokens", lambda s: s.prompt_tokens, "Prompt tokens of sequences that got a token; cached ones count."),
    ("generation_tokens", lambda s: s.generation_tokens, "Generated tokens."),
    ("spec_decode_num_drafts", lambda s: s.num_draft_rows, "Rows of steps that were to have drafts."),
    ("spec_decode_num_draft_tokens", lambda s: s.num_drafts, "Drafts that steps computed."),
    ("spec_decode_num_accepted_tokens", lambda s: s.num_accepted_drafts, "Drafts that became output."),
    ("jump_forward_tokens", lambda s: s.num_jump_tokens, "Tokens forced by constraints, computed ahead."),
    ("jump_forward_accepted_tokens", lambda s: s.num_accepted_jump_tokens, "Those of them that became output."),
)
"""Of each engine core: the name, how it is read from what the core told last, and the line of help."""
_CONNECTORS = {
    "loaded_tokens": "Prompt tokens whose keys and values came from the connector.",
    "hit_tokens": "Of these, those of prompts when they were first admitted.",
    "failed_pages": "Pages that it should have filled, and could not: their requests were computed again.",
    "expired_holds": "Requests whose pages nobody fetched in time.",
}
_BETWEEN = "Between the tokens of a sequence."
_HISTOGRAMS = (
    ("iteration_tokens_total", "step_tokens", "Tokens computed in a step."),
    ("time_to_first_token_seconds", "time_to_first_token", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_latency", _BETWEEN),
    # Its name before vLLM 0.11, which many dashboards still ask for.
    ("time_per_output_token_seconds", "inter_token_latency", _BETWEEN),
    ("request_time_per_output_token_seconds", "request_time_per_output_token", "Its mean over a sequence."),
    ("e2e_request_latency_seconds", "e2e_latency", "From arrival to the end."),
    ("request_queue_time_seconds", "queue_time", "From arrival in the core to admission."),
    ("request_prefill_time_seconds", "prefill_time", "From admission to the first token."),
    ("request_decode_time_seconds", "decode_time", "From the first token to the last."),
    ("request_inference_time_seconds", "inference_time", "From admission to the last token."),
    ("request_prompt_tokens", "prompt_tokens", "Prompt tokens of finished sequences."),
    ("request_generation_tokens", "generation_tokens", "Tokens of finished sequences."),
    ("request_params_n", "params_n", "The parameter n."),
    ("request_params_max_tokens", "params_max_tokens", "The parameter max_tokens."),
)
"""Of requests: the name, the attribute of `Measures`, and the line of help."""


CALL_SECONDS = 2.0
"""How long a scrape waits for what only workers know; then the numbers are those of the last time."""


class Exposition:
    """One server's metrics, in a registry of their own. Observes the engine's requests."""

    def __init__(self, server: ServerView) -> None:
        self._server = server
        self._measures = Measures(server.llm.max_model_len)
        server.llm.observe(self._measures)
        self._plugins = PluginMetrics(server.llm.hooks)
        self._process = ProcessCollector(registry=None)
        self._expert_tokens: list[list[int]] = []
        if server.others is not None:
            server.others.counted_by(self.snapshot)

    async def metrics(self) -> Response:
        """Prometheus' text form; of several API processes as of one. Without a key."""
        llm, others = self._server.llm, self._server.others
        parts: Sequence[Collector]
        experts = await self._of_experts()
        if others is None:
            own = self.snapshot()
            engine = _EngineCollector(llm, own.responses, own.measured, own.hook_failures, experts)
            parts = engine, self._process, Families(own.families)
        else:
            all_ = await others.gather()
            measured = all_.measured(llm.max_model_len)
            engine = _EngineCollector(llm, all_.responses, measured, all_.hook_failures, experts)
            parts = engine, all_.processes(), all_.of_plugins()
        return Response(b"".join(map(generate_latest, parts)), media_type=CONTENT_TYPE_LATEST)

    async def _of_experts(self) -> list[list[int]]:
        """On each rank of each core, the tokens that each expert computed; none where experts are not dealt."""
        llm = self._server.llm
        if llm.worker is not None and llm.plan.start.worker.parallel.ep:
            with contextlib.suppress(EngineError, TimeoutError):
                self._expert_tokens = await asyncio.wait_for(llm.call("worker.expert_tokens"), CALL_SECONDS)
        return self._expert_tokens

    def snapshot(self) -> Snapshot:
        """What this process has counted, for another that tells of all."""
        return Snapshot(
            measured=self._measures.plain(),
            responses=dict(self._server.responses),
            hook_failures=self._server.llm.hooks.failures.told(),
            families=self._plugins.families(),
        )


class _EngineCollector(Collector):
    """Of the cores as they are, and of what was counted: answers by status code, requests, failures of hooks, and on
    each rank tokens by expert."""

    def __init__(
        self,
        llm: AsyncLLM,
        responses: Mapping[int, int],
        measured: Measured,
        hook_failures: FailureCounts,
        experts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._llm = llm
        self._model_name = llm.model_name
        self._responses = responses
        self._measured = measured
        self._hook_failures = hook_failures
        self._experts = experts

    def collect(self) -> Iterator[Metric]:
        cores = [((str(core.dp_rank),), core, core.stats or NOTHING) for core in self._llm.cores]
        engine = ("engine",)  # its number, as vLLM labels it
        for name, read, text in _GAUGES:
            yield self._family(_Gauge, name, text, engine, [(labels, read(stats)) for labels, _, stats in cores])
        for name, read, text in _COUNTERS:
            yield self._family(_Counter, name, text, engine, [(labels, read(stats)) for labels, _, stats in cores])
        accepted = [
            ((*labels, str(place)), count)
            for labels, _, stats in cores
            for place, count in enumerate(stats.accepted_drafts_at)
        ]
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Drafts that became output, by their place in the row."
        yield self._family(_Counter, name, text, ("engine", "position"), accepted)
        sources = [
            ((*labels, source), count) for labels, _, stats in cores for source, count in prompt_sources(stats).items()
        ]
        text = "Prompt tokens by where their keys and values came from: device, a connector, blended, computed."
        yield self._family(_Counter, "prompt_tokens_by_source", text, ("engine", "source"), sources)
        for what, text in _CONNECTORS.items():
            counts = [
                ((*labels, connector), count)
                for labels, _, stats in cores
                for connector, name, count in stats.kv_connectors
                if name == what
            ]
            yield self._family(_Counter, f"kv_connector_{what}", text, ("engine", "connector"), counts)
        own = [
            ((*labels, connector, name), count)
            for labels, _, stats in cores
            for connector, name, count in stats.kv_connectors
            if name not in _CONNECTORS
        ]
        text = "What a connector counts itself, faults among it: see its page."
        yield self._family(_Counter, "kv_connector_events", text, ("engine", "connector", "event"), own)
        retained = [((*labels, by), pages) for labels, _, stats in cores for by, pages in stats.retained_pages]
        text = "Cached pages that requests retain (kv_retention), by priority."
        yield self._family(_Gauge, "kv_retained_pages", text, ("engine", "priority"), retained)
        events = [((*labels, event), pages) for labels, _, stats in cores for event, pages in stats.retention_events]
        text = "Retained pages whose time was over, that were given up before, and that a bound displaced."
        yield self._family(_Counter, "kv_retention_events", text, ("engine", "event"), events)
        text = "Tokens that each routed expert has computed, all layers and ranks together."
        by_expert = [
            ((str(expert),), sum(counts)) for expert, counts in enumerate(zip_longest(*self._experts, fillvalue=0))
        ]
        yield self._family(_Counter, "expert_tokens", text, ("expert",), by_expert)
        text = "Tokens that the routed experts of a rank have computed; engine cores' ranks follow one another."
        first = 0
        if self._experts:
            worker = self._llm.plan.start.worker
            first = worker.first_dp_rank * worker.parallel.world  # before them those of other servers
        by_rank = [((str(rank),), sum(counts)) for rank, counts in enumerate(self._experts, first)]
        yield self._family(_Counter, "expert_rank_tokens", text, ("rank",), by_rank)
        alive = [(labels, float(core.alive)) for labels, core, _ in cores]
        yield self._family(_Gauge, "engine_up", "1 while the core lives.", engine, alive)
        text, retries = "Requests sent again because their core had died.", [((), self._measured.retries)]
        yield self._family(_Counter, "num_requests_retried", text, (), retries)
        warmed = dict(self._measured.warmed)
        text, requests = (
            "Sequences with max_tokens 0, which bring their prompt to the device.",
            warmed.pop("requests", 0),
        )
        yield self._family(_Counter, "kv_warming_requests", text, (), [((), requests)])
        text = "Tokens of their prompts, by source: found (on the device, or in a store), computed."
        tokens = [((source,), count) for source, count in warmed.items()]
        yield self._family(_Counter, "kv_warming_tokens", text, ("source",), tokens)
        broken = broken_plugins(self._llm.plan, self._llm.worker)
        yield self._family(_Gauge, "quarantined_drivers", "Drivers installed but broken.", (), [((), len(broken))])
        which = ("point", "driver", "distribution", "version")
        named = [(tuple(str(getattr(plugin, name)) for name in which), 1) for plugin in broken]
        yield self._family(_Gauge, "quarantined_plugin_info", "1 for each.", which, named)
        told = [] if self._llm.worker is None else [self._llm.worker.hook_failures]
        told += [*(stats.hook_failures for _, _, stats in cores), self._hook_failures]
        failures = [((plugin, hook), count) for plugin, hook, count in sum_failures(told)]
        yield self._family(
            _Counter, "hook_failures", "How often hooks of plugins raised.", ("plugin", "hook"), failures
        )
        for name, measured, text in _HISTOGRAMS:
            family = HistogramMetricFamily(f"engine:{name}", text, labels=["model_name"])
            histogram = self._measured.histograms[measured]
            family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
            yield family
        finished = [((reason,), count) for reason, count in self._measured.finished.items()]
        text = "Finished sequences (n of each request)."
        yield self._family(_Counter, "request_success", text, ("finished_reason",), finished)
        responses = [((str(status),), count) for status, count in self._responses.items()]
        yield self._family(_Counter, "http_responses", "Answers of the server.", ("code",), responses)
        yield self._family(_Gauge, "build_info", "The version.", ("version",), [((version("engine-base"),), 1)])

    def _family(
        self,
        kind: type[_Counter | _Gauge],
        name: str,
        text: str,
        labels: tuple[str, ...],
        samples: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        family = kind(f"engine:{name}", text, labels=["model_name", *labels])
        for values, value in samples:
            family.add_metric([self._model_name, *values], value)
        return family


class PluginMetrics:
    """The metrics of hook plugins, a registry each, shown below the engine's own. One that fails takes nobody else's
    with it."""

    def __init__(self, hooks: HookRelay) -> None:
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

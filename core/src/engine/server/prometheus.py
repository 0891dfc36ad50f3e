"""`/metrics`: what the engine measured, in Prometheus' text form.

Names and buckets are vLLM's with `engine:` in place of `vllm:`, so that dashboards made for it need one replacement.
Nothing is counted here: the numbers are read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.frontend.async_llm import AsyncLLM
from engine.frontend.measures import Histogram
from engine.server.request_id import RequestIds
from engine.types.outputs import StepStats

_NOTHING = StepStats(
    step_id=0,
    num_running=0,
    num_waiting=0,
    num_tokens=0,
    pages_used=0,
    pages_total=0,
    prefix_queries=0,
    prefix_hits=0,
    num_preemptions=0,
)


class Exposition:
    """One server's metrics, in a registry of their own.

    Args:
        llm: the engine.
        model_name: the label of every metric.
        requests: counts the answers.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, requests: RequestIds) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(llm, model_name, requests))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics as of now."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, llm: AsyncLLM, model_name: str, requests: RequestIds) -> None:
        self._llm, self._model_name, self._requests = llm, model_name, requests

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._distributions()
        finished = self._counter("request_success", "Finished sequences (n of each request).", "finished_reason")
        for reason, count in self._llm.measures.finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished
        responses = self._counter("http_responses", "Answers of the server.", "code")
        for status, count in self._requests.responses.items():
            responses.add_metric([self._model_name, str(status)], count)
        yield responses
        info = GaugeMetricFamily("engine:build_info", "The version.", labels=["model_name", "version"])
        info.add_metric([self._model_name, version("engine")], 1)
        yield info

    def _state(self) -> Iterator[Metric]:
        stats = self._llm.last_stats or _NOTHING
        used = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        gauges = {
            "num_requests_running": (stats.num_running, "Sequences in the running batch."),
            "num_requests_waiting": (stats.num_waiting, "Sequences that wait for a place in it."),
            "kv_cache_usage_perc": (used, "Part of the KV cache in use; 1 is all."),
            "kv_pages_used": (stats.pages_used, "Pages of the KV cache that requests hold."),
            "kv_pages_total": (stats.pages_total, "Pages of the KV cache; 0 before the first step."),
            "quarantined_drivers": (len(self._llm.plan.registry.quarantine), "Drivers installed but broken."),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(f"engine:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        counters = {
            "prefix_cache_queries": (stats.prefix_queries, "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.prefix_hits, "Prompt tokens found in the prefix cache."),
            "num_preemptions": (stats.num_preemptions, "Preemptions."),
            "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of sequences that got a token; cached ones count."),
            "generation_tokens": (stats.generation_tokens, "Generated tokens."),
            "spec_decode_num_draft_tokens": (stats.num_drafts, "Drafts that steps computed."),
            "spec_decode_num_accepted_tokens": (stats.num_accepted_drafts, "Drafts that became output."),
        }
        for name, (value, text) in counters.items():
            counter = self._counter(name, text)
            counter.add_metric([self._model_name], value)
            yield counter

    def _distributions(self) -> Iterator[Metric]:
        m = self._llm.measures
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

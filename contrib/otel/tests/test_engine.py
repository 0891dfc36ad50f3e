"""Real requests, offline and over HTTP, as a collector sees them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

from engine import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_offline(collector, values):
    settings = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory": "16MiB"}
    with LLM("tiny", **settings, **{"hooks.otel.endpoint": collector.endpoint}) as llm:
        llm.generate(["A tale", "Another"], PARAMS, use_tqdm=False)
    roots = [span for span in collector.spans if span.name == "text_completion tiny"]
    assert len(roots) == 2 and len(collector.spans) == 8
    for root in roots:
        assert values(root)["gen_ai.usage.output_tokens"] == 8
        inner = {s.name: s for s in collector.spans if s.parent_span_id == root.span_id}
        assert set(inner) == {"queue", "prefill", "decode"}
        assert root.start_time_unix_nano <= inner["queue"].start_time_unix_nano
        assert inner["decode"].end_time_unix_nano <= root.end_time_unix_nano
        assert inner["prefill"].end_time_unix_nano > inner["prefill"].start_time_unix_nano


def test_over_http(collector, values):
    """The server's spans continue the client's trace, and the last are sent when it stops."""
    command = [sys.executable, "-m", "engine", "serve", "tiny", "--port", "0", "--dtype", "float32"]
    command += ["--hooks.otel.endpoint", collector.endpoint, "--kv-cache-memory", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(found[1] for line in process.stdout if (found := re.search(r"on (http://\S+)/v1", line)))
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "ignore_eos": True}
            headers = {"Content-Type": "application/json", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
            request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
            answer = json.load(urllib.request.urlopen(request, timeout=60))
            assert collector.spans == []  # they go in batches
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    [root] = [span for span in collector.wait(4) if span.name == "chat tiny"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    found = values(root)
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.response.id"] == answer["id"]

"""`engine run-batch` as a user runs it, stopped and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import LLM, SamplingParams

FLAGS = ("--model", "tiny", "--dtype", "float64", "--max-num-seqs", "8", "--kv-cache-memory", "64MiB")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def request(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def command(source: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "engine", "run-batch", str(source), str(out), *(flags or FLAGS)]


def run(source: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(source, out, *flags), capture_output=True, text=True, timeout=120)


def results(out: Path) -> dict[Any, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {line["custom_id"] or line["line"]: line for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found


def test_every_line_is_answered(tmp_path: Path) -> None:
    prompts = [f"One day, {name}" for name in ("Tom", "Ann", "the fox", "a king")]
    lines: list[dict[str, Any] | str] = [
        request(f"p{i}", COMPLETIONS, model="tiny", prompt=prompt, max_tokens=12, temperature=0)
        for i, prompt in enumerate(prompts)
    ]
    messages = [{"role": "user", "content": "Hello"}]
    lines += [
        request("chat", CHAT, messages=messages, max_tokens=4, temperature=0),
        request("response", "/v1/responses", input="Hello", max_output_tokens=4, temperature=0),
        request("message", "/v1/messages", messages=messages, max_tokens=4, temperature=0),
        request("count", "/v1/messages/count_tokens", messages=messages),
        request("tokens", "/tokenize", prompt="Hello"),
        request("unknown", COMPLETIONS, prompt="x", best=2),
        request("range", COMPLETIONS, prompt="x", temperature=-1),
        request("embed", "/v1/embeddings", input="x"),
        request("nowhere", "/v1/nowhere"),
        request("get", "/metrics"),
        request("budget", "/v1/messages", messages=messages, max_tokens=4, context_management={}),
        request("behind", "/v1/responses", input="Hello", background=True),
        request("admin", "/admin/kv/reset"),
        request("stream", CHAT, messages=messages, stream=True),
        "{torn",
        "",
        request("model", COMPLETIONS, model="other", prompt="x"),
    ]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = run(source, out)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "20 of 20 requests are done, 11 of them failed" in done.stderr
    assert "%|" not in done.stderr and "Traceback" not in done.stderr
    found = results(out)
    with LLM("tiny", dtype="float64", max_num_seqs=8, num_kv_pages=1000) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    for i, output in enumerate(expected):
        response = found[f"p{i}"]["response"]
        assert found[f"p{i}"]["error"] is None and found[f"p{i}"]["id"].startswith("batch_req_")
        assert response["status_code"] == 200 and response["body"]["choices"][0]["text"] == output.outputs[0].text
        assert response["request_id"] in response["body"]["id"]
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    text = found["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    answer = found["response"]["response"]["body"]
    assert answer["status"] == "incomplete" and answer["output"][0]["content"][0]["text"] == text
    assert found["message"]["response"]["body"]["content"][0]["text"] == text
    assert found["count"]["response"]["body"]["input_tokens"] > 0
    assert found["tokens"]["response"]["body"]["count"] > 0
    statuses = {"unknown": 400, "range": 400, "embed": 400, "nowhere": 404, "admin": 403, "model": 404, "get": 405}
    for name, status in statuses.items():
        assert found[name]["response"]["status_code"] == status and found[name]["error"] is None
    assert found["unknown"]["response"]["body"]["error"]["code"] == "unsupported_parameter"
    refused = found["budget"]["response"]
    assert refused["status_code"] == 400 and "'context_management'" in refused["body"]["error"]["message"]
    assert "/v1/nowhere" in found["nowhere"]["response"]["body"]["error"]["message"]
    assert found["get"]["response"]["body"]["error"]["message"] == "/metrics takes no POST"
    assert "background=true is not for batches" in found["behind"]["error"]["message"]
    assert "stream=true is not for batches" in found["stream"]["error"]["message"]
    assert found[19]["response"] is None and "line 19; it is not valid JSON" in found[19]["error"]["message"]

    again = run(source, out)  # no engine is started
    assert again.returncode == 2 and "20 of 20 requests are done already" in again.stderr
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    mended = request("mended", COMPLETIONS, prompt="x", max_tokens=1)
    write(source, [mended if line == "{torn" else line for line in lines])
    assert "20 of 20 requests are done, " in run(source, out).stderr
    found = results(out)
    assert found["mended"]["response"]["status_code"] == 200 and set(statuses) < set(found)
    assert out.read_bytes().startswith(whole[: whole[:-20].rindex(b"\n") + 1])


def test_embeddings(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("e", "/v1/embeddings", input=["a", "b"], dimensions=8)])
    done = run(source, tmp_path / "out", "--model", "tiny", "--runner", "pooling")
    assert done.returncode == 0, done.stderr
    data = results(tmp_path / "out")["e"]["response"]["body"]["data"]
    assert [len(one["embedding"]) for one in data] == [8, 8]


@pytest.mark.slow
def test_a_batch_that_is_ended_again_and_again(tmp_path: Path) -> None:
    """Its engine is killed, it is interrupted, it is killed: in the end each request is answered once."""
    lines = [request(f"r{i}", COMPLETIONS, prompt=f"Day {i}", max_tokens=40, ignore_eos=True) for i in range(90)]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    counts = [0]
    for how in ("core", "interrupt", "kill"):
        process = subprocess.Popen(command(source, out), stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 90
        while not out.exists() or out.read_bytes().count(b"\n") < counts[-1] + 5:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        if how == "core":
            (core,) = psutil.Process(process.pid).children()
            core.kill()
        else:
            process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        _, told = process.communicate(timeout=60)
        assert process.returncode == {"core": 2, "interrupt": 130, "kill": -signal.SIGKILL}[how], told
        assert "Traceback" not in told
        if how == "core":
            assert "engine core" in told
        if how == "interrupt":
            assert "the same command goes on from here" in told
        counts.append(out.read_bytes().count(b"\n"))
        assert counts[-1] < len(lines), "it was done before it was ended"
    last = run(source, out)
    assert last.returncode == 0, last.stderr
    found = results(out)
    assert set(found) == {line["custom_id"] for line in lines}
    assert {one["response"]["status_code"] for one in found.values()} == {200}
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 40 for one in found.values())


@pytest.mark.parametrize(
    ("text", "out", "says"),
    [
        (None, "out", "read the batch"),
        ("", "out", "it is empty"),
        ("{}\n", "in", "same file"),
        ('{"custom_id": "a"}\n', "none/out", "check the path"),
    ],
)
def test_what_is_refused_at_once(tmp_path: Path, text: str | None, out: str, says: str) -> None:
    if text is not None:
        (tmp_path / "in").write_text(text)
    done = run(tmp_path / "in", tmp_path / out)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr

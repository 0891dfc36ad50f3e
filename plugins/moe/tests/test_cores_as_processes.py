"""Engine cores that share experts, as users start them: processes behind one server, or behind servers of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, tokenizer

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.types.errors import ConfigError, EngineDeadError

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_pages": 64, "max_model_len": 96,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(3 + 5 * i)]} for i in range(7)]
PARAMS = [SamplingParams(temperature=(i % 3) / 2, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        max_position_embeddings=128, initializer_range=0.2, norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(model=str(folder), **SETTINGS) as one:
        return tokens(one)


@pytest.mark.parametrize(
    "how",
    [
        {"experts": "gather"},
        {"experts": "all_to_all"},
        {"experts": "gather", "tensor_parallel_size": 2, "num_kv_pages": None, "kv_cache_memory": None},
    ],
    ids=["gather", "all_to_all", "of two ranks, profiled"],
)
def test_two_cores_give_one_cores_tokens(folder: Path, expected: list[list[int]], how: dict[str, Any]) -> None:
    settings = {**SETTINGS, **how}
    with LLM(model=str(folder), **settings, enable_expert_parallel=True, data_parallel_size=2) as two:
        assert tokens(two) == expected
        assert tokens(two)[:1] == expected[:1], "and again, after a sleep"
        pids = [state.pid for state in two.llm_engine.client.states()]
        found = [psutil.Process(pid) for pid in pids]
    assert not psutil.wait_procs(found, timeout=5)[1]


SIZES = [
    (tp, pp, cp, dp) for tp in (1, 2) for pp in (1, 2) for cp in (1, 2) for dp in (1, 2) if 1 < tp * pp * cp * dp <= 8
]
CROWDED: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 96, "block_size": 4,
    "drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1, "grammar": "choice",
}  # fmt: skip
TEXTS = ["a rather long text to write", "a rather short one", "0123456789" * 2]


def crowd() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Ten requests: pairs of the same beginning, greedy and drawn ones, every third under a constraint."""
    beginning = [(5 * j) % 250 + 3 for j in range(24)]
    prompts = [{"prompt_token_ids": [*beginning[: 24 - 2 * (i // 2)], *([7, 8, 7 + i] * 3)]} for i in range(10)]
    texts = StructuredOutputsParams(choice=TEXTS)
    params = [
        SamplingParams(
            temperature=(i % 4) * 0.4, seed=i, max_tokens=30, ignore_eos=i % 3 != 2, repetition_penalty=1.0 + i % 2 / 5,
            logprobs=i % 2, structured_outputs=texts if i % 3 == 2 else None,
        )
        for i in range(10)
    ]  # fmt: skip
    return prompts, params


def crowded_tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(*crowd(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    with LLM(model=str(folder), **CROWDED, num_kv_pages=400) as one:
        return crowded_tokens(one)


@pytest.mark.parametrize("experts", ["divided", "dealt"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "tp{}pp{}cp{}dp{}".format(*sizes))
def test_every_combination(folder: Path, alone: list[list[int]], sizes: tuple[int, ...], experts: str) -> None:
    """Up to eight ranks in processes of their own, as users start them, with little room. Under many more schedules, as
    threads: `core/tests/system/test_combinations.py`, and `test_dealt_schedules.py` and `test_dealt_cores.py` here."""
    tp, pp, cp, dp = sizes
    how = {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp,
        "data_parallel_size": dp, "enable_expert_parallel": experts == "dealt", "num_kv_pages": 26 // cp,
    }  # fmt: skip
    if experts == "dealt" and tp * dp == 1:
        with pytest.raises(ConfigError, match="one rank has them all"):
            LLM(model=str(folder), **CROWDED, **how)
        return
    with LLM(model=str(folder), **CROWDED, **how) as many:
        assert crowded_tokens(many) == alone
        assert crowded_tokens(many) == alone, "and again, with what is kept of the first"
        stats = many.llm_engine.stats()
        assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts > 0


@pytest.mark.parametrize("dies", [0, 1])
def test_the_death_of_one_ends_all(folder: Path, dies: int) -> None:
    llm = LLM(model=str(folder), **SETTINGS, enable_expert_parallel=True, data_parallel_size=2)
    pids = [state.pid for state in llm.llm_engine.client.states()]
    found = [one for pid in pids for one in [psutil.Process(pid), *psutil.Process(pid).children()]]
    os.kill(pids[dies], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="signal 9"):
        while True:
            tokens(llm)
    assert time.monotonic() - began < 2
    assert not psutil.wait_procs(found, timeout=5)[1], "nobody stays, not even one that waits for the dead"
    llm.shutdown()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"data_parallel_restarts": 1}, "end with the first that dies"),
        ({"drafter": "draft_model"}, "whose passes the other engine cores do not make"),
    ],
)
def test_what_the_others_would_not_do_is_refused(folder: Path, how: dict[str, Any], says: str) -> None:
    how = {**how, "drafter.model": str(folder)} if "drafter" in how else how
    with pytest.raises(ConfigError, match=says):
        LLM(model=str(folder), **SETTINGS, enable_expert_parallel=True, data_parallel_size=2, **how)


# -- behind servers of their own ---------------------------------------------------------------------------------------
def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ask(port: int, index: int) -> list[int]:
    params = PARAMS[index]
    body = {
        "prompt": PROMPTS[index]["prompt_token_ids"], "max_tokens": params.max_tokens, "seed": params.seed,
        "temperature": params.temperature, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["token_ids"])


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture
def servers(folder: Path, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[tuple[Any, int]]]:
    """A process and a port for each set of flags."""
    token = tmp_path / "token"
    token.write_text("a secret of more than sixteen bytes\n")
    *ports, meeting = free_ports(1 + len(request.param))
    common = [
        *("--model", str(folder), "--dtype", "float64", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"),
        *("--num-kv-pages", "64", "--max-model-len", "96", "--enable-expert-parallel", "--data-parallel-address"),
        *("127.0.0.1", "--data-parallel-rpc-port", str(meeting), "--data-parallel-token-file", str(token)),
    ]
    processes = []
    for port, flags in zip(ports, request.param, strict=True):
        command = [sys.executable, "-m", "engine", "serve", *common, "--port", str(port), *flags]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        for process, port in zip(processes, ports, strict=True):
            until = time.monotonic() + 90
            while True:
                try:
                    get(port, "/health")
                    break
                except (OSError, urllib.error.URLError):
                    assert process.poll() is None and time.monotonic() < until
                    time.sleep(0.1)
        yield list(zip(processes, ports, strict=True))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.communicate(timeout=30)


EXTERNAL = [["--data-parallel-size", "2", "--data-parallel-rank", str(rank)] for rank in range(2)]
HYBRID = [
    [
        *("--data-parallel-size", "3", "--data-parallel-hybrid-lb"),
        *("--data-parallel-size-local", str(count), "--data-parallel-start-rank", str(first)),
    ]
    for first, count in ((0, 2), (2, 1))
]


@pytest.mark.parametrize("servers", [EXTERNAL, HYBRID], ids=["external", "hybrid"], indirect=True)
def test_several_servers_share_experts(servers: list[tuple[Any, int]], expected: list[list[int]]) -> None:
    ports = [port for _, port in servers]
    with ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(ask, ports[i % 2], i) for i in range(7)]
        assert [answer.result() for answer in asked] == expected
    assert ask(ports[1], 0) == expected[0], "one alone, while the others only make its steps"
    engines = [{line.split('engine="')[1].split('"')[0] for line in get(port, "/metrics").splitlines()
                if line.startswith("engine:engine_up{")} for port in ports]  # fmt: skip
    assert engines in ([{"0"}, {"1"}], [{"0", "1"}, {"2"}])
    # One of them goes: the others cannot compute without its experts, and say so.
    servers[1][0].terminate()
    assert servers[1][0].wait(30) == 0
    process = servers[0][0]
    assert process.wait(30) != 0
    assert "in step with data-parallel rank" in process.stderr.read()

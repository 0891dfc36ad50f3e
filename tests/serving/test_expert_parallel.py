"""`engine serve --enable-expert-parallel`, two engine cores of two ranks, while experts move: answers, `/metrics`, and
an orderly end whoever is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import torch
import transformers

from .conftest import Server

pytestmark = pytest.mark.slow

EXPERTS, PER_TOKEN, LAYERS = 6, 2, 3
DEALT = (
    *("--tensor-parallel-size", "2", "--data-parallel-size", "2", "--enable-expert-parallel"),
    *("--experts.redundant", "2", "--experts.rebalance_every", "3", "--experts.step_bytes", "1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of the bundled model's tokenizer."""
    from engine_tiny import __file__ as here

    found = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, initializer_range=0.2,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(found)
    (tokenizer,) = Path(here).parent.rglob("tokenizer.json")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (found / file).write_bytes((tokenizer.parent / file).read_bytes())
    return found


def serve(folder: Path, *args: str) -> Server:
    return Server(str(folder), "--served-model-name", "m", "--dtype", "float64", "--kv-cache-memory", "8MiB", *args)


def answer(server: Server, number: int, tokens: int = 40) -> str:
    body = {
        "model": "m",
        "prompt": [7 * number + 3, 5, 9 + number],
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": number,
    }
    reply = httpx.post(server.address + "/v1/completions", json=body, timeout=120).raise_for_status()
    return reply.json()["choices"][0]["text"]


def test_answers_and_metrics(folder: Path) -> None:
    whole = serve(folder)
    try:
        expected = [answer(whole, number) for number in range(6)]
        assert not [name for name in whole.metrics() if name.startswith("expert_")]
    finally:
        assert whole.stop() == 0
    dealt = serve(folder, *DEALT)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda number: answer(dealt, number), range(6))) == expected
        found = dealt.metrics()
        by_expert = [found[f"expert_tokens_total{{expert={expert}}}"] for expert in range(EXPERTS)]
        by_rank = [found[f"expert_rank_tokens_total{{rank={rank}}}"] for rank in range(4)]
        computed = 6 * (3 + 39)  # and what cores computed that had nothing to do
        assert sum(by_expert) == sum(by_rank) >= computed * PER_TOKEN * LAYERS and min(by_rank) > 0
    finally:
        code = dealt.stop()
    assert code == 0


@pytest.mark.parametrize("who", ["rank", "core"])
def test_a_killed_process_takes_the_others_with_it(folder: Path, who: str) -> None:
    """Also those of other engine cores: none computes without its experts. Clients are told, nothing is left behind."""
    dealt = serve(folder, *DEALT)
    cores = psutil.Process(dealt.process.pid).children()
    everybody = [process for core in cores for process in (core, *core.children())]
    try:
        assert len(everybody) == 6
        answer(dealt, 0)
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(answer, dealt, number, 3000) for number in range(4)]
            dealt.until(
                lambda m: m["num_requests_running"] + m.get("num_requests_running{engine=1}", 0) >= 3, "they run"
            )
            os.kill((cores[1] if who == "core" else cores[1].children()[0]).pid, signal.SIGKILL)
            assert dealt.process.wait(20) == 1
            for one in waiting:
                with pytest.raises(httpx.HTTPError):
                    one.result(20)
    finally:
        dealt.stop()
    assert any("in step with data-parallel rank 1 of 2" in line for line in dealt.lines), "".join(dealt.lines)
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive

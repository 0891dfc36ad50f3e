"""Experts of fewer bits beside single layers, what is refused, and steps of mixtures that are captured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_captured import SETTINGS, parity, told, workload  # noqa: F401

from engine import LLM
from engine.interfaces.quantization import LayerShape
from engine.types.parallel import Shard
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct

pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")

EXPERTS, HIDDEN, INNER = 6, 70, 48


@pytest.fixture(autouse=True)
def a_fit_processor(native: Any) -> None:
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(rows: int, per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tensor(rows, EXPERTS, seed=5).topk(per_token).indices.int()
    return ids, tensor(rows, per_token, seed=6).abs()


def body_of(form: str) -> Any:
    from engine_cpu.quantization_int4.body import Int4Body
    from engine_cpu.quantization_int8.body import Int8Body

    options = SimpleNamespace(level="auto", group_size=32, head_bits=8)
    return {"int8": Int8Body, "int4": Int4Body}[form](SimpleNamespace(options=options))  # type: ignore[arg-type]


def ops() -> Any:
    from engine_cpu.ops_cpu.body import CpuOpsBody

    return CpuOpsBody(SimpleNamespace(options=SimpleNamespace(level="auto")))  # type: ignore[arg-type]


def packed_layers(body: Any, bias: bool) -> list[tuple[Any, Any]]:
    def pack(outputs: int, inputs: int, seed: int) -> Any:
        shape = LayerShape(("layer",), "expert", Shard.of(inputs), (Shard.of(outputs),), bias)
        tensors = {"weight": tensor(outputs, inputs, seed=seed)}
        return body.pack(shape, tensors | ({"bias": tensor(outputs, seed=seed + 50)} if bias else {}))

    return [(pack(2 * INNER, HIDDEN, 10 + e), pack(HIDDEN, INNER, 30 + e)) for e in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_as_single_layers(form: str, bias: bool, dtype: torch.dtype) -> None:
    """Any number of tokens gives what the same layers give one by one."""
    body, act = body_of(form), ExpertAct()
    layers, acts = packed_layers(body, bias), ops()
    packed = body.pack_experts(layers)

    def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
        first, last = layers[index]
        return body.linear(acts.gated_act(body.linear(rows, first), act), last)

    for rows, per_token in ((1, 1), (1, 3), (2, 2), (9, EXPERTS), (60, 2)):
        x, (ids, weights) = tensor(rows, HIDDEN, dtype=dtype), chosen(rows, per_token)
        found, expected = body.experts(x, packed, ids, weights, act), by_expert(x, ids, weights, EXPERTS, expert)
        near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-4}
        torch.testing.assert_close(found, expected, **near)
    none = body.experts(tensor(0, HIDDEN), packed, *chosen(0, 2), act)
    assert none.shape == (0, HIDDEN)


def test_an_id_that_is_no_experts() -> None:
    """An error, and nothing is read beside the weights."""
    mine, (ids, weights) = ops(), chosen(3, 2)
    packed = mine.pack_experts(tensor(EXPERTS, 2 * INNER, HIDDEN), tensor(EXPERTS, HIDDEN, INNER), None, None)
    for wrong in (-1, EXPERTS + 1, 2**30):  # EXPERTS is nobody's
        ids[1, 1] = wrong
        with pytest.raises(IndexError, match=f"no expert {wrong}"):
            mine.experts(tensor(3, HIDDEN), packed, ids, weights, ExpertAct())


def test_ids_that_repeat() -> None:
    """As where a row's logits are no numbers: each counts, also where one expert then has more rows than the step."""
    mine, x = ops(), tensor(5, HIDDEN)
    packed = mine.pack_experts(tensor(EXPERTS, 2 * INNER, HIDDEN), tensor(EXPERTS, HIDDEN, INNER), None, None)
    weights = tensor(5, 3, seed=1)
    once = mine.experts(x, packed, torch.full((5, 1), 4, dtype=torch.int32), weights.sum(1, keepdim=True), ExpertAct())
    thrice = mine.experts(x, packed, torch.full((5, 3), 4, dtype=torch.int32), weights, ExpertAct())
    torch.testing.assert_close(thrice, once, rtol=1e-4, atol=1e-2)


@pytest.fixture(scope="module")
def mixture(parity: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A small Mixtral with random weights."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("engine_models", reason="engine-models is not installed")
    pytest.importorskip("engine_moe", reason="engine-moe is not installed")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=parity.VOCAB_SIZE, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=256,
        torch_dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixture")
    transformers.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    parity.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "expert=int8"])
def test_captured_steps(mixture: Path, quantization: str | None) -> None:
    """Steps of mixtures are captured, and replayed give the bits that they have when they run."""
    settings: dict[str, Any] = {**SETTINGS, "model": str(mixture), "dtype": "bfloat16", "max_num_seqs": 7}
    settings |= {} if quantization is None else {"quantization": quantization}
    found = []
    for capture in ("never", "always"):
        with LLM(**{"platform.capture": capture}, **settings) as llm:
            ready = llm.llm_engine.client.worker
            assert ready.not_captured == (), ready.not_captured
            assert ready.captured == ((7,) if capture == "always" else ())
            found.append([told(llm.generate(*workload(seed), use_tqdm=False)) for seed in range(3)])
    assert found[0] == found[1]


def test_a_quantization_of_single_layers_is_not_captured(mixture: Path) -> None:
    """Each expert is then looked up in every step: the start says so."""
    settings: dict[str, Any] = {**SETTINGS, "model": str(mixture), "dtype": "float32"}
    with LLM(**settings, quantization="expert=absmax", max_num_seqs=2) as llm:
        ready = llm.llm_engine.client.worker
        assert any("quantization 'absmax' (expert) is not recorded" in one for one in ready.not_captured)

"""Products chosen by what they take: what is timed, when, and what is kept; the times are the tests' own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from engine.types.errors import ConfigError
from engine.types.parallel import Parallel
from engine_cuda.ops_triton_gemv.body import PackedWeight, TritonGemvBody, few_rows
from engine_cuda.ops_triton_gemv.card import TritonGemvOptions
from engine_cuda.ops_triton_gemv.timed import TimedProducts


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The libraries that were asked for; a torch without a GPU has none of them."""
    asked = ["default"]
    if request.node.get_closest_marker("gpu") is not None:
        yield asked
        return

    def preferred(name: str | None = None) -> str:
        asked.extend([] if name is None else [name])
        return asked[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    yield asked
    assert asked[-1] == "default", "others get another library than theirs"


class Clock:
    """Says of ways in turn what each takes; which are timed for a product stands in `asked`."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.asked = 0
        self.open = True

    def __call__(self, run: Callable[[], Any]) -> float:
        assert run().shape[1] == 24
        self.asked += 1
        return self.seconds[(self.asked - 1) % len(self.seconds)]


def made(clock: Clock, file: Path | None = None, machine: str = "a GPU") -> TimedProducts:
    return TimedProducts(few_rows, machine, file, clock, lambda: clock.open)


def packed(bias: bool = False) -> PackedWeight:
    generator = torch.Generator().manual_seed(0)
    return PackedWeight(torch.randn(24, 32, generator=generator), torch.ones(24) if bias else None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fastest", range(4))
def test_each_size_is_timed_once_and_the_fastest_taken(
    fastest: int, bias: bool, caplog: pytest.LogCaptureFixture, libraries: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock(*(1e-5 if way == fastest else 2e-5 for way in range(4)))
    products, weight, x = made(clock), packed(bias), torch.randn(3, 32)
    right = torch.nn.functional.linear(x.double(), weight.weight.double(), weight.bias.double() if bias else None)
    for _ in range(2):
        torch.testing.assert_close(products(x, weight).double(), right.double(), rtol=1e-5, atol=1e-5)
    assert clock.asked == 4
    name = ("torch", "cuBLAS", "cuBLASLt", "triton")[fastest]
    assert f"24 x 32, 3 rows, torch.float32{', bias' if bias else ''}: {name}, 10.0 us" in caplog.text
    later = {"cuBLAS": ["cublas", "default"], "cuBLASLt": ["cublaslt", "default"]}.get(name, [])
    assert libraries == ["default", "cublas", "default", "cublaslt", "default", *later, *later]
    products(torch.randn(2, 32), weight)
    assert clock.asked == 8


def test_more_rows_than_the_kernel_takes_are_left_to_libraries() -> None:
    clock = Clock(3.0, 2.0, 1.0)
    made(clock)(torch.randn(5, 32), packed())
    assert clock.asked == 3
    made(clock)(torch.randn(1025, 32), packed())
    assert clock.asked == 3


def test_nothing_is_timed_while_steps_are_recorded_or_requests_wait() -> None:
    """What is known is taken all the same."""
    clock = Clock(2.0, 2.0, 2.0, 1.0)
    products, weight = made(clock), packed()
    products(torch.randn(3, 32), weight)
    clock.open = False
    taken = []
    products._ways["triton"] = lambda x, w: taken.append(len(x)) or few_rows(x, w)
    products(torch.randn(3, 32), weight)
    assert products(torch.randn(4, 32), weight).shape == (4, 24)
    assert clock.asked == 4 and taken == [3]
    clock.open = True
    products(torch.randn(4, 32), weight)
    assert clock.asked == 8


def test_what_was_found_is_kept_for_such_a_machine(tmp_path: Path) -> None:
    file, weight, x = tmp_path / "a folder" / "products.json", packed(), torch.randn(3, 32)
    clock = Clock(2.0, 2.0, 1.0, 2.0)
    made(clock, file)(x, weight)
    assert list(json.loads(file.read_text())["a GPU"].values()) == ["cuBLASLt"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    made(clock, file)(x, weight)
    assert clock.asked == 4
    made(clock, file, "another GPU")(x, weight)
    assert clock.asked == 8
    made(clock, file)(x, weight)
    assert clock.asked == 8, "what another GPU found stands in the place of this one's"


def test_engines_that_write_in_turns_keep_what_both_found(tmp_path: Path) -> None:
    """Each knows but its own model's products."""
    clock, file, weight = Clock(2.0, 2.0, 1.0, 2.0), tmp_path / "products.json", packed()
    one, other = made(clock, file), made(clock, file)
    one(torch.randn(3, 32), weight)
    other(torch.randn(2, 32), weight)
    assert len(json.loads(file.read_text())["a GPU"]) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"a GPU": 3}', '{"a GPU": {"24 x 32, 3 rows, torch.float32": "gone"}}'])
def test_a_file_that_says_nothing_is_written_anew(content: str, tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    file.write_text(content)
    clock = Clock(2.0, 1.0, 2.0, 2.0)
    made(clock, file)(torch.randn(3, 32), packed())
    assert clock.asked == 4 and "cuBLAS" in file.read_text()


def test_a_folder_that_cannot_be_made_costs_nothing_but_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").touch()
    clock = Clock(2.0)
    products, weight = made(clock, tmp_path / "a file" / "products.json"), packed()
    for rows in (3, 4):
        products(torch.randn(rows, 32), weight)
    assert caplog.text.count("is not kept") == 1


def test_without_a_gpu_there_is_nothing_to_time() -> None:
    context = SimpleNamespace(options=TritonGemvOptions(choose="time"), device=torch.device("cpu"), platform=None)
    with pytest.raises(ConfigError, match="ops.choose=time"):
        TritonGemvBody(context)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallel", [Parallel(tp=2), Parallel(cp=2), Parallel(dp=2)], ids=str)
def test_ranks_that_compute_the_same_take_the_same_products(parallel: Parallel) -> None:
    """One that finds another would choose other experts where two are all but equal."""
    context = SimpleNamespace(
        options=TritonGemvOptions(choose="time"),
        device=torch.device("cuda"),
        platform=None,
        start=SimpleNamespace(parallel=parallel),
    )
    with pytest.raises(ConfigError, match="on several ranks"):
        TritonGemvBody(context)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """All ways give the product, whichever is the fastest; and what is recorded is the one that was found."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    from engine_cuda.platform_cuda.late import late_kernels

    serving, late_kernels.serving = late_kernels.serving, False
    try:
        products = TimedProducts(few_rows, "this GPU", tmp_path / "products.json")
        weight = PackedWeight(torch.randn(768, 512, device="cuda", dtype=torch.bfloat16), None)
        for rows in (1, 4, 8, 64):
            x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
            right = x.double() @ weight.weight.double().t()
            for name, way in products._ways.items():
                if name != "triton" or rows <= 4:
                    assert (way(x, weight).double() - right).abs().max() < 0.02 * right.abs().max(), name
            found = products(x, weight)
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                recorded = products(x, weight)
            graph.replay()
            assert torch.equal(found, recorded)
    finally:
        late_kernels.serving = serving
    assert len(json.loads((tmp_path / "products.json").read_text())["this GPU"]) == 4

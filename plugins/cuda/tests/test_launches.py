"""How many kernels a decode step launches: each costs some microseconds, whatever it does, and a step of a small model
has a thousand of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from launches import Launches, MetaWorker, noted

LAYER = [
    *("rotated_write_kernel", "attention_kernel", "linear", "add_rms_norm_kernel", "linear", "silu_mul_kernel"),
    *("linear", "add_rms_norm_kernel", "linear"),
]
"""From a layer's write to the next layer's: nine, of which the write norms and rotates queries and keys."""


def greedy_step(model: str, rows: int = 2, pages: bool = False, gemv: bool = False) -> Launches:
    with noted():
        worker = MetaWorker(model, rows, gemv)
        assert worker.ready.captured == (rows,)
        worker.enter(rows, temperature=0.0)
        return worker.step(pages)


@pytest.mark.parametrize("model", ["dummy:0.6B,layers=4", "dummy:llama-8B,layers=4"])
def test_a_layer(model: str) -> None:
    """Four products, and what cannot be part of them; nothing is copied, converted or made dense between them."""
    launches = greedy_step(model)
    assert launches.layers == [LAYER] * 3
    before = launches.captured[: launches.captured.index("rotated_write_kernel")]
    assert before == ["gather_kernel", "rms_norm_kernel", "linear"]
    last = len(launches.captured) - 1 - launches.captured[::-1].index("rotated_write_kernel")
    assert launches.captured[last:] == LAYER


@pytest.mark.parametrize(("rows", "fused"), [(4, True), (5, False)])
def test_a_layer_of_few_rows(rows: int, fused: bool) -> None:
    """Up to four rows the products take in norms, sums and the activation; the final norm and the head are alone."""
    launches = greedy_step("dummy:0.6B,layers=4", rows, gemv=True)
    if not fused:
        assert launches.layers == [LAYER] * 3
        return
    product = "few_rows_kernel"
    layer = ["rotated_write_kernel", "attention_kernel", product, product, product, product]
    assert launches.layers == [layer] * 3
    assert launches.captured[:3] == ["gather_kernel", product, "rotated_write_kernel"]
    last = len(launches.captured) - 1 - launches.captured[::-1].index("rotated_write_kernel")
    assert launches.captured[last:] == [*layer[:5], "rms_norm_kernel", product]


@pytest.mark.parametrize("model", ["dummy:0.6B,layers=4", "dummy:llama-8B,layers=4"])
def test_a_layer_of_rounded_rows(model: str) -> None:
    """Norms and the activation round their rows, what attention gives is rounded alone: ten launches, thirteen where
    all rows are."""
    rounding, product = "_quantize_rows_kernel", "_scaled_mm"
    apart = [each for name in LAYER for each in ([rounding, product] if name == "linear" else [name])]
    joined = [*("rotated_write_kernel", "attention_kernel", rounding, product, "_normed_rows_kernel", product),
              *(rounding, product, "_normed_rows_kernel", product)]  # fmt: skip
    for fused, layer in ((False, apart), (True, joined)):
        with noted():
            worker = MetaWorker(model, 5, fp8={"fused": fused})
            worker.enter(5, temperature=0.0)
            launches = worker.step()
        assert launches.layers == [layer] * 3
        assert fused == (launches.captured[:3] == ["gather_kernel", "_normed_rows_kernel", product])


def test_around_the_captured_step() -> None:
    """One copy either way; inputs and the attention's plan in one launch each, and new pages of all rows in one. The
    draw reads the model's logits as they are."""
    draw = ["blocks_kernel", "candidates_kernel", "pick_kernel", "place_kernel"]
    for pages, placing in ((False, []), (True, ["index_put_"])):
        launches = greedy_step("dummy:0.6B,layers=2", pages=pages)
        assert launches.outside == ["to_device", *placing, "prepare_kernel", "plan_kernel", *draw, "to_host"]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_whole_step(temperature: float) -> None:
    """Nothing is launched around the graph but the copy to the device; in it one kernel takes what rows draw with, and
    places new pages, and one writes the tokens where the host reads them."""
    with noted():
        worker = MetaWorker("dummy:0.6B,layers=2", 2, whole=True)
        worker.enter(2, temperature=temperature)
        worker.step()
        first, second = worker.step(), worker.step(pages=True)
    assert first.outside == second.outside == ["to_device"]
    assert first.captured[:3] == ["begin_kernel", "prepare_kernel", "plan_kernel"]
    draw = ["blocks_kernel", "candidates_kernel", "pick_kernel", "place_kernel", "tell_kernel"]
    assert first.captured[-len(draw) - 1 :] == ["linear", *draw]


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"logprobs": 1}], ids=str)
def test_rows_that_edit_or_report_logits(asked: dict[str, float]) -> None:
    """They are checked, and copied in float32; so they are for no others."""
    with noted():
        worker = MetaWorker("dummy:0.6B,layers=2", 2)
        worker.enter(2, temperature=0.0, **asked)
        launches = worker.step()
    at = launches.outside.index("check_kernel")
    assert launches.outside[at - 1] == "zeros" and at < launches.outside.index("blocks_kernel")
    assert "check_kernel" not in launches.captured

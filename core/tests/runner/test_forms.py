"""Layers of one kind with different heads and soft caps, some in the pages of others, against a dense forward pass."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from harness import CONFIG, HEAD_SIZE, VOCAB, Driver, Request, dense_logits, params, prompt, started

from engine.kv.layout import make_layout
from engine.types.kv import KVLayout
from engine.types.model import KVSpec, ModelDescription
from engine_reference.models.llama_card import Qwen2


def full(num_kv_heads: int, soft_cap: float | None = None) -> KVSpec:
    return KVSpec(kind="full", num_kv_heads=num_kv_heads, head_size=HEAD_SIZE, soft_cap=soft_cap)


def sliding(num_kv_heads: int, window: int) -> KVSpec:
    return KVSpec(kind="sliding", num_kv_heads=num_kv_heads, head_size=HEAD_SIZE, sliding_window=window)


MIXES = {
    "one table of three forms": (full(2), full(4), full(1, soft_cap=0.3)),
    "two soft caps": (full(2), full(2, soft_cap=0.2), full(2)),
    "two windows beside heads of other numbers": (sliding(2, 5), full(4), sliding(1, 9)),
    "more sliding than full": (sliding(2, 5), full(2), sliding(2, 5)),
}


def mixed(name: str) -> tuple[ModelDescription, KVLayout]:
    model = msgspec.structs.replace(Qwen2.describe(CONFIG), kv_specs=MIXES[name])
    return model, make_layout(model.sites, block_size=4, kv_itemsize=8, tokens_per_page={})


@pytest.mark.parametrize("platform", ["host", "buckets"])
@pytest.mark.parametrize("name", MIXES)
def test_every_layer_attends_in_its_own_form(name: str, platform: str) -> None:
    """In chunks and in batches; on a platform with buckets the steps of one token a row are captured."""
    model, layout = mixed(name)
    attention = "torch" if platform == "host" else "capturable"
    worker = started(model=model, layout=layout, platform=platform, attention=attention)
    try:
        driver = Driver(worker, tables=layout.tables)
        requests = [Request(prompt(11 + 5 * i, i), params(), slot=i) for i in range(3)]
        for request in requests:
            driver.step((request, 7))
            driver.step((request, len(request.prompt) - 7))
        for _ in range(9):
            driver.step(*((request, 1) for request in requests))
    finally:
        worker.shutdown()
    for request in requests:
        logits = dense_logits(request.tokens, model)[len(request.prompt) - 1 : -1]
        assert request.outputs == logits.argmax(dim=1).tolist()


def test_forms_matter() -> None:
    """What the layers have of their own is seen in the logits."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 24).tolist()
    plain = msgspec.structs.replace(Qwen2.describe(CONFIG), kv_specs=(full(2),) * 3)
    capped, _ = mixed("two soft caps")
    assert not np.allclose(dense_logits(tokens, plain), dense_logits(tokens, capped))


def test_the_forms_of_a_table_lie_beside_one_another() -> None:
    _, layout = mixed("one table of three forms")
    assert len(layout.tables) == 1 and len(layout.groups) == 3
    assert sorted(group.offset for group in layout.groups) == [0, 1536, 2304]

"""Draft models in the runner: their memory, and batches of several tokens a row."""

from __future__ import annotations

from typing import Any

import drafters
import msgspec
import numpy as np
import pytest
import test_no_synchronisation as waits
import torch
from harness import Driver, Request, choice, params, prompt, registry, start_message
from remote import serving

from engine.interfaces.drafter import DraftBatch, seen_from
from engine.runner.drafting import Drafting
from engine.runner.session import Session
from engine.runner.worker import TorchWorker
from engine.types.start import WorkerStart


def message(kind: str = "copy", **changes: object) -> WorkerStart:
    drafts = drafters.draft_starts(kind)
    start = start_message(drafts=drafts, layout=drafters.layout_with(drafts), **changes)
    drafter = choice(registry(), "drafter", "draft_model", options={"num_tokens": 3})
    return msgspec.structs.replace(start, choices=(*start.choices, drafter))


@pytest.fixture
def worker() -> TorchWorker:
    worker = TorchWorker(message(), registry())
    worker.start()
    return worker


def drafting_of(worker: TorchWorker) -> Drafting:
    assert worker._runner is not None
    (drafting,) = (part for part in worker._runner._parts if isinstance(part, Drafting))
    return drafting


def session_of(worker: TorchWorker) -> Session:
    return drafting_of(worker)._session


def test_its_weights_and_steps_are_counted() -> None:
    """A largest step is observed, and one with drafts is proposed for."""
    plain = TorchWorker(start_message(num_kv_pages=None, layout=drafters.layout_with(())), registry()).start()
    drafted = TorchWorker(message(num_kv_pages=None), registry()).start()
    assert drafted.weight_bytes == 2 * plain.weight_bytes and drafted.num_parameters == plain.num_parameters
    assert drafted.step_bytes is not None and plain.step_bytes is not None


@pytest.mark.parametrize("tokens", [160, 8, 1])
def test_a_profile_leaves_the_slots_that_it_entered(tokens: int) -> None:
    """Also those that had no room for drafts: the drafter is the one that serves."""
    found = registry(*drafters.CANDIDATES)
    start = start_message(num_kv_pages=None, max_num_batched_tokens=tokens)
    choices = (*start.choices, choice(found, "drafter", "knowing"))
    worker = TorchWorker(msgspec.structs.replace(start, choices=choices), found)
    worker.start()
    chosen: Any = drafting_of(worker)._chosen
    assert chosen.drafter.slots == {}


@pytest.mark.parametrize("sizes", [{"max_num_batched_tokens": 2}, {"max_num_batched_tokens": 1}, {"max_model_len": 2}])
def test_a_profile_of_few_tokens(sizes: dict[str, int]) -> None:
    """A step that has no room for all drafts, or for any."""
    ready = TorchWorker(message(num_kv_pages=None, max_num_seqs=1, **sizes), registry()).start()
    assert ready.step_bytes is not None


@torch.inference_mode()
def test_a_pass_of_several_tokens_is_that_of_one_after_another(worker: TorchWorker) -> None:
    """Rows that have no pages for so many are computed in vain, and write to nobody's."""
    driver = Driver(worker, tables=message().layout.tables)
    requests = [Request(prompt(9 + i, i), params(), slot=i) for i in range(3)]
    driver.step(*((request, len(request.prompt)) for request in requests))
    session = session_of(worker)
    slots, start = np.arange(3, dtype=np.int32), np.array([6, 6, 6], np.int32)
    tokens = torch.stack([session.tokens[slot, 6:9] for slot in range(3)])
    session.limit[:3] = (9, 8, 9)
    assert worker._runner is not None and worker._runner._attention.pool is not None
    pool = worker._runner._attention.pool[1:].view(torch.float64)
    kept = pool.clone()
    together = session.run(0, DraftBatch(slots, start, 3, tokens.flatten())).clone().view(3, 3, -1)
    alone = [session.run(0, DraftBatch(slots, start + i, 1, tokens[:, i].contiguous())).clone() for i in range(3)]
    for i, each in enumerate(alone):
        torch.testing.assert_close(together[[0, 2], i], each[[0, 2]], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pool, kept, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(together[1, 2], alone[2][1])


@torch.inference_mode()
def test_nodes_of_a_tree_are_those_of_their_paths(worker: TorchWorker) -> None:
    """Each depth in one pass, beside each path one token after another. Nodes that a row has no pages for are computed
    in vain."""
    driver = Driver(worker, tables=message().layout.tables)
    requests = [Request(prompt(9 + i, i), params(), slot=i) for i in range(2)]
    driver.step(*((request, len(request.prompt)) for request in requests))
    session, parents = session_of(worker), np.array([-1, 0, -1, 2, 2, 1])
    depths, hidden = seen_from(parents)
    slots, root = np.arange(2, dtype=np.int32), np.array([5, 6], np.int32)
    ids = torch.arange(10, 22, dtype=torch.int32).view(2, 6)
    session.limit[:2] = (12, 13)

    def first(slot: np.ndarray, at: np.ndarray, token_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        return session.run(0, DraftBatch(slot, at, 1, token_ids.contiguous(), **more)).clone()

    first(slots, root, ids[:, 0])
    alone: dict[int, torch.Tensor] = {}
    for node in (3, 4, 5):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        for ahead, one in enumerate(path, 1):
            alone[one] = first(slots, root + ahead, ids[:, one])
    session.limit[1] = 12
    for depth in (1, 2, 3):
        nodes = np.flatnonzero(depths == depth)
        bits, places = np.tile(hidden[nodes], 2), np.add.outer(root, nodes).ravel().astype(np.int32)
        together = first(slots.repeat(len(nodes)), places, ids[:, nodes - 1].flatten(), hidden=bits)
        for place, node in enumerate(nodes.tolist()):
            for row in (0, 1):
                near = torch.allclose(together[row * len(nodes) + place], alone[node - 1][row], rtol=1e-9, atol=1e-9)
                assert near == (row == 0 or node < 6), (node, row)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_no_step_waits_for_the_device(acceptance: str) -> None:
    """Of prompts, of rows with fewer drafts than others, with none, and with given ones."""
    found, start = registry(*waits.CANDIDATES), message("model", device="meta")
    choices = [c for c in start.choices if c.point not in ("platform", "attention", "drafter")]
    choices += [choice(found, "attention", "remote", kind) for kind in ("full", "sliding")]
    choices += [choice(found, "platform", "remote")]
    choices += [choice(found, "drafter", "draft_model", options={"num_tokens": 3, "acceptance": acceptance})]
    worker = TorchWorker(msgspec.structs.replace(start, choices=tuple(choices)), found)
    worker.start()
    steps = waits.Steps(worker)
    with serving():
        steps.enter(waits.GREEDY, waits.DRAWN, waits.EDITED)
        steps.drafted(3)
        steps.drafted(3, 1, 2)
        steps.drafted(0, 3)
        steps.drafted(2, given=2)
        steps.step()

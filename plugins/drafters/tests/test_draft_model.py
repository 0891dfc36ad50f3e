"""Drafter `draft_model`: its suite, how its model is found, and what is said of one that cannot draft."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM
from engine.config.settings import EngineConfig
from engine.frontend.launch import Launch, launch
from engine.interfaces.drafter import DraftBatch
from engine.interfaces.executor import rank_starts
from engine.interfaces.step import TargetStep
from engine.types.errors import ConfigError, ModelNotFoundError, OptionsError, UnsupportedModelError
from engine.types.plan import GivenDrafts, PageCopies, StepPlan
from engine_kit.draft_memory import stored_bytes
from engine_sdk.conformance import DrafterConformance
from engine_sdk.conformance.drafter import SLOTS, Observed

TARGET, DRAFT = "dummy:0.6B", "dummy:0.6B,layers=3"


class TestDraftModel(DrafterConformance):
    driver = "draft_model"
    quick = r"^(?!test_what_is_accepted)"  # long, and of the engine; `mtp` has it too

    @pytest.mark.parametrize("more", [{}, {"copies": True}, {"given": True}, {"prompt": True}], ids=str)
    def test_what_was_computed_with_the_drafts_is_not_computed_again(
        self, more: dict[str, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But on pages that were copied over it, of drafts from elsewhere, and beside a prompt."""
        drafter, rows, table, steps = self.make(), self.rows(3, 6), self.table(3), list[TargetStep]()
        session = self.session(drafter)
        self._enter(drafter, rows, table)
        drafts = self.drafted(drafter, rows, table)
        monkeypatch.setattr(session, "run_step", lambda index, step, features=None: steps.append(step))
        slot, first, counts = rows.slot, rows.num_tokens - 1, [len(of_row) for of_row in drafts]
        if "prompt" in more:
            slot, first, counts = np.append(slot, SLOTS - 1).astype(np.int32), np.append(first, 0), [*counts, 0]
        step = drafted_step(
            slot, first, counts,
            copies=PageCopies(table=slot[:1] * 0, source=slot[:1], destination=slot[1:2]) if "copies" in more else None,
            given_drafts=GivenDrafts(row=slot[:1], tokens=table[:1, :1].numpy()) if "given" in more else None,
        )  # fmt: skip
        drafter.observe(step, session)
        assert len(steps) == bool(more)
        drafter.observe(step, session)
        assert len(steps) == bool(more) + 1, "of another step nothing is known"

    @pytest.mark.parametrize("then", ["drafts", "others"])
    def test_the_last_draft_is_computed_once_it_was_kept(self, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a pass of those rows alone, before drafts are made again, or a step is computed that has others in it."""
        drafter, rows, table = self.make(), self.rows(3, 6), self.table(3)
        session, passes, steps = self.session(drafter), list[DraftBatch](), list[TargetStep]()
        drafter._block_size = 10**6
        run, most = session.run, int(rows.num_drafts.max())
        self._enter(drafter, rows, table)
        counts = [len(drafts) for drafts in self.drafted(drafter, rows, table)]
        monkeypatch.setattr(session, "draft", lambda index, rows: None)
        monkeypatch.setattr(session, "run", lambda index, batch: (passes.append(batch), run(index, batch))[1])
        monkeypatch.setattr(session, "run_step", lambda index, step, features=None: steps.append(step))
        drafter.observe(drafted_step(rows.slot, rows.num_tokens - 1, counts), session)
        assert not passes and not steps
        after = rows._replace(num_tokens=rows.num_tokens + rows.num_drafts + 1)  # all were kept
        if then == "drafts":
            self.drafted(drafter, after, table)
        else:
            drafter.observe(drafted_step(after.slot, after.num_tokens - 1, [0] * len(counts)), session)
        late = rows.num_drafts == most
        assert 0 < late.sum() < len(late) and len(steps) == (then == "others")
        assert (passes[0].slot == rows.slot[late]).all() and (passes[0].start == after.num_tokens[late] - 2).all()
        passes.clear()
        self.drafted(drafter, after, table)
        assert len(passes) == most

    def test_blocks_are_whole_when_their_step_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter, rows, table = self.make(), self.rows(3, 6), self.table(3)
        session, passes, most = self.session(drafter), list[DraftBatch](), int(rows.num_drafts.max())
        run = session.run
        self._enter(drafter, rows, table)
        monkeypatch.setattr(session, "draft", lambda index, rows: None)
        monkeypatch.setattr(session, "run", lambda index, batch: (passes.append(batch), run(index, batch))[1])
        drafter._block_size = int(rows.num_tokens[0]) + most
        self.drafted(drafter, rows, table)
        assert len(passes) == most + 1 and (passes[-1].start == rows.num_tokens - 1 + most).all()
        after = rows._replace(num_tokens=rows.num_tokens + rows.num_drafts + 1)
        passes.clear()
        drafter._block_size = 10**6
        self.drafted(drafter, after, table)
        assert len(passes) == most, "nothing is behind"


def drafted_step(slot: np.ndarray, first: np.ndarray, counts: Sequence[int], **more: Any) -> TargetStep:
    """A step of rows that have so many drafts."""
    num_drafts, nothing = np.array(counts, np.int32), torch.empty(0)
    plan = StepPlan(
        step_id=0, slot_of_row=slot, num_computed=first.astype(np.int32), num_tokens=1 + num_drafts, num_decodes=0,
        samples=np.ones(len(slot), bool), new_slots=[], new_blocks=[], num_drafts=num_drafts, **more,
    )  # fmt: skip
    return Observed(plan, nothing, nothing, {}, nothing, nothing)


def launched(model: str = TARGET, draft: str | None = DRAFT, **settings: Any) -> Launch:
    named = {} if draft is None else {"drafter.model": draft}
    return launch(EngineConfig(model=model, drafter="draft_model", dtype="float32", **named, **settings))


def test_its_layers_lie_behind_the_targets() -> None:
    """In the same tables and blocks: a prefix is found by as many tokens as without it."""
    start, alone = launched().start.worker, launch(EngineConfig(model=TARGET, dtype="float32")).start.worker
    (draft,) = start.drafts
    assert start.model == alone.model and draft.model.num_layers == 3 and draft.files.name == DRAFT
    assert start.layout.tables == alone.layout.tables and start.layout.block_size == alone.layout.block_size
    sites = [(group.model, site) for group in start.layout.groups for site in group.sites]
    count = alone.model.num_layers
    assert sites == [(0, i) for i in range(count)] + [(1, count + i) for i in range(3)]
    assert all(group.page_format for group in start.layout.groups)
    assert start.layout.page_bytes * count == alone.layout.page_bytes * (count + 3)
    assert {choice.point for choice in draft.choices} == {"checkpoint", "model"}


@pytest.mark.parametrize("ranks", [None, 1])
def test_over_ranks_it_is_divided_or_whole(ranks: int | None) -> None:
    settings = {} if ranks is None else {"drafter.tensor_parallel_size": ranks}
    start = launched(tensor_parallel_size=2, **settings).start.worker
    heads = {group.model: group.num_kv_heads for group in start.layout.groups}
    assert heads[1] == (2 if ranks else 1) * heads[0] and start.drafts[0].parallel.tp == (ranks or 2)


def test_what_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no draft model is named, and none .* name a smaller model"):
        launched(draft=None)
    with pytest.raises(ModelNotFoundError, match="/no/where"):
        launched(draft="/no/where")
    with pytest.raises(OptionsError):
        launched(**{"drafter.tensor_parallel_size": 3})
    with pytest.raises(UnsupportedModelError, match=r"\(draft model dummy:\S+ on 3 ranks\); .* does not divide over 3"):
        launched("dummy:0.6B,heads=12,kv_heads=3", DRAFT, tensor_parallel_size=3)


def test_the_last_stage_has_it() -> None:
    """Its layers lie there alone, in the blocks that all stages have; what it would need of the others is refused."""
    start = launched(pipeline_parallel_size=2).start.worker
    assert start.drafts[0].parallel.pp == 1
    first, last = rank_starts(start)
    assert [len(rank.drafts) for rank in (first, last)] == [0, 1]
    assert {group.model for group in first.layout.groups} == {0} and first.layout.tables == last.layout.tables
    assert sum(len(group.sites) for group in last.layout.groups if group.model) == 3
    settings: dict[str, Any] = {"model": "tiny", "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match="drafter=medusa with pipeline_parallel_size=2; it proposes trees"):
        launch(EngineConfig(drafter="medusa", **settings, **{"drafter.tree": "[[0], [1]]"}))


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has a vocabulary of 151,936 tokens, and the target one of 4,096"):
        launched(model="tiny")


def test_a_model_of_fewer_positions_is_refused(tmp_path: Path) -> None:
    """But for requests that have no more."""
    (tmp_path / "config.json").write_text(
        json.dumps({**launch(EngineConfig(model="tiny")).files.config, "max_position_embeddings": 512})
    )
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"512 positions, and requests have up to 2,048 tokens \(--max-model-len\)"):
        launched("tiny", str(tmp_path))
    assert launched("tiny", str(tmp_path), max_model_len=512).start.worker.drafts


def written(folder: Path, *shapes: tuple[int, ...], kind: str = "F32") -> str:
    """A folder of the bundled model's config, whose file says that it has tensors of these shapes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(launch(EngineConfig(model="tiny")).files.config))
    size, header, end = int(kind[1:]) // 8, {}, 0
    for number, shape in enumerate(shapes):
        begin, end = end, end + math.prod(shape) * size
        header[f"tensor.{number}"] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return str(folder)


def test_a_model_that_does_not_fit_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the files say of their tensors, beside the target's; nothing of them is opened. On the last byte."""
    monkeypatch.setattr("engine_reference.checkpoint_safetensors.SafetensorsReader.weights", None)
    target, draft = written(tmp_path / "target", (1000, 50), (1000,)), written(tmp_path / "draft", (300, 100), (50,))
    asked = partial(launched, tokenizer="tiny")
    refused = "in float32 the weights of the model take at least 204,000 bytes on each rank, and those of what drafts "
    refused += r"120,200; .*: 324,199 bytes; name a smaller draft model"
    for room, said in ((324_200, None), (324_199, refused)):
        monkeypatch.setattr("engine_kit.host_memory.total_memory", lambda room=room: room)
        if said is None:
            assert asked(target, draft).start.worker.drafts
            continue
        with pytest.raises(ConfigError, match=said):
            asked(target, draft)
        with (
            pytest.raises(ConfigError, match=said),
            LLM(target, tokenizer="tiny", drafter="draft_model", dtype="float32", **{"drafter.model": draft}),
        ):
            pass
    assert launch(EngineConfig(model=target, tokenizer="tiny", dtype="float32")).start, (
        "without a drafter the worker says it"
    )
    with pytest.raises(ConfigError, match="102,000 bytes on each rank, .* 120,200; .*324,199 bytes, of which .* 50%"):
        asked(target, draft, memory_utilization=0.5, tensor_parallel_size=2, **{"drafter.tensor_parallel_size": 1})
    assert asked(target, draft, tensor_parallel_size=2).start.worker.drafts
    assert asked(target, draft, quantization="absmax").start.worker.drafts, "what is left of them is not known"


def test_numbers_that_are_stored_smaller_count_as_they_are_computed(tmp_path: Path) -> None:
    """But for those that are no floats, and files that are of another form."""
    files = {kind: written(tmp_path / kind, (10, 10), (7,), kind=kind) for kind in ("F16", "F64", "I32", "U8")}
    sizes = {kind: stored_bytes([f"{folder}/model.safetensors"], 4) for kind, folder in files.items()}
    assert sizes == {"F16": 428, "F64": 428, "I32": 428, "U8": 107}
    (tmp_path / "head.pt").write_bytes(b"PK" * 100)
    assert stored_bytes([str(tmp_path / "head.pt"), str(tmp_path / "nowhere")], 4) == 200


def test_tensors_that_no_body_reads_do_not_count(tmp_path: Path) -> None:
    """Layers for further tokens, and the copy of an embedding that the head shares."""
    names = ("model.layers.1.x", "model.layers.2.x", "mtp.x", "lm_head.weight", "model.embed.weight")
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    whole = {"num_hidden_layers": 2, "tie_word_embeddings": True}
    for config, count in ((whole, 2), ({**whole, "tie_word_embeddings": False}, 3), ({}, 5)):
        assert stored_bytes([str(file)], 4, config) == 8 * count


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, UnsupportedModelError, "NobodysForCausalLM"),
        ({"architectures": ["LlamaModel"]}, ConfigError, "LlamaModel writes no text"),
        ({"quantization_config": {"quant_method": "nobodys"}}, UnsupportedModelError, "stored as 'nobodys'"),
        ({"head_dim": 7}, UnsupportedModelError, "7 of 7 elements of a head"),
        ({"architectures": ["BartForConditionalGeneration"]}, ConfigError, "nor gives it what an encoder reads"),
    ],
    ids=["architecture", "pooling", "stored form", "heads", "encoder"],
)
def test_a_model_that_cannot_draft(changed: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    """No weight is read: the file has none."""
    config = {**launch(EngineConfig(model="tiny")).files.config, **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(error, match=match):
        launched("tiny", str(tmp_path))

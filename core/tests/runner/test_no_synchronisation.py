"""A step neither waits for the device nor sends it more than what changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from harness import OUR_PROCESSORS, VOCAB, choice, layout, params, prompt, registry
from harness import start_message as host_start
from remote import RemotePlatformBody, Waited, serving

from engine.interfaces.executor import StepFuture
from engine.plugin import Candidate
from engine.runner.results import FailedStep
from engine.runner.worker import TorchWorker
from engine.types.params import SamplingParams
from engine.types.plan import GivenDrafts, Masks, NewBlocks, NewSlot, PageCopies, StepPlan
from engine.types.pooling import PoolerConfig, PoolingParams
from engine_kit.step_pooler import StepPooler

CANDIDATES = (
    Candidate("platform", "remote", 0, "harness", "1", "remote:RemotePlatform"),
    Candidate("attention", "remote", 0, "harness", "1", "remote:RemoteAttention"),
    Candidate("drafter", "branching", 1, "harness", "1", "remote:Branching"),
)
ROWS, PROMPT, BLOCK = 6, 7, 4


class Steps:
    """Steps of requests whose results never come: each row gets one token after the other, on pages of its own."""

    def __init__(self, worker: TorchWorker) -> None:
        self.worker = worker
        self.step_id = 0
        self.computed = np.zeros(ROWS, np.int32)
        self.blocks = [np.zeros(ROWS, np.int32) for _ in layout().tables]
        self.free = iter(range(1, 300))

    def enter(self, *of_rows: SamplingParams) -> None:
        """All rows compute their prompts."""
        slots = [
            NewSlot(
                slot=slot,
                request_id=str(slot),
                token_ids=np.array(prompt(PROMPT, slot), np.int32),
                num_prompt_tokens=PROMPT,
                params=of_rows[slot % len(of_rows)],
                stop_token_ids=np.array([1, 2], np.int32),
            )
            for slot in range(ROWS)
        ]
        self.step(np.full(ROWS, PROMPT, np.int32), new_slots=slots)

    def step(self, num_tokens: np.ndarray | None = None, given: int = 0, **fields: Any) -> StepFuture:
        """One token a row, or so many; `given` rows are given their drafts."""
        num_tokens = np.ones(ROWS, np.int32) if num_tokens is None else num_tokens
        new_blocks = []
        for held, table in zip(self.blocks, layout().tables, strict=True):
            wanted = np.maximum(held, -(-(self.computed + num_tokens) // table.tokens_per_block))
            slot = np.repeat(np.arange(ROWS, dtype=np.int32), wanted - held)
            index = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(held, wanted, strict=True)])
            page = np.array([next(self.free) for _ in slot], np.int32)
            new_blocks.append(NewBlocks(slot=slot, index=index, page=page))
            held[:] = wanted
        decodes = not (num_tokens > 1).any()
        if given:
            tokens = np.zeros((given, int(num_tokens[:given].max()) - 1), np.int32)
            fields["given_drafts"] = GivenDrafts(row=np.arange(given, dtype=np.int32), tokens=tokens)
        plan = StepPlan(
            step_id=self.step_id,
            slot_of_row=np.arange(ROWS, dtype=np.int32),
            num_computed=self.computed.copy(),
            num_tokens=num_tokens,
            samples=np.ones(ROWS, bool),
            num_decodes=ROWS if decodes else 0,
            new_blocks=new_blocks,
            **({"new_slots": []} | fields),
        )
        self.step_id += 1
        future = self.worker.execute(plan)
        if isinstance(future, FailedStep):
            future.result()  # raises what went wrong
        self.computed += 1 if plan.num_drafts is not None else num_tokens
        return future

    def drafted(self, *num_drafts: int, **fields: Any) -> StepFuture:
        """A step with so many drafts in each row, of which none is kept."""
        drafts = np.resize(np.array(num_drafts, np.int32), ROWS)
        return self.step(1 + drafts, num_drafts=drafts, **fields)


def steps(drafts: str = "ngram", **changes: Any) -> Steps:
    found = registry(*CANDIDATES)
    plain = host_start()
    chosen = [c for c in plain.choices if c.point not in ("platform", "attention")]
    fields: dict[str, Any] = {
        "device": "meta",
        "choices": (
            *chosen,
            choice(found, "platform", "remote"),
            *(choice(found, "attention", "remote", kind) for kind in ("full", "sliding")),
            *(
                (choice(found, "drafter", drafts, options={"num_tokens": 3, **changes.pop("drafter")}),)
                if "drafter" in changes
                else ()
            ),
        ),
    }
    worker = TorchWorker(host_start(**(fields | changes)), found)
    worker.start()
    return Steps(worker)


GREEDY = params()
DRAWN = params(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05)
EDITED = params(
    temperature=0.8, presence_penalty=0.3, repetition_penalty=1.2, min_tokens=90, max_tokens=99, logprobs=3,
    logit_bias={5: -1.0, 6: 2.0}, allowed_token_ids=[*range(40)],
)  # fmt: skip
EDITED.bad_words_token_ids = [[3, 4], [7]]


def masks(rows: np.ndarray) -> Masks:
    return Masks(row=rows.astype(np.int32), bits=np.full((len(rows), -(-VOCAB // 32)), -1, np.int32))


@pytest.mark.parametrize(
    "of_rows", [(GREEDY,), (DRAWN,), (EDITED,), (GREEDY, DRAWN, EDITED)], ids=["greedy", "drawn", "edited", "all"]
)
def test_no_step_waits_for_the_device(of_rows: tuple[SamplingParams, ...]) -> None:
    """From the prompts on, with masks that follow and without."""
    assert OUR_PROCESSORS
    found = steps()
    with serving():
        found.enter(*of_rows)
        for _ in range(3):
            found.step()
        found.step(masks_follow=True)
        found.worker.sample(found.step_id - 1, masks(np.array([0, 2, 5])))


def test_what_steps_do_beside_tokens_waits_for_nothing() -> None:
    """Log probabilities of prompts, and pages that are copied first."""
    found, scored = steps(), params(prompt_logprobs=2)
    with serving():
        found.enter(GREEDY, scored)
        copies = {name: np.array([2, 3], np.int32) for name in ("table", "source")}
        found.step(copies=PageCopies(**copies, destination=np.array([297, 298], np.int32)))


@pytest.mark.parametrize("task", ["embed", "token_embed", "classify", "token_classify"])
def test_pooling_waits_for_nothing(task: str) -> None:
    """Wishes that differ from row to row, and a prompt in pieces, on a platform whose tensors have no values."""
    pooler_config = PoolerConfig(pooling_type="mean", num_labels=3)
    description = SimpleNamespace(pooler=pooler_config)
    platform = RemotePlatformBody(SimpleNamespace(start=SimpleNamespace(device="meta")))  # type: ignore[arg-type]
    model = SimpleNamespace(classify=lambda vectors: vectors[:, :3])
    pooler = StepPooler(platform, model, description)  # type: ignore[arg-type]
    for slot in range(ROWS):
        wish = PoolingParams(task=task, normalize=bool(slot % 2), pooling_type=("mean", "cls", "last")[slot % 3])
        if task == "token_classify" and slot % 2:
            wish = PoolingParams(task=task, step_tag_id=slot, returned_token_ids=[2, 0])
        ids = np.arange(PROMPT, dtype=np.int32)
        new = SimpleNamespace(slot=slot, pooling=wish, num_prompt_tokens=PROMPT, token_ids=ids)
        pooler.enter(new)  # type: ignore[arg-type]
    with serving():
        for first, count in ((0, 3), (3, PROMPT - 3)):
            plan = SimpleNamespace(
                step_id=0,
                num_rows=ROWS,
                total_tokens=count * ROWS,
                slot_of_row=np.arange(ROWS, dtype=np.int32),
                num_computed=np.full(ROWS, first, np.int32),
                num_tokens=np.full(ROWS, count, np.int32),
            )
            step = SimpleNamespace(plan=plan, hidden=torch.zeros(count * ROWS, 8, device="meta"))
            pooler.launched(step)  # type: ignore[arg-type]


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_no_step_with_drafts_waits_for_the_device(acceptance: str) -> None:
    found = steps(drafter={"acceptance": acceptance})
    with serving():
        found.enter(GREEDY, DRAWN, EDITED)
        found.drafted(3)
        found.drafted(3, 1, 2)
        found.drafted(0, 3)
        found.drafted(2, given=2)
        found.step()


def test_no_step_with_trees_of_drafts_waits_for_the_device() -> None:
    model = msgspec.structs.replace(host_start().model, attention_features=("tree",))
    found = steps("branching", drafter={}, model=model)
    with serving():
        found.enter(GREEDY, DRAWN, EDITED)
        found.drafted(3)
        found.drafted(3, 1, 2)
        found.drafted(0, 3)
        found.step()


def test_a_wait_is_found() -> None:
    """The proof's own proof."""
    with serving():
        x = torch.zeros(3, device="meta")
        host = torch.from_numpy(np.ones(3, np.float32))
        for asked in (
            lambda: bool(x.any()),
            lambda: x.tolist(),
            lambda: x.nonzero(),
            lambda: x[x > 0],
            lambda: torch.tensor([1], device="meta"),
            lambda: x.to("cpu"),
            lambda: host.to("meta"),
            lambda: x.copy_(host),
            lambda: x + host,
        ):
            with pytest.raises(Waited):
                asked()


def uploads(found: Steps, count: int) -> list[list[int]]:
    """The bytes of every copy of so many decode steps."""
    told = []
    for _ in range(count):
        RemotePlatformBody.uploads.clear()
        found.step()
        told.append([upload.bytes for upload in RemotePlatformBody.uploads])
    return told


@pytest.mark.parametrize("of_rows", [(GREEDY,), (DRAWN,), (EDITED,)], ids=["greedy", "drawn", "edited"])
def test_a_decode_step_sends_one_small_array(of_rows: tuple[SamplingParams, ...]) -> None:
    """Rows that stay need nothing but where they stand, and their new pages: 16 bytes for the row's own numbers, 16 for
    its token's places, 12 for each new page, and what fills arrays up to 16 bytes."""
    found = steps()
    found.enter(*of_rows)
    found.step()
    for copies in uploads(found, 8):
        assert len(copies) == (1 if of_rows != (EDITED,) else 2), "min_tokens keeps telling its stop ids"
        assert copies[0] <= 16 * (ROWS + 4) + 16 * (ROWS + 1) + 24 * 2 * ROWS


def test_a_step_with_drafts_sends_three_small_arrays() -> None:
    """What the drafter asks for, the drafts' places, and the step's own; a fourth where there are new pages."""
    found = steps(drafter={})
    found.enter(GREEDY)
    found.drafted(3)
    for _ in range(8):
        RemotePlatformBody.uploads.clear()
        blocks = sum(held.sum() for held in found.blocks)
        found.drafted(3)
        new = sum(held.sum() for held in found.blocks) > blocks
        assert len(RemotePlatformBody.uploads) == 3 + bool(new)
        assert sum(upload.bytes for upload in RemotePlatformBody.uploads) < 3000

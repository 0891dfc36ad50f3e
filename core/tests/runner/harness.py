"""A tiny random Qwen2 with full and sliding layers, hand-written plans for it, and a dense oracle.

The drivers are the installed ones, but for the checkpoint (random weights), and where a test registers others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from dense import dense

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.checkpoint import CheckpointCard
from engine.interfaces.context import WorkerContext
from engine.interfaces.executor import StepFuture
from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsRows
from engine.interfaces.model import ModelContext, State
from engine.interfaces.ops import OPERATIONS
from engine.interfaces.platform import CaptureKey, Trial
from engine.interfaces.step import StepPart
from engine.plugin import Candidate, Registry
from engine.runner import model_runner
from engine.runner.worker import TorchWorker
from engine.types.kv import KVGroup, KVLayout, KVTable
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.params import SamplingParams
from engine.types.plan import NewBlocks, NewSlot, StepPlan, StepResult
from engine.types.start import Choice, WorkerStart
from engine_reference.attention_torch.attention import TorchAttentionBody
from engine_reference.attention_torch.card import TorchAttention
from engine_reference.models.llama import Qwen2Model
from engine_reference.models.llama_card import Qwen2
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_reference.platform_host.card import HostPlatform
from engine_reference.platform_host.platform import HostPlatformBody

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, WINDOW = 61, 24, 4, 2, 6, 32, 5
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float64",
}


OUR_PROCESSORS = ("allowed_token_ids", "bad_words", "logit_bias")
ALL_PROCESSORS = (*OUR_PROCESSORS, "neighbours", "fewer-repeats")


def random_weights(model: ModelDescription | None = None, seed: int = 5) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint with this config; model: which may have other layers, with KV heads of their own."""
    specs = (Qwen2.describe(CONFIG) if model is None else model).kv_specs
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * 0.25

    yield "model.embed_tokens.weight", tensor(VOCAB, HIDDEN)
    for index in range(len(specs)):
        prefix = f"model.layers.{index}"
        kv_heads = specs[index].num_kv_heads
        for name, rows in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}.self_attn.{name}_proj.weight", tensor(rows * HEAD_SIZE, HIDDEN)
            yield f"{prefix}.self_attn.{name}_proj.bias", tensor(rows * HEAD_SIZE)
        yield f"{prefix}.self_attn.o_proj.weight", tensor(HIDDEN, HEADS * HEAD_SIZE)
        yield f"{prefix}.mlp.gate_proj.weight", tensor(INNER, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", tensor(INNER, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", tensor(HIDDEN, INNER)
        yield f"{prefix}.input_layernorm.weight", 1 + tensor(HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", 1 + tensor(HIDDEN)
    yield "model.norm.weight", 1 + tensor(HIDDEN)
    yield "lm_head.weight", tensor(VOCAB, HIDDEN)


class RandomCheckpoint(CheckpointCard):
    """Claims nothing: the plans name it."""

    body = "harness:RandomCheckpointBody"


class RandomCheckpointBody:
    def __init__(self, context: WorkerContext) -> None:
        assert context.platform is not None and context.ops is not None and context.dtype is not None
        self._model = context.start.model
        self._name = context.start.files.name

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a checkpoint that is called "other N", with another seed."""
        return random_weights(self._model, int(self._name.removeprefix("other ")) if "other" in self._name else 5)


class BucketPlatform(HostPlatform):
    """Pads decode steps, and captures them."""

    recorder = "stream"
    captures_drafts = "padded"
    captures_mixed = True
    body = "harness:BucketPlatformBody"


class BucketPlatformBody(HostPlatformBody):
    """What it captured, and how often each was replayed, stands in `captures`."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.captures: dict[CaptureKey | None, int] = {}

    def buckets(self, max_num_seqs: int, tokens_per_row: int = 1) -> tuple[int, ...]:
        return {0: (12, 40), 1: (4, 12)}.get(tokens_per_row, (2, 5))

    def capture(self, fn: Callable[[], None], key: CaptureKey | None, trial: Trial | None = None) -> Callable[[], None]:
        assert key not in self.captures, "a key is captured once"
        self.captures[key] = 0

        def replay() -> None:
            self.captures[key] += 1
            fn()

        return replay


class CapturableAttention(TorchAttention):
    """The reference, under a capture that runs Python again."""

    body = "harness:CapturableAttentionBody"


class CapturableAttentionBody(TorchAttentionBody):
    capture_level = "any"

    def plan(self, batch: AttentionBatch, group: KVGroup, out: Any = None) -> Any:
        """And the batch says the truth about its bounds."""
        exact = batch.seq_lens.tolist()
        assert batch.bounds_are_exact and exact == batch.seq_lens_bound.tolist()
        bounds = batch.query_start_loc_host.tolist()
        last = [int(batch.kv_index[end - 1]) if end > start else -1 for start, end in pairwise(bounds)]
        assert all(keys == 1 + place or place == -1 for keys, place in zip(exact, last, strict=True))
        return super().plan(batch, group, out)


class Neighbours(LogitsProcessorCard):
    """A stranger's: `neighbours` is added to the logits of the ids beside the last token. Reads it on the device."""

    extra_args = frozenset({"neighbours"})
    body = "harness:NeighboursBody"


class NeighboursBody:
    def __init__(self, context: WorkerContext) -> None:
        assert context.device is not None
        self.bias = torch.zeros(context.start.max_num_seqs, dtype=torch.float64)

    def enter(self, new: NewSlot) -> None:
        assert new.params.extra_args is not None
        self.bias[new.slot] = new.params.extra_args["neighbours"]

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        assert rows.host_tokens is None
        row = torch.arange(len(logits)) if rows.row is None else rows.row
        last = rows.tokens[rows.slot, rows.num_tokens - 1].long()
        for beside in (1, -1):
            logits[row, (last + beside) % VOCAB] += self.bias[rows.slot].to(logits.dtype)


class FewerRepeats(LogitsProcessorCard):
    """Another stranger's: none of the last `window` tokens is drawn again. Reads them on the host."""

    extra_args = frozenset({"window"})
    host_tokens = True
    body = "harness:FewerRepeatsBody"


class FewerRepeatsBody:
    def __init__(self, context: WorkerContext) -> None:
        self.window = np.zeros(context.start.max_num_seqs, np.int64)

    def enter(self, new: NewSlot) -> None:
        assert new.params.extra_args is not None
        self.window[new.slot] = new.params.extra_args["window"]

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        assert rows.host_tokens is not None
        places = range(len(logits)) if rows.row is None else rows.row.tolist()
        for place, slot, n in zip(places, rows.host_slot.tolist(), rows.host_num_tokens.tolist(), strict=True):
            recent = rows.host_tokens[slot, max(0, n - int(self.window[slot])) : n]
            logits[place, torch.from_numpy(recent).long()] = -torch.inf


def random_candidate(point: str, name: str, card: str) -> Candidate:
    return Candidate(point, name, 0, "harness", "1", f"harness:{card}")


CHECKPOINT = random_candidate("checkpoint", "random", "RandomCheckpoint")
BUCKETS = random_candidate("platform", "buckets", "BucketPlatform")
CAPTURABLE = random_candidate("attention", "capturable", "CapturableAttention")
PROCESSORS = (
    random_candidate("logits_processor", "neighbours", "Neighbours"),
    random_candidate("logits_processor", "fewer-repeats", "FewerRepeats"),
)


def registry(*more: Candidate) -> Registry:
    return Registry.discover(extra=(CHECKPOINT, BUCKETS, CAPTURABLE, *PROCESSORS, *more))


def layout(tp: int = 1, block: int = 8) -> KVLayout:
    """8 tokens a block: the two sliding layers fill a page, the full one takes half of one.

    tp: ranks that share the heads. block: its tokens.
    """
    layer_bytes = block * 2 * KV_HEADS // tp * HEAD_SIZE * 8
    common = {"num_kv_heads": KV_HEADS // tp, "head_size": HEAD_SIZE, "tokens_per_block": block}
    common["layer_bytes"] = layer_bytes
    return KVLayout(
        block_size=block,
        page_bytes=2 * layer_bytes,
        tables=(
            KVTable(index=0, kind="sliding", window=WINDOW, tokens_per_block=block),
            KVTable(index=1, kind="full", window=None, tokens_per_block=block),
        ),
        groups=(
            KVGroup(index=0, kind="sliding", sites=(0, 2), sliding_window=WINDOW, **common),
            KVGroup(index=1, kind="full", sites=(1,), sliding_window=None, table=1, **common),
        ),
    )


def choice(found: Registry, point: str, driver: str, kind: str = "", options: dict[str, Any] | None = None) -> Choice:
    candidate = found.find(point, driver)
    return Choice(
        point=point, kind=kind, driver=driver, distribution=candidate.distribution, version=candidate.version,
        value=candidate.value, options=options or {},
    )  # fmt: skip


def start_message(
    platform: str = "host", attention: str = "torch", processors: tuple[str, ...] = OUR_PROCESSORS, **changes: Any
) -> WorkerStart:
    found = registry()
    fields: dict[str, Any] = {
        "choices": (
            choice(found, "platform", platform),
            *(choice(found, "ops", "torch", operation) for operation in OPERATIONS),
            *(choice(found, "attention", attention, kind) for kind in ("full", "sliding")),
            choice(found, "model", "Qwen2ForCausalLM"),
            choice(found, "checkpoint", "random"),
            *(choice(found, "logits_processor", name) for name in processors),
        ),
        "model": Qwen2.describe(CONFIG),
        "files": CheckpointFiles(name="random", folder="", weights=(), config=CONFIG),
        "layout": layout(),
        "dtype": "float64",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 160,
        "num_kv_pages": 300,
    }
    return WorkerStart(**{**fields, **changes})


def started(**changes: Any) -> TorchWorker:
    worker = TorchWorker(start_message(**changes), registry())
    worker.start()
    return worker


@dataclass
class Request:
    """What the test knows of a request."""

    prompt: list[int]
    params: SamplingParams
    slot: int
    stop_ids: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    computed: int = 0
    placed: int = 0
    """Tokens known or promised by a step under way."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of each group."""
    fresh: bool = True

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


def params(**fields: Any) -> SamplingParams:
    made = SamplingParams(**{"temperature": 0.0, "seed": 11, **fields})
    made.verify()
    return made


class Driver:
    """Writes plans by hand: who computes how many tokens. Takes pages at random and gives none back."""

    def __init__(self, worker: TorchWorker, seed: int = 0, tables: tuple[KVTable, ...] | None = None) -> None:
        self.worker = worker
        self.step_id = 0
        self.tables = layout().tables if tables is None else tables
        self.free = (np.random.default_rng(seed).permutation(299) + 1).tolist()
        self.under_way: list[tuple[StepFuture, list[Request], np.ndarray]] = []

    def preempt(self, request: Request, slot: int) -> None:
        """Forget its cache; it comes back, in another slot, with all its tokens."""
        assert request.placed == len(request.tokens), "it is not scheduled while tokens still return"
        request.slot = slot
        request.computed = 0
        request.fresh = True
        request.blocks = []

    def submit(self, *work: tuple[Request, int]) -> StepPlan:
        """Launch a step; decodes first."""
        new_slots, entries = [], [[] for _ in self.tables]
        for request, count in work:
            if request.fresh:
                request.fresh = False
                request.placed = len(request.tokens)
                request.blocks = [0] * len(self.tables)
                new_slots.append(
                    NewSlot(
                        slot=request.slot,
                        request_id=str(request.slot),
                        token_ids=np.array(request.tokens, np.int32),
                        num_prompt_tokens=len(request.prompt),
                        params=request.params,
                        stop_token_ids=np.array(request.stop_ids, np.int32),
                    )
                )
            for t, table in enumerate(self.tables):
                while request.blocks[t] * table.tokens_per_block < request.computed + count:
                    entries[t].append((request.slot, request.blocks[t], self.free.pop()))
                    request.blocks[t] += 1
        samples = np.array([request.computed + count == request.placed for request, count in work])
        plan = StepPlan(
            step_id=self.step_id,
            slot_of_row=np.array([request.slot for request, _ in work], np.int32),
            num_computed=np.array([request.computed for request, _ in work], np.int32),
            num_tokens=np.array([count for _, count in work], np.int32),
            samples=samples,
            num_decodes=int(
                np.cumprod([count == 1 and draws for (_, count), draws in zip(work, samples, strict=True)]).sum()
            ),
            new_slots=new_slots,
            new_blocks=[NewBlocks(**_columns(rows)) for rows in entries],
        )
        self.step_id += 1
        self.under_way.append((self.worker.execute(plan), [request for request, _ in work], samples))
        for (request, count), draws in zip(work, samples, strict=True):
            request.computed += count
            request.placed += int(draws)
        return plan

    def take(self) -> StepResult:
        """Wait for the oldest step under way."""
        future, requests, samples = self.under_way.pop(0)
        result = future.result(timeout=60)
        assert future.done()
        assert ((result.tokens >= 0) == samples).all()
        for row, request in enumerate(requests):
            if samples[row]:
                request.outputs.append(int(result.tokens[row]))
        if result.logprobs is not None:
            found = result.logprobs
            for i, row in enumerate(found.row):
                requests[row].logprobs.append(
                    (found.chosen[i], found.rank[i], found.top_ids[i].tolist(), found.top_values[i].tolist())
                )
        return result

    def step(self, *work: tuple[Request, int]) -> StepResult:
        self.submit(*work)
        return self.take()

    def alone(self, request: Request, outputs: int) -> list[int]:
        """The prompt at once, then token by token."""
        self.step((request, len(request.prompt)))
        while len(request.outputs) < outputs:
            self.step((request, 1))
        return request.outputs


def _columns(rows: list[tuple[int, int, int]]) -> dict[str, np.ndarray]:
    columns = np.array(rows, np.int32).reshape(-1, 3).T
    return dict(zip(("slot", "index", "page"), columns, strict=True))


def with_part(part: StepPart, patch: pytest.MonkeyPatch) -> None:
    """Workers that are made from now on have one more part, as `assemble` would add it."""
    made = model_runner.step_parts

    def more(*args: Any) -> Any:
        draws, parts = made(*args)
        return draws, [*parts, part]

    patch.setattr(model_runner, "step_parts", more)


def dense_logits(
    tokens: list[int], model: ModelDescription | None = None, streams: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """[T, VOCAB] of the model without runner, pages, slots or batch; `streams` gets the residual stream behind each of
    its layers."""
    ops = TorchOpsBody(None)  # type: ignore[arg-type]
    description = Qwen2.describe(CONFIG) if model is None else model

    def attention(layer: int, scale: float, **of_heads: Any) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            site = description.sites[layer]
            out, _ = dense(
                *(x.numpy() for x in (q, k, v)), np.arange(len(q)), scale, site.sliding_window, site.soft_cap
            )
            return torch.from_numpy(out).flatten(1)

        return attend

    body = Qwen2Model(
        ModelContext(
            description=description, ops=ops, attention=attention, dtype=torch.float64, device=torch.device("cpu"),
            max_model_len=512,
        )
    )  # fmt: skip
    body.load_weights(random_weights(description))
    state = State(token_ids=torch.tensor(tokens, dtype=torch.int32), positions=torch.arange(len(tokens)))

    def walk(layers: Iterable[Any], state: State) -> Iterator[Any]:
        for layer in layers:
            yield layer
            if streams is not None:
                streams.append(state["hidden"] + state["residual"])

    hidden = body.forward(state, walk)
    assert hidden is not None
    return body.logits(hidden)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()

"""The suite of point `model` for models of another framework than torch: in the worker of a platform that serves it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from engine.embedding import EngineConfig, launch
from engine.interfaces.executor import Worker
from engine.interfaces.model import ModelNeed
from engine.interfaces.platform import PlatformCard, PlatformNeed
from engine.plugin.choosing import ranked
from engine.plugin.loading import import_object
from engine.types.errors import ConfigError
from engine.types.model import ModelDescription
from engine.types.params import MAX_LOGPROBS, SamplingParams
from engine.types.plan import NewBlocks, NewSlot, StepPlan
from engine.types.start import CoreStart, WorkerReady
from engine_sdk.conformance.base import check_methods, methods_of, not_served
from engine_sdk.conformance.model.common import LOOSE
from engine_sdk.conformance.model.example import draw
from engine_sdk.conformance.model.oracle import Oracle
from engine_sdk.conformance.model.parity import ParitySuite

PAGES, ROWS, BLOCK = 120, 8, 8
LONGEST = 64
"""Tokens of a prompt, and of a step."""
NEAR = 2e-6
"""Log probabilities come in float32."""
_NONE = np.empty(0, np.int32)


@dataclass
class ServedRequest:
    """A request in a worker.

    Args:
        slot: its place. ids: all tokens so far. pages: by table.
        computed: how many of its tokens are.
        table: [n, V]; what was told of each token that is computed: the log probabilities of the next, NaN where they
            were not told. It is told of the likeliest ones, and of the one that follows.
    """

    slot: int
    ids: list[int]
    pages: list[list[int]]
    computed: int = 0
    table: list[np.ndarray] = field(default_factory=list)


class Served:
    """A model in a worker that was started, to which plans are made by hand: pages lie in no order.

    Args:
        worker: it; ready: its answer; start: what it was told.
    """

    def __init__(self, worker: Worker, ready: WorkerReady, start: CoreStart) -> None:
        self.ready = ready
        self._worker = worker
        self._start = start.worker
        self._tables = start.worker.layout.tables
        self._free = (np.random.default_rng(0).permutation(ready.num_pages - 1) + 1).tolist()
        self._slots = list(range(start.worker.max_num_seqs))
        self._new: list[NewSlot] = []
        self._step = 0

    def begin(self, ids: Sequence[int]) -> ServedRequest:
        """A request with this prompt."""
        request = ServedRequest(self._slots.pop(), list(ids), [[] for _ in self._tables])
        alternatives = min(MAX_LOGPROBS, self._start.model.vocab_size)
        params = SamplingParams(temperature=0, seed=0, logprobs=alternatives, prompt_logprobs=alternatives)
        self._new.append(
            NewSlot(
                slot=request.slot, request_id=f"r{self._step}-{request.slot}", token_ids=np.array(ids, np.int32),
                num_prompt_tokens=len(ids), params=params, stop_token_ids=_NONE,
            )
        )  # fmt: skip
        return request

    def end(self, request: ServedRequest) -> None:
        """It has ended: others get its slot, and its pages as they are."""
        self._slots.append(request.slot)
        self._free = [page for pages in request.pages for page in pages] + self._free

    def step(self, parts: Sequence[tuple[ServedRequest, int]]) -> None:
        """Compute so many more tokens of each; those of which all are computed draw one more, greedily."""
        ordered = sorted(parts, key=lambda part: (not self._decodes(*part), part[1]))
        requests, counts = [part[0] for part in ordered], np.array([part[1] for part in ordered], np.int32)
        computed = np.array([request.computed for request in requests], np.int32)
        samples = np.array([r.computed + count == len(r.ids) for r, count in ordered])
        plan = StepPlan(
            step_id=self._step, slot_of_row=np.array([r.slot for r in requests], np.int32), num_computed=computed,
            num_tokens=counts, samples=samples, num_decodes=sum(self._decodes(*part) for part in ordered),
            new_slots=self._new, new_blocks=[self._blocks(table, ordered) for table in range(len(self._tables))],
        )  # fmt: skip
        self._new = []
        self._step += 1
        result = self._worker.execute(plan).result()
        for request, count in ordered:
            request.computed += count
            request.table += [np.full(self._start.model.vocab_size, np.nan) for _ in range(count)]
        if (scored := result.prompt_logprobs) is not None:
            self._tell(requests, scored, scored.row, scored.position - 1)
        for row in np.flatnonzero(samples).tolist():
            requests[row].ids.append(int(result.tokens[row]))
        if (drawn := result.logprobs) is not None:
            self._tell(requests, drawn, drawn.row, (computed + counts - 1)[drawn.row])

    @staticmethod
    def _decodes(request: ServedRequest, count: int) -> bool:
        return count == 1 and request.computed + 1 == len(request.ids)

    @staticmethod
    def _tell(requests: Sequence[ServedRequest], told: Any, row: np.ndarray, place: np.ndarray) -> None:
        for nth, (of, at) in enumerate(zip(row.tolist(), place.tolist(), strict=True)):
            table = requests[of].table[at]
            table[told.top_ids[nth]] = told.top_values[nth]
            table[requests[of].ids[at + 1]] = told.chosen[nth]

    def _blocks(self, table: int, parts: Sequence[tuple[ServedRequest, int]]) -> NewBlocks:
        size, entries = self._tables[table].tokens_per_block, []
        for request, count in parts:
            pages = request.pages[table]
            while len(pages) * size < request.computed + count:
                entries.append((request.slot, len(pages), self._free[-1]))
                pages.append(self._free.pop())
        slot, index, page = np.array(entries, np.int32).reshape(-1, 3).T.copy()
        return NewBlocks(slot=slot, index=index, page=page)

    def whole(self, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """[T, V]; what is told of a prompt that is computed alone and at once."""
        request = self.begin(ids)
        self.step([(request, len(ids))])
        self.end(request)
        return torch.from_numpy(np.stack(request.table))

    pooled = whole

    def close(self) -> None:
        """Let the worker go."""
        self._worker.shutdown()


class ServedModelConformance(ParitySuite):
    """A decoder in a worker, in float64, beside transformers and beside itself: what the worker tells of its log
    probabilities, prompt and output.

    Attributes:
        platform: the platform whose worker it is; left out, the first that computes with the card's framework and
            works on this machine.
        platform_options: its options, as a user sets them. One called `device` is the suite's, where they do not say
            it; one called `warm_up` is off.
        divided: its option of how many devices a model is divided over; "": it has none.
    """

    platform: ClassVar[str] = ""
    platform_options: ClassVar[Mapping[str, Any]] = {}
    divided: ClassVar[str] = ""
    test_its_layers_are_those_described = test_quantised_layers = test_quantised_embedding = None  # type: ignore[assignment]
    test_computes_through_operations_alone = test_the_heads_take_any_rows = None  # type: ignore[assignment]
    test_a_tensor_that_comes_twice = test_the_order_of_tensors = test_nothing_is_kept_between_calls = None  # type: ignore[assignment]

    @classmethod
    def need(cls, tp: int = 1) -> ModelNeed:
        """What the engine asks; of the card's framework."""
        return replace(super().need(tp), framework=cls.described().framework or "torch")

    # -- where it works ----------------------------------------------------------------------------------------------
    @classmethod
    def platform_card(cls) -> tuple[str, type[PlatformCard]]:
        """The platform's name and card; skipped where none of this machine computes with the framework."""
        framework = cls.described().framework or "torch"
        for candidate, card in ranked(cls.registry(), "platform")[0]:
            found = cast("type[PlatformCard]", card)
            if cls.platform not in ("", candidate.name) or found.unsupported(PlatformNeed()):
                continue
            if found.describe().framework == framework:
                return candidate.name, found
        pytest.skip(f"no platform of this machine computes with {framework}")

    @classmethod
    def options_with(cls, **more: Any) -> dict[str, Any]:
        """The platform's options."""
        fields = getattr(cls.platform_card()[1].Options, "model_fields", {})
        mine = {"device": cls.device.partition(":")[0], "warm_up": False}
        return {**{k: v for k, v in mine.items() if k in fields}, **cls.platform_options, **more}

    @classmethod
    def folder(cls, config: Mapping[str, Any]) -> Path:
        """A checkpoint with this config, of no tensors yet, and a tokenizer of any words."""
        home = cast("Any", cls.once("home", lambda: _Folder(tempfile.TemporaryDirectory(prefix="engine-served-"))))
        made = Path(home.path, str(len(list(Path(home.path).iterdir()))))
        made.mkdir()
        (made / "config.json").write_text(json.dumps(dict(config)))
        Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")).save(str(made / "tokenizer.json"))
        save_file({}, made / "model.safetensors")
        return made

    @classmethod
    def planned(cls, config: Mapping[str, Any], dtype: str, **more: Any) -> CoreStart:
        """What the launcher tells a core of it."""
        longest = min(LONGEST, cls.described().describe(dict(config)).max_model_len)
        settings: dict[str, Any] = {
            "model": str(cls.folder(config)), "dtype": dtype, "num_kv_pages": PAGES, "block_size": BLOCK,
            "max_num_seqs": ROWS, "max_num_batched_tokens": LONGEST, "max_model_len": longest,
            "platform": cls.platform_card()[0], "options": {"platform": cls.options_with(**more)},
        }  # fmt: skip
        return launch(EngineConfig(**settings), cls.registry()).start

    @classmethod
    def started(cls, start: CoreStart, weights: Sequence[Mapping[str, torch.Tensor]]) -> Served:
        """A worker with these tensors, of one file or several."""
        files, folder = [], cls.folder({})
        for number, tensors in enumerate(weights):
            files.append(str(folder / f"model-{number}.safetensors"))
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, files[-1])
        given = msgspec.structs.replace(start.worker.files, weights=tuple(files))
        whole = msgspec.structs.replace(start, worker=msgspec.structs.replace(start.worker, files=given))
        worker: Worker = cls.worker_class(start)(whole.worker)
        return Served(worker, worker.start(), whole)

    @classmethod
    def worker_class(cls, start: CoreStart) -> Callable[[Any], Worker]:
        """What makes the worker."""
        return cast("Callable[[Any], Worker]", import_object(start.worker_class))

    @classmethod
    def start_of(cls, dtype: str = "float64", **more: Any) -> CoreStart:
        """`planned`, of the suite's config; made once."""
        key = f"start {dtype} {sorted(more.items())}"
        return cast("CoreStart", cls.once(key, lambda: cls.planned(cls.whole_config(), dtype, **more)))

    @classmethod
    def session(  # type: ignore[override]
        cls, dtype: str = "float64", weights: Any = None, group: Any = None, **more: Any
    ) -> Served:
        """A model with this config, in a worker of its own."""
        cls.servable(1, dtype)
        given = cls.weights() if weights is None else weights
        return cls.started(cls.start_of(dtype, **more), _files(given))

    @classmethod
    def unserved(cls, model: ModelDescription, size: int = 1, dtype: str = "float64") -> str:
        """Nothing stands between the suite and the model but the worker."""
        return ""

    def _session(self, description: ModelDescription, oracle: Oracle) -> Any:
        return self.started(self.planned(description.config, "float64"), _files(draw(oracle.shapes)))

    # -- comparing ---------------------------------------------------------------------------------------------------
    @staticmethod
    def near_to(expected: torch.Tensor, found: torch.Tensor) -> None:
        """Log probabilities where they are told, beside logits: float32 of such a size, and transformers' own."""
        wanted, told = torch.log_softmax(expected, -1), ~found.isnan()
        assert found.shape == wanted.shape and bool((told.sum(-1) >= min(MAX_LOGPROBS, found.shape[-1])).all())
        torch.testing.assert_close(found[told], wanted[told], rtol=4e-5, atol=4e-5)

    @staticmethod
    def near(found: torch.Tensor, expected: torch.Tensor) -> None:
        """Of the same tokens, where both are told: the likeliest ones are the same but for ties."""
        told = ~(found.isnan() | expected.isnan())
        assert found.shape == expected.shape
        assert bool((told.sum(-1) >= min(MAX_LOGPROBS, found.shape[-1]) - 3).all()), "other tokens are likely"
        torch.testing.assert_close(found[told], expected[told], rtol=NEAR, atol=NEAR)

    @classmethod
    def methods(cls) -> Sequence[str]:
        return ()

    def test_body_has_the_interface(self) -> None:
        """What computes is the worker."""
        check_methods(cast("type", import_object(self.start_of().worker_class)), Worker, methods_of(Worker))

    # -- the checkpoint ----------------------------------------------------------------------------------------------
    def test_a_missing_tensor(self) -> None:
        """Is an error that names it: nothing is made up."""
        made_up = [name for name in sorted(self.tensors().keys() - self.needed()) if not self.idle(name)]
        assert not made_up, f"loads without {', '.join(made_up)}"

    def test_every_tensor_matters(self) -> None:
        """Each tensor that a checkpoint must have changes what is told."""
        ids = self.ids(9)
        before = self.alone(ids)
        for name in sorted(self.tensors()):
            after = self.session(weights=self.weights(changed=name)).whole(ids)
            same = torch.equal(before.nan_to_num(7), after.nan_to_num(7))
            assert not same or self.idle(name), f"{name} has no influence on what is computed"

    @pytest.mark.parametrize("stored", ["bfloat16", "float16"])
    def test_weights_are_cast(self, stored: str) -> None:
        """A file of half precision computes as its numbers do in the model's dtype."""
        half = [(name, tensor.to(getattr(torch, stored))) for name, tensor in self.weights()]
        wide = [(name, tensor.double()) for name, tensor in half]
        found, expected = (self.session(weights=given).whole(self.ids(7)) for given in (half, wide))
        self.near(found, expected)

    def test_counts(self) -> None:
        """Parameters of the weights that the checkpoint must have."""
        elements = sum(int(np.prod(self.tensors()[name])) for name in (*self.needed(), *self.copied))
        assert self._served().ready.num_parameters == elements

    # -- computing ---------------------------------------------------------------------------------------------------
    @classmethod
    def _served(cls) -> Served:
        return cast("Served", cls.once("session", cls.session))

    def _as_alone(self, request: ServedRequest) -> None:
        """All that was told of a request is what its tokens give at once."""
        self.near(torch.from_numpy(np.stack(request.table)), self.alone(request.ids[: request.computed]))

    def test_chunked_prefill(self) -> None:
        """A prompt in pieces gives what it gives at once, wherever it is cut."""

        @given(st.sets(st.integers(1, 22), max_size=4))
        @self.hypothesis_settings(6)
        def run(cuts: set[int]) -> None:
            served = self._served()
            request = served.begin(self.ids(23))
            for first, end in pairwise([0, *sorted(cuts), 23]):
                served.step([(request, end - first)])
            served.end(request)
            self._as_alone(request)

        run()

    def test_decode(self) -> None:
        """A prompt, and then the tokens that are drawn, one by one: what all of them give at once."""
        served = self._served()
        for length in (1, 5):
            request = served.begin(self.ids(length))
            served.step([(request, length)])
            for _ in range(13):
                served.step([(request, 1)])
            served.end(request)
            assert request.ids[length:] == [int(np.nanargmax(row)) for row in request.table[length - 1 :]]
            self._as_alone(request)

    def test_later_tokens_have_no_influence(self) -> None:
        """A token's answer is the same whatever follows it in the step."""
        ids = self.ids(20)
        expected = self.alone(ids)
        for place in (1, 7, 19):
            other = [*ids[:place], *self.ids(20 - place, seed=9)]
            self.near(self.alone(other)[:place], expected[:place])

    def test_earlier_tokens_and_their_order_have_influence(self) -> None:
        """Other tokens, or the same in another order, give another answer: places are told apart."""
        ids = self.ids(min([12, *(spec.sliding_window or 12 for spec in self.description().kv_specs)]))
        if len(ids) < 4:
            not_served(f"a window of {len(ids)} tokens has no order to look at")
        expected = self.alone(ids)[-1]
        for other in ([ids[0] ^ 1, *ids[1:]], [ids[1], ids[0], *ids[2:]], [*ids[:-3], ids[-2], ids[-3], ids[-1]]):
            differs = (self.alone(other)[-1] - expected).abs().nan_to_num(0).max()
            assert differs > 1e-5, f"{other} gives what {ids} gives"

    def test_up_to_the_last_position(self) -> None:
        """As many tokens as the engine serves, in two steps, of which the last draws one that nobody computes."""
        served, total = self._served(), min(LONGEST, self.description().max_model_len)
        request = served.begin(self.ids(total))
        served.step([(request, total - 1)])
        served.step([(request, 1)])
        served.end(request)
        self._as_alone(request)

    def test_ragged_batch(self) -> None:
        """Decodes, later chunks and whole prompts in one step, in slots and pages that others had: each as alone."""
        served = self._served()
        for turn in range(2):
            lengths, chunks = (9, 4, 14, 6, 3), (1, 1, 5, 6, 3)
            requests = [served.begin(self.ids(n, seed=n + turn)) for n in lengths]
            served.step([(r, n - c) for r, n, c in zip(requests, lengths, chunks, strict=True) if n > c])
            served.step(list(zip(requests, chunks, strict=True)))
            for _ in range(2):
                served.step([(request, 1) for request in requests[1:]])
            for request in requests:
                served.end(request)
                self._as_alone(request)

    @pytest.mark.parametrize("dtype", list(LOOSE))
    def test_dtypes(self, dtype: str) -> None:
        """In the dtype that was asked for, near to float64."""
        if reasons := self.platform_card()[1].unsupported(PlatformNeed(dtype=dtype)):
            not_served("; ".join(reasons))
        session = self.session(dtype)
        for ids in (self.ids(9, seed=4), self.ids(17, seed=5)):
            found, expected = session.whole(ids), self.alone(ids)
            error = float((found - expected).abs().nanmean(-1).nanmedian())
            scale = float(expected.abs().nanmean()) + 1e-6
            assert error / scale < LOOSE[dtype], f"{error / scale:.2g} of the values' size away from float64"

    @pytest.mark.parametrize("size", [2, 4])
    def test_divided(self, size: int) -> None:
        """Over several devices: what one gives. A model of the suite's size may refuse four, never two."""
        if not self.divided:
            not_served("the platform divides no model over devices of its own")
        try:
            session = self.session("float64", **{self.divided: size})
        except ConfigError as refused:
            if size == 2:
                raise
            not_served(refused.found)
        ids = self.ids(9)
        self.near(session.whole(ids), self.alone(ids))
        assert session.ready.num_parameters == self._served().ready.num_parameters

    @classmethod
    def figure(cls) -> str | None:
        """The worker's speed is the platform's."""
        return None


@dataclass
class _Folder:
    """A folder that goes with the class."""

    made: Any

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self.made.name)

    def close(self) -> None:
        """Away with it."""
        self.made.cleanup()


def _files(weights: Any) -> list[dict[str, torch.Tensor]]:
    """Tensors in as many files as names come twice."""
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in weights:
        place = next((one for one in files if name not in one), None)
        if place is None:
            files.append(place := {})
        place[name] = tensor
    return files

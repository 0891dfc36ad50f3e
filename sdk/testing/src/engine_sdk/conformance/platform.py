"""The suite of point `platform`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.executor import Worker
from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.interfaces.ops import OpsCard, OpsNeed
from engine.interfaces.platform import CaptureKey, Platform, PlatformCard, PlatformFacts, PlatformNeed, Trial
from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
from engine.plugin.loading import import_object
from engine.types.errors import ContractError, KVCacheTooSmallError
from engine_sdk.conformance.base import Conformance, check_methods, methods_of, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.core_contexts import start_message
from engine_sdk.conformance.subject import Subject
from engine_sdk.conformance.timing import median_seconds
from engine_sdk.conformance.whole_steps import check_whole_steps

DTYPES = frozenset({"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
STEP_BYTES = 64 << 20
"""What the largest step of these tests takes."""
_DESCRIBE = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
card = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
print(json.dumps([card.describe(), card.memory(), "torch" in sys.modules]))
"""


class PlatformConformance(Conformance):
    """A device's memory, copies and captured steps, at work on this machine."""

    point = "platform"
    protocol = "Platform"

    @classmethod
    def needs(cls) -> Sequence[PlatformNeed]:
        return [PlatformNeed(), PlatformNeed(dtype="float32"), PlatformNeed(dtype="bfloat16")]

    @classmethod
    def impossible(cls) -> Sequence[PlatformNeed]:
        return [PlatformNeed(dtype="float3")]

    @classmethod
    def facts(cls) -> PlatformFacts:
        """What the card says of this machine; skipped where it is not for this one."""
        reasons = cls.subject().reasons(PlatformNeed())
        if reasons:  # of this machine, not of the driver
            pytest.skip("; ".join(reasons))
        return cast("type[PlatformCard]", cls.subject().card).describe()

    @classmethod
    def platform(cls) -> Platform:
        """The body; made once. A platform with a worker of its own has none that the engine asks."""
        facts = cls.facts()
        if cast("type[PlatformCard]", cls.subject().card).worker is not None:
            not_served("its worker is its own, and does itself what the engine's worker asks a platform for")

        def context() -> WorkerContext:
            return WorkerContext(start=start_message(facts.device), options=cls.subject().options)

        return cls.built(context, "platform")  # type: ignore[no-any-return]

    def test_body_has_the_interface(self) -> None:
        """Each method is there and takes the interface's arguments, by place and by name. Of a card that names a worker
        they are the worker's: `engine.interfaces.executor.Worker`."""
        worker = cast("type[PlatformCard]", self.subject().card).worker
        if worker is None:
            super().test_body_has_the_interface()
        else:
            check_methods(import_object(worker), Worker, methods_of(Worker))

    # -- facts -------------------------------------------------------------------------------------------------------
    def test_facts(self) -> None:
        """A device that torch knows, a name, and dtypes that the card then serves."""
        facts, card = self.facts(), cast("type[PlatformCard]", self.subject().card)
        assert torch.device(facts.device).type == facts.device.partition(":")[0]
        assert facts.name.strip() and facts.framework in ("torch", "jax")
        assert facts.dtypes and len(set(facts.dtypes)) == len(facts.dtypes) and set(facts.dtypes) <= DTYPES
        for dtype in facts.dtypes:
            assert card.unsupported(PlatformNeed(dtype=dtype)) == [], f"it names {dtype} and does not serve it"
        assert card.worker is None or len(card.worker.split(":")) == 2
        assert card.recorder is None or card.recorder.strip()
        processors = card.logits_processors()
        assert all(issubclass(one, LogitsProcessorCard) for one in processors), f"{processors} are no cards"
        assert not processors or "logits_processor" in card.own_points, "its worker does not serve that point"
        named = card.page_format(self.subject().options)
        assert isinstance(named, str) and named == card.page_format(self.subject().options), f"page_format: {named!r}"
        assert not named or "attention" in card.own_points, "what pages hold is attention's, which is not its worker's"

    def test_facts_without_torch(self) -> None:
        """The launcher asks before torch is there: in a fresh process, with the same answer."""
        facts = self.facts()
        module, _, name = self.subject().candidate.value.partition(":")
        command = [sys.executable, "-c", _DESCRIBE, json.dumps(sys.path), module, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        again, memory, torch_came = json.loads(done.stdout.splitlines()[-1])
        assert not torch_came, "describe() or memory() imports torch"
        assert memory is None or (type(memory) is int and memory > 0), f"memory() says {memory!r}: bytes, or None"
        assert again[0] == facts.device and tuple(again[2]) == facts.dtypes

    def test_device(self) -> None:
        """The body's device is of the kind that the card names; where there are reasons against whole steps, it makes
        none."""
        platform = self.platform()
        assert platform.device.type == torch.device(self.facts().device).type
        if (whole_steps := getattr(platform, "whole_steps", None)) is not None:
            made = whole_steps(None, None, None, ["attention is planned by the host"])
            assert made is None, "it makes whole steps of what it is told cannot be captured"

    @pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 64, 1000])
    def test_buckets(self, max_num_seqs: int) -> None:
        """Ascending, each once, positive; none that no step of so many rows needs."""
        platform = self.platform()
        drafts = cast("type[PlatformCard]", self.subject().card).captures_drafts != "never"
        for buckets in (platform.buckets(max_num_seqs), *([platform.buckets(max_num_seqs, 5)] if drafts else [])):
            self._check_buckets(buckets, max_num_seqs)
        if cast("type[PlatformCard]", self.subject().card).captures_mixed:
            tokens = platform.buckets(max_num_seqs, 0)
            self._check_buckets(tokens, 4096)
            assert not tokens or tokens[-1] <= 4096, f"{tokens} tokens, of steps of 4,096 at most"

    @staticmethod
    def _check_buckets(buckets: tuple[int, ...], max_num_seqs: int) -> None:
        assert list(buckets) == sorted(set(buckets)) and all(type(rows) is int and rows > 0 for rows in buckets)
        assert sum(rows >= max_num_seqs for rows in buckets) <= 1, f"{buckets} for {max_num_seqs} requests"

    # -- memory ------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize(("pages", "page_bytes"), [(1, 64), (7, 4096), (300, 12_352)])
    def test_pool(self, pages: int, page_bytes: int) -> None:
        """uint8 [pages, page_bytes], dense, zeroed, on the device; two pools are two."""
        platform = self.platform()
        pool, other = platform.allocate_pool(pages, page_bytes), platform.allocate_pool(pages, page_bytes)
        assert pool.dtype == torch.uint8 and tuple(pool.shape) == (pages, page_bytes) and pool.is_contiguous()
        assert pool.device.type == platform.device.type and not pool.any()
        pool.fill_(3)
        assert not other.any()
        again = platform.allocate_pool(pages, page_bytes)
        assert not again.any(), "a later pool is not zeroed"

    def test_pool_that_does_not_fit(self) -> None:
        """More memory than any machine has: a typed error with the sizes."""
        with pytest.raises(KVCacheTooSmallError) as caught:
            self.platform().allocate_pool(1 << 40, 1 << 12)
        assert str(1 << 40) in re.sub(r"\D", "", str(caught.value)), "the error does not say how much was asked for"

    def test_profile(self) -> None:
        """The largest step is run and its peak measured; a larger share of the memory gives no smaller pool, one that
        cannot hold it gives none."""
        platform, ran = self.platform(), []

        def largest_step() -> None:
            ran.append(torch.ones(STEP_BYTES // 4, dtype=torch.float32, device=platform.device).sum())

        # Memory that was freed before may be used again, or be given back meanwhile: the largest of some counts.
        free = max((platform.kv_cache_memory(largest_step, None) for _ in range(3)), key=lambda found: found.step_bytes)
        assert ran, "the largest step was not run"
        assert type(free.pool_bytes) is int and free.pool_bytes > 0
        assert STEP_BYTES // 2 <= free.step_bytes <= 20 * STEP_BYTES, f"{free.step_bytes:,} bytes, of {STEP_BYTES:,}"
        much, little = (platform.kv_cache_memory(largest_step, share).pool_bytes for share in (0.95, 0.2))
        assert much >= little
        assert platform.kv_cache_memory(largest_step, 1e-9).pool_bytes <= 0

    # -- copies ------------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bool], ids=str)
    def test_to_device(self, dtype: torch.dtype) -> None:
        """Into a buffer of the device, a strided one too; the host's tensor may be changed at once."""
        platform = self.platform()
        for shape in ((), (1,), (1000,), (7, 33)):
            host = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
            out = torch.zeros(shape, dtype=dtype, device=platform.device)
            wide = torch.zeros((*shape, 2), dtype=dtype, device=platform.device)
            expected = host.clone()
            platform.to_device(host, out)
            platform.to_device(host, wide[..., 0])
            host.zero_()
            assert torch.equal(out.cpu(), expected) and torch.equal(wide[..., 0].cpu(), expected)
            assert not wide[..., 1].any()

    def test_copies_in_a_row(self) -> None:
        """More of them than a staging buffer holds, of odd sizes, while the device is busy: each brings what its host
        tensor held when it was called."""
        platform, busy = self.platform(), torch.ones(256, 256, device=self.platform().device)
        host, outs = torch.empty(100_003, dtype=torch.int32), []
        for number in range(120):
            busy = busy @ busy / 256
            part = host[: 1 + number * 833].fill_(number)
            outs.append(torch.full(part.shape, -1, dtype=torch.int32, device=platform.device))
            platform.to_device(part, outs[-1])
            part.fill_(-2)
        wrong = [number for number, out in enumerate(outs) if not bool((out == number).all())]
        assert not wrong, f"copies {wrong[:5]} brought something else"

    def test_results_in_a_row(self) -> None:
        """Each fetch has what the work that was queued before it left, whichever is waited for first."""
        platform = self.platform()
        x, fetches = torch.zeros(1 << 16, device=platform.device), []
        for number in range(1, 21):
            x = x + 1
            fetches.append(platform.to_host((x, x[:3] * number)))
        for number, fetch in reversed(list(enumerate(fetches, 1))):
            whole, part = fetch.wait()
            assert bool((whole == number).all()) and part.tolist() == [number * number] * 3

    def test_to_host(self) -> None:
        """In the order asked, on the host; `done` becomes True, and `wait` may be called again."""
        platform = self.platform()
        tensors = tuple(torch.full((n,), n, device=platform.device) for n in (1, 3, 500))
        fetch = platform.to_host(tensors)
        found = fetch.wait()
        assert fetch.done()
        assert [tensor.device.type for tensor in found] == ["cpu"] * 3
        assert [tensor.tolist() for tensor in found] == [[n] * n for n in (1, 3, 500)]
        assert all(torch.equal(a, b) for a, b in zip(fetch.wait(), found, strict=True))

    # -- captured steps ----------------------------------------------------------------------------------------------
    def test_what_is_not_captured(self) -> None:
        """Without a key the step itself is given back."""

        def step() -> None: ...

        assert self.platform().capture(step, None) is step

    def _add(self) -> Callable[..., torch.Tensor]:
        """An addition that the platform records, of an installed driver; torch's own where it records nothing."""
        card, device = cast("type[PlatformCard]", self.subject().card), self.facts().device
        if card.recorder is None:
            return torch.add
        registry = Registry.discover()
        for candidate, card_of_ops in ranked(registry, "ops")[0]:
            ops = cast("type[OpsCard]", card_of_ops)
            need = OpsNeed(operation="add", dtype="float32", device=device)
            if card.recorder in ops.captured_by and ops.unsupported(need) == []:
                body = load_body(ops)(worker_context(Subject.installed("ops", candidate.name, {}), device))
                return body.add  # type: ignore[no-any-return]
        pytest.skip(f"no installed operations are recorded by '{card.recorder}'")

    @pytest.mark.parametrize("tried", [False, True])
    def test_capture(self, tried: bool) -> None:
        """What comes back runs the step on what the buffers hold then, as often as it is called, and leaves its result
        in the tensor that the step made; with a trial on two inputs too."""
        platform, add = self.platform(), self._add()
        x, y = (torch.zeros(4, 64, device=platform.device) for _ in range(2))
        left: list[torch.Tensor] = []

        def step() -> None:
            left[:] = [add(add(x, y), y)]

        def prepare(number: int) -> None:
            x.fill_(number + 1)
            y.fill_(10 * number + 3)

        def replace(tensors: tuple[torch.Tensor, ...]) -> None:
            left[:] = tensors

        trial = Trial(prepare, lambda: tuple(left), replace) if tried else None
        steps = []
        for key in range(2):
            replay = platform.capture(step, CaptureKey(0, variant=(str(tried), str(key))), trial)
            steps.append((replay, left[:]))
        for turn in range(3):
            for replay, captured in steps:
                x.fill_(turn + 0.5)
                y.fill_(turn * 7)
                replay()
                found = left if replay is step else captured
                assert torch.equal(found[0].cpu(), torch.full((4, 64), turn + 0.5 + 14.0 * turn)), "another result"

    def test_a_value_that_was_kept(self) -> None:
        """A step that launches something else on the second input than on the first: with a trial it is refused, or
        given back as it is."""
        platform, add = self.platform(), self._add()
        x, kept = torch.zeros(4, 64, device=platform.device), [torch.zeros(4, 64, device=platform.device)]
        left: list[torch.Tensor] = []

        def step() -> None:
            left[:] = [add(x, kept[0])]

        def prepare(number: int) -> None:
            x.fill_(number)
            kept.insert(0, torch.full_like(x, 5.0 * number))  # not where it lay when the step was captured

        try:
            replay = platform.capture(step, CaptureKey(0, variant=("kept",)), Trial(prepare, lambda: tuple(left)))
        except ContractError:
            return
        assert replay is step, "a replay that reads what the first input left has passed its trial"

    @pytest.mark.parametrize("rows", [1, 3, 4])
    def test_rows_that_count(self, rows: int) -> None:
        """Where the card says `skips_padding`: a replay that is told how many rows count computes those."""
        card = cast("type[PlatformCard]", self.subject().card)
        if not card.skips_padding:
            not_served("the card says that its replays compute all rows of a bucket (skips_padding)")
        platform, add = self.platform(), self._add()
        x, y = (torch.zeros(4, 64, device=platform.device) for _ in range(2))
        left: list[torch.Tensor] = []

        def step() -> None:
            left[:] = [add(x, y)]

        def prepare(number: int) -> None:
            x.fill_(number)
            y.fill_(3)

        replay = platform.capture(step, CaptureKey(4), Trial(prepare, lambda: tuple(left)))
        captured = left[:]
        for turn in range(3):
            x.fill_(turn + 0.5)
            replay(rows)
            found = left if replay is step else captured
            assert torch.equal(found[0][:rows].cpu(), torch.full((rows, 64), turn + 3.5)), "another result"

    def test_what_cannot_be_captured(self) -> None:
        """A step that asks for a value on the host is refused with a ContractError, or given back as it is and right:
        never replayed with the value that it had."""
        platform, x = self.platform(), torch.zeros(4, device=self.platform().device)
        seen: list[float] = []

        def step() -> None:
            seen.append(float(x.sum()))

        try:
            replay = platform.capture(step, CaptureKey(0, variant=("host value",)))
        except ContractError:
            return
        for value in (1.0, 2.5):
            x.fill_(value)
            replay()
            assert seen[-1] == 4 * value, "the replay left out what could not be captured"

    def test_whole_steps(self) -> None:
        """Decode steps as one launch, of a platform that makes them: new pages, and tokens of many under way."""
        platform = self.platform()
        if getattr(platform, "whole_steps", None) is None or not check_whole_steps(platform):
            not_served("it makes no whole steps")

    @classmethod
    def figure(cls) -> str | None:
        """What a captured step costs beside the same step run."""
        suite: Any = cls()
        platform, add = cls.platform(), suite._add()
        x, y = (torch.ones(1, 64, device=platform.device) for _ in range(2))

        def step() -> None:
            for _ in range(20):
                add(x, y)

        replay = platform.capture(step, CaptureKey(0, variant=("figure",)))
        run, replayed = (median_seconds(work, cls.facts().device) * 1e6 for work in (step, replay))
        same = " (nothing is captured)" if replay is step else ""
        return f"20 additions of 64 numbers: run {run:,.1f} us, replayed {replayed:,.1f} us{same}"

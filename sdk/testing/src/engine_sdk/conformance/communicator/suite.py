"""The suite of point `communicator`: real processes, one a rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engine.interfaces.communicator import CommunicatorNeed
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.communicator import scenarios
from engine_sdk.conformance.communicator.ranks import Meeting, Ranks

SIZES = (2, 3)
COLLECTIVES = (
    "all_reduce", "all_reduce strided", "all_reduce scalar", "all_gather even", "all_gather rows",
    "all_gather columns", "reduce_scatter rows", "reduce_scatter columns", "all_to_all", "broadcast",
    "broadcast strided", "send",
)  # fmt: skip
NOTICED = 20.0
"""Seconds within which a rank that was killed has to be an error for the others."""
SHARED_MEMORY = Path("/dev/shm")
ROUNDING = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}

RANKS = pytest.StashKey[Ranks]()

each_size = pytest.mark.parametrize("size", SIZES)


class CommunicatorConformance(Conformance):
    """Collectives between processes, against their definitions: exact for whole numbers, the same bits on all ranks."""

    point = "communicator"
    protocol = "Communicator"
    platform_options: ClassVar[Mapping[str, Any]] = {}
    """Of the device's platform, e.g. how many ranks may share a device of which there is one."""
    ranks: ClassVar[Ranks]

    @classmethod
    def needs(cls) -> Sequence[CommunicatorNeed]:
        return [CommunicatorNeed(world_size=size, device=cls.device) for size in (2, 3, 8)]

    @classmethod
    def impossible(cls) -> Sequence[CommunicatorNeed]:
        return [
            CommunicatorNeed(world_size=1, device=cls.device),
            CommunicatorNeed(world_size=2, device="meta"),
            CommunicatorNeed(world_size=2, device=cls.device, framework="abacus"),
        ]

    @pytest.fixture(autouse=True)
    def _ranks(self, pytestconfig: pytest.Config) -> None:
        """One process that forks ranks, for all classes of a session."""
        if RANKS not in pytestconfig.stash:
            pytestconfig.stash[RANKS] = ranks = Ranks()
            pytestconfig.add_cleanup(ranks.close)
        type(self).ranks = pytestconfig.stash[RANKS]

    @classmethod
    def meet(cls, scenario: str, size: int, **arguments: Any) -> Meeting:
        """Run a scenario on `size` ranks; skipped where the card does not serve as many."""
        cls.require(CommunicatorNeed(world_size=size, device=cls.device))
        return cls.ranks.meet(cls.subject(), cls.body(), scenario, size, cls.device, cls.platform_options, **arguments)

    # -- what comes out ----------------------------------------------------------------------------------------------
    @classmethod
    def found(cls, size: int, n: int, dtypes: Sequence[str] = scenarios.DTYPES) -> list[Mapping[str, torch.Tensor]]:
        """All collectives of one meeting, by rank; one meeting for all tests that look at it."""
        key = f"collectives {size} {n}"
        return cls.once(key, lambda: cls.meet("collectives", size, n=n, dtypes=list(dtypes)).found())  # type: ignore[no-any-return]

    def _compare(self, name: str, size: int, n: int, dtypes: Sequence[str]) -> None:
        accepted = 0
        for rank, found in enumerate(self.found(size, n, dtypes)):
            key = f"expected {rank} {size} {n}"
            wanted = self.once(key, functools.partial(scenarios.expected, rank, size, dtypes, n))
            for key in [key for key in wanted if _named(key, name)]:
                if found[key] is None:
                    continue
                accepted += 1
                assert found[key].dtype == wanted[key].dtype and found[key].shape == wanted[key].shape, key
                assert torch.equal(found[key], wanted[key]), f"{key} is wrong on rank {rank} of {size}"
                if name.startswith("all_gather"):
                    assert found[key].is_contiguous(), f"{key} is not contiguous"
        if not accepted:
            not_served(f"accepts() takes no {name} of these forms")

    @each_size
    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_collective(self, name: str, size: int) -> None:
        """In every dtype that is accepted, over parts of uneven sizes, strided tensors, and every root."""
        self._compare(name, size, 7, scenarios.DTYPES)

    @each_size
    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_large_collective(self, name: str, size: int) -> None:
        """Of some hundred kilobytes and no round number: whatever a driver cuts it into."""
        self._compare(name, size, 33_331, ("float32", "bfloat16"))

    @each_size
    @pytest.mark.parametrize("dtype", scenarios.FLOATS)
    def test_sums_are_near(self, dtype: str, size: int) -> None:
        """Within the rounding of as many additions, of float64's sum."""
        count = 5003
        parts = [scenarios.addend(r, count).to(getattr(torch, dtype)).double() for r in range(size)]
        exact = torch.stack(parts).sum(0).numpy()
        bound = size * ROUNDING[dtype] * torch.stack(parts).abs().sum(0).numpy()
        found = [rank.get(f"all_reduce {dtype}") for rank in self._sums(size, count)]
        if found[0] is None:
            not_served(f"accepts() takes no all_reduce of {dtype}")
        for rank, value in enumerate(found):
            off = np.abs(value.double().numpy() - exact) > bound
            assert not off.any(), f"{int(off.sum())} of {count} sums are wrong on rank {rank}"

    @each_size
    @pytest.mark.parametrize("dtype", scenarios.FLOATS)
    def test_sums_have_the_same_bits_on_every_rank(self, dtype: str, size: int) -> None:
        """What drawing the same token on every rank rests on."""
        found = self._sums(size, 5003)
        first = found[0].get(f"all_reduce {dtype}")
        if first is None:
            not_served(f"accepts() takes no all_reduce of {dtype}")
        for rank, other in enumerate(found[1:], 1):
            same = torch.equal(first.view(torch.uint8), other[f"all_reduce {dtype}"].view(torch.uint8))
            assert same, f"ranks 0 and {rank} have sums that differ in some bits"

    @each_size
    @pytest.mark.parametrize("dtype", scenarios.FLOATS)
    def test_batch_invariant(self, dtype: str, size: int) -> None:
        """Where the card says so: an element's sum has the same bits in a tensor of any length, wherever it stands."""
        self.require(CommunicatorNeed(world_size=size, device=self.device, batch_invariant=True))
        whole = self._sums(size, 5003)[0].get(f"all_reduce {dtype}")
        if whole is None:
            not_served(f"accepts() takes no all_reduce of {dtype}")
        for count in (1, 2, 7, 64, 1000):
            found = self._sums(size, count)[0][f"all_reduce {dtype}"]
            expected = whole[:count]
            assert torch.equal(found, expected), f"{count} elements alone have other sums than among 5003"

    @each_size
    def test_sums_are_the_same_each_time(self, size: int) -> None:
        """A second meeting gives the bits of the first."""
        again = self.meet("sums", size, count=5003).found()
        for one, other in zip(self._sums(size, 5003), again, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    def test_a_message_of_16_mebibytes(self) -> None:
        """Or of a few elements more: it comes whole, the last element too, by each collective."""
        found = self.meet("large", 2, count=(16 << 20) // 4).found()
        for rank, of_rank in enumerate(found):
            cut = [op for op, whole in of_rank.items() if whole is False]
            assert not cut, f"rank {rank} did not get all of the message by {', '.join(cut)}"
        if not any(whole for whole in found[0].values()):
            not_served("accepts() takes no message of that size")

    @classmethod
    def _sums(cls, size: int, count: int) -> list[Any]:
        return cls.once(f"sums {size} {count}", lambda: cls.meet("sums", size, count=count).found())  # type: ignore[no-any-return]

    @each_size
    def test_many_rounds(self, size: int) -> None:
        """Hundreds of calls without a pause, with ranks that come late in turn."""
        assert self.meet("rounds", size, turns=150).found() == [0] * size

    def test_empty_tensors(self) -> None:
        """Without elements, with a shape."""
        for found in self.meet("empty", 2).found():
            assert all(shape == wanted for shape, wanted in found), found

    # -- who takes what ----------------------------------------------------------------------------------------------
    @each_size
    def test_accepts_is_equal_on_all_ranks(self, size: int) -> None:
        """Pure, and of its arguments alone: otherwise ranks would go to different drivers, and wait for ever."""
        first, *others = self.meet("answers", size).found()
        assert all(other == first for other in others), "ranks answer differently"
        assert any(first), "it accepts nothing at all"

    # -- ends --------------------------------------------------------------------------------------------------------
    @each_size
    def test_a_killed_rank_is_an_error_for_all_others(self, size: int, tmp_path: Path) -> None:
        """RuntimeError, soon; nothing is left in shared memory."""
        self._gone("any", size, "killed", tmp_path)

    @pytest.mark.parametrize("op", ["recv", "broadcast", "barrier"])
    def test_a_killed_rank_is_an_error_for_those_who_wait_for_it(self, op: str, tmp_path: Path) -> None:
        """In a collective in which they send nothing: a connection that nobody writes to breaks all the same."""
        self._gone(op, 3, "killed", tmp_path)

    def test_isend_waits_for_nobody(self, tmp_path: Path) -> None:
        """Where the driver has it: what is sent goes before the other rank asks for it, and arrives in order."""
        found = self.meet("sent_ahead", 2, folder=str(tmp_path)).found()
        if "none" in found:
            not_served("it has no isend: send is called in its place")
        assert found == ["ahead", "ahead"], (
            "isend returns only when the other rank asks, or what it sends arrives otherwise"
        )

    def test_close(self) -> None:
        """It asks nobody, may be called twice, and whatever is called afterwards is a RuntimeError. Nothing is left."""
        before = _shared()
        assert self.meet("closed", 2).found() == [[], []], "calls of a closed communicator that raise no RuntimeError"
        assert not _shared() - before, f"left in {SHARED_MEMORY}: {sorted(_shared() - before)}"

    def test_a_closed_rank_has_gone(self, tmp_path: Path) -> None:
        """For the others, while its process lives on."""
        self._gone("any", 2, "closed", tmp_path)

    def _gone(self, op: str, size: int, how: str, folder: Path) -> None:
        before = _shared()
        *others, last = self.meet("gone", size, op=op, how=how, folder=str(folder)).ranks
        assert last.code == (-9 if how == "killed" else 0), f"the rank that was to be {how} ended otherwise: {last}"
        for number, rank in enumerate(others):
            assert rank.code == 0, f"rank {number} ended with {rank.code}: {rank.error or 'it hung'}"
            if rank.found is None:
                not_served(f"accepts() takes no {op} of a thousand float32")
            error, seconds = rank.found
            assert error.startswith("RuntimeError"), f"rank {number} got: {error}"
            assert seconds < NOTICED, f"rank {number} waited {seconds:.0f} s for a rank that was {how}"
        assert not _shared() - before, f"left in {SHARED_MEMORY}: {sorted(_shared() - before)}"

    @classmethod
    def figure(cls) -> str | None:
        """How long a sum takes."""
        times = [cls.meet("timed", 2, count=bytes_ // 4).found()[0] for bytes_ in (4 << 10, 1 << 20)]
        if None in times:
            return None
        return f"all_reduce over 2 ranks: 4 KiB {times[0] * 1e6:,.0f} us, 1 MiB {times[1] * 1e6:,.0f} us"


class CommunicatorThorough:
    """Mixed in before the suite: more ranks than many a machine has cores, and megabytes."""

    @pytest.mark.parametrize("size", [4, 6])
    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_thorough_collective(self: Any, name: str, size: int) -> None:
        """As `test_collective`."""
        self._compare(name, size, 11, scenarios.DTYPES)

    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_thorough_large_collective(self: Any, name: str) -> None:
        """Some megabytes."""
        self._compare(name, 3, 1_000_003, ("float32",))

    @pytest.mark.parametrize("size", [4, 6])
    def test_thorough_rounds(self: Any, size: int) -> None:
        """As `test_many_rounds`."""
        assert self.meet("rounds", size, turns=600).found() == [0] * size


def _named(key: str, name: str) -> bool:
    """Whether "broadcast 1 float32" is of "broadcast"."""
    words = key.split()[:-1]
    return words == name.split() or (name == "broadcast" and words[0] == name and words[-1].isdigit())


def _shared() -> set[str]:
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()

"""The suite of point `experts`: a layer on one rank and on several beside a loop over tokens in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.interfaces.experts import OPERATIONS, ExpertLayer, Experts, ExpertsNeed
from engine.interfaces.model import ModelContext
from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine.modeling import Module, load_weights
from engine.types.errors import CheckpointError, ConfigError
from engine.types.parallel import Parallel, Place
from engine_kit.routing import ExpertAct, ExpertSpec
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.model.operations import NamedOperations, defined_operations
from engine_sdk.conformance.model.ranks import ThreadGroup, on_places
from engine_sdk.conformance.ops.experts import experts_of
from engine_sdk.conformance.timing import median_seconds

COUNT, HIDDEN, INNER = 8, 12, 16
DIVIDED = {
    "1": Parallel(),
    "2": Parallel(tp=2),
    "4": Parallel(tp=4),
    "2 dealt": Parallel(tp=2, ep=True),
    "4 dealt": Parallel(tp=4, ep=True),
    "2 cores": Parallel(dp=2, ep=True),
    "2 cores of 2": Parallel(tp=2, dp=2, ep=True),
}
"""Whole, a part of each on every rank, or some of them whole on each: of one engine core, or of several."""
THREE = {"3": Parallel(tp=3), "3 dealt": Parallel(tp=3, ep=True), "3 cores": Parallel(dp=3, ep=True)}
STEPS = 9
CLAMPED = ExpertAct("clamped", alpha=1.7, limit=1.5)
_SIZES = (COUNT, HIDDEN, INNER)
_DOWN = "experts.{}.down"
SPECS = {
    "one by one": ExpertSpec(*_SIZES, ExpertAct(), ("experts.{}.gate", "experts.{}.up"), _DOWN),
    "with biases": ExpertSpec(*_SIZES, ExpertAct("gelu"), ("experts.{}.gate_up",), _DOWN, bias=True),
    "without gates": ExpertSpec(*_SIZES, ExpertAct("relu2", gated=False), ("experts.{}.up",), _DOWN),
    "in one tensor": ExpertSpec(*_SIZES, ExpertAct(), ("first",), "last", stacked="rows"),
    "turned": ExpertSpec(*_SIZES, CLAMPED, ("first",), "last", stacked="turned", bias=True),
}
NEAR = 1e-9

each_form = pytest.mark.parametrize("form", SPECS)
each_division = pytest.mark.parametrize("divided", DIVIDED)
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x, ids and weights of a step."""


class ExpertRank:
    """A layer on one rank, at work.

    Args:
        core: which engine core the rank is of, `cores` of how many.
        groups: the rank's.
    """

    def __init__(self, body: Experts, layer: ExpertLayer, core: int, cores: int, groups: Mapping[str, ThreadGroup]):
        self.body = body
        self.layer = layer
        self.core = core
        self.cores = cores
        self._groups = groups

    def __call__(self, step: int, more: int = 0) -> torch.Tensor:
        """What comes of this core's case of a step. more: tokens that each core was to have besides, and has not."""
        if "dp" in self._groups:
            self._groups["dp"].tokens = [len(_case(step, core)[0]) + more for core in range(self.cores)]
        return self.layer(*_case(step, self.core))


class ExpertsConformance(Conformance):
    """Every rank that has tokens gets what all of their experts give, however they are divided."""

    point = "experts"
    protocol = "Experts"

    @classmethod
    def needs(cls) -> Sequence[ExpertsNeed]:
        return [ExpertsNeed(device=cls.device, parallel=parallel) for parallel in DIVIDED.values()]

    @classmethod
    def impossible(cls) -> Sequence[ExpertsNeed]:
        return [ExpertsNeed(device=cls.device, framework="abacus")]

    # -- what is computed --------------------------------------------------------------------------------------------
    @each_division
    @each_form
    def test_as_a_loop_over_tokens(self, form: str, divided: str) -> None:
        """No token, one, few and many, of each core others; one expert each, and several: complete, and alike on every
        rank of a core."""
        found = self.on(DIVIDED[divided], form, lambda rank: [rank(step) for step in range(len(SHAPES))])
        _check(found, form, DIVIDED[divided])

    @each_division
    def test_one_expert_has_all_tokens(self, divided: str) -> None:
        """Nobody is spared, and nobody drowned: the last expert, and the first."""
        for expert in (0, COUNT - 1):
            x = torch.from_numpy(np.random.default_rng(1).normal(size=(33, HIDDEN)))
            ids, weights = torch.full((33, 1), expert, dtype=torch.int32), torch.ones(33, 1, dtype=torch.float64)

            def work(rank: ExpertRank, given: Any = (x, ids, weights)) -> torch.Tensor:
                return rank.layer(*given)

            for found in self.on(DIVIDED[divided], "one by one", work):
                _compare(found, (x, ids, weights), "one by one")

    @each_division
    def test_inputs_stay(self, divided: str) -> None:
        """Tokens, ids and weights are others' too: a shared expert reads the tokens after this."""

        def work(rank: ExpertRank) -> bool:
            given = _case(3, rank.core)
            copies = [tensor.clone() for tensor in given]
            if "dp" in rank._groups:
                rank._groups["dp"].tokens = [len(_case(3, core)[0]) for core in range(rank.cores)]
            rank.layer(*given)
            return all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))

        assert all(self.on(DIVIDED[divided], "one by one", work)), "the layer changes what it is given"

    @pytest.mark.parametrize("divided", [name for name, parallel in DIVIDED.items() if parallel.dp > 1])
    def test_fewer_tokens_than_planned(self, divided: str) -> None:
        """Cores know how many tokens each may have, not how many drafts it has found."""
        found = self.on(
            DIVIDED[divided], "one by one", lambda rank: [rank(step, more=step % 3) for step in range(len(SHAPES))]
        )
        _check(found, "one by one", DIVIDED[divided])

    @each_division
    def test_what_is_done_beside_steps(self, divided: str) -> None:
        """Steps give the same before, while and after experts move between ranks, if they do; and each token that an
        expert computes is counted once by all ranks together."""

        def work(rank: ExpertRank) -> tuple[list[torch.Tensor], list[int]]:
            parts = rank.body.parts() if hasattr(rank.body, "parts") else ()
            for part in parts:
                part.capture()
            found = []
            for step in range(STEPS):
                for part in parts:
                    part.inputs(cast(Any, None), 0, 0)
                found.append(rank(step))
                for part in parts:
                    part.launched(cast(Any, None))
            return found, rank.body.tokens() if hasattr(rank.body, "tokens") else []

        found = self.on(DIVIDED[divided], "with biases", work)
        _check([outputs for outputs, _ in found], "with biases", DIVIDED[divided])
        if any(counts := [counts for _, counts in found]):
            cores = range(DIVIDED[divided].dp)
            all_ids = [_case(step, core)[1].flatten().numpy() for step in range(STEPS) for core in cores]
            expected = np.bincount(np.concatenate(all_ids), minlength=COUNT)
            assert np.array_equal(np.sum(counts, axis=0), expected), "the tokens of experts are miscounted"

    # -- what is loaded ----------------------------------------------------------------------------------------------
    @each_form
    def test_every_tensor_is_asked_for(self, form: str) -> None:
        """By all ranks together: a missing one, and one of another shape, is refused by its name."""
        tensors = dict(_stored(form))
        for parallel in self.served("1", "2", "2 dealt"):
            for name in (next(iter(tensors)), next(reversed(tensors))):
                for change in (None, torch.zeros(3, 5, dtype=torch.float64)):
                    given = {n: t for n, t in tensors.items() if n != name}
                    given |= {} if change is None else {name: change}
                    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                        self.on(parallel, form, lambda rank: None, given)

    @each_division
    def test_what_a_rank_holds(self, divided: str) -> None:
        """Its share of the elements, and no more than one expert beside it; copies that the options ask for apart."""
        parallel, more = DIVIDED[divided], int(getattr(self.subject().options, "redundant", 0))

        def work(rank: ExpertRank) -> int:
            return sum(part.num_elements() for part in cast("Module", rank.layer).parts())

        each, ranks = 3 * HIDDEN * INNER, parallel.tp * parallel.dp
        for count in self.on(parallel, "one by one", work):
            most = (COUNT + more) * each // ranks + each
            assert count <= most, f"{count} of {COUNT * each} elements on one of {ranks} ranks"

    def test_quantised_experts(self) -> None:
        """They are packed and multiplied by the quantization of kind "expert", where there is one."""
        if int(getattr(self.subject().options, "rebalance_every", 0)):
            pytest.skip("these options ask for experts that move, which this quantization has not")
        for parallel in self.served("1", "2", "2 dealt"):
            doubled = self.on(
                parallel, "one by one", lambda rank: [rank(step) for step in range(len(SHAPES))], quantization=_Doubled
            )
            _check(doubled, "one by one", parallel, 2)

    def test_what_cannot_be_divided(self) -> None:
        """Over three ranks is computed right, or refused with the sizes."""
        for parallel in self.served(*THREE):
            try:
                found = self.on(parallel, "one by one", lambda rank: [rank(step) for step in range(len(SHAPES))])
            except ConfigError as error:
                assert "3" in str(error), error
                continue
            _check(found, "one by one", parallel)

    # -- how -----------------------------------------------------------------------------------------------------------
    @classmethod
    def served(cls, *names: str) -> list[Parallel]:
        """Of these the divisions that the driver is for; the test is skipped where that is none."""
        every = [(DIVIDED | THREE)[name] for name in names]
        found = [one for one in every if not cls.subject().reasons(ExpertsNeed(device=cls.device, parallel=one))]
        if not found:
            cls.require(ExpertsNeed(device=cls.device, parallel=every[0]))
        return found

    @classmethod
    def on(
        cls,
        parallel: Parallel,
        form: str,
        work: Callable[[ExpertRank], Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        quantization: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """What `work` gives on each rank of each core, with a layer that is built and loaded there."""
        cls.require(ExpertsNeed(device=cls.device, parallel=parallel))
        context = worker_context(cls.subject(), cls.device, "float64", parallel=parallel)
        named = (*OPERATIONS, "gated_act", "place_experts")
        ops = NamedOperations(context.ops, named, cls.once("ops", lambda: defined_operations(named, context)))

        def rank(core: int, place: Place, groups: dict[str, ThreadGroup]) -> Any:
            stored = {} if quantization is None else {"expert": quantization(context.ops)}
            given = SimpleNamespace(
                ops=ops, quantization=stored, covers=None, target=None,
                adapters=None, dtype=torch.float64, device=torch.device(cls.device), tp_rank=place.tp_rank,
                tp_size=parallel.tp, group=groups.get("tp"), groups=groups,
            )  # fmt: skip
            body: Experts = cls.body()(context)
            layer = body.layer(cast(ModelContext, given), SPECS[form])
            load_weights(cast(Module, layer), dict(_stored(form) if tensors is None else tensors).items())
            return work(ExpertRank(body, layer, core, parallel.dp, groups))

        return on_places(parallel, rank)

    @classmethod
    def figure(cls) -> str | None:
        """What a layer costs beside what its experts compute: one token on one rank."""
        if cls.subject().reasons(ExpertsNeed(device=cls.device)):
            return None
        timed = functools.partial(median_seconds, device=cls.device)
        (seconds,) = cls.on(Parallel(), "one by one", lambda rank: timed(functools.partial(rank, 1)))
        return f"1 token, {COUNT} small experts: {seconds * 1e6:,.0f} us"


class _Doubled:
    """Layers that multiply by twice their weights, one by one. Implements `Quantization`."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        assert layer.kind == "expert", layer.kind
        return self._ops.pack_linear(tensors["weight"] * 2, tensors.get("bias"))

    def packed_bytes(self, packed: Any) -> int:
        return 1

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        found: torch.Tensor = self._ops.linear(x, packed)
        return found


def _wanted(form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """first [E, 2 * I, H], last [E, H, I], and their biases, as operations take them."""
    spec, draw = SPECS[form], np.random.default_rng(len(form))
    width = INNER * (1 + spec.act.gated)
    first, last = draw.normal(size=(COUNT, width, HIDDEN)), draw.normal(size=(COUNT, HIDDEN, INNER))
    biases = (draw.normal(size=(COUNT, width)), draw.normal(size=(COUNT, HIDDEN))) if spec.bias else (None, None)
    return first, last, *biases


def _stored(form: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as a checkpoint has them."""
    spec, (first, last, first_bias, last_bias) = SPECS[form], _wanted(form)

    def turned(tensor: np.ndarray) -> np.ndarray:
        """[E, 2 * I, ...] with gates and ups in turns."""
        return tensor.reshape(COUNT, 2, INNER, -1).swapaxes(1, 2).reshape(tensor.shape)

    found: dict[str, np.ndarray] = {}
    if spec.stacked == "rows":
        found = {"first.weight": first, "last.weight": last}
    elif spec.stacked == "turned":
        assert first_bias is not None and last_bias is not None
        found = {"first": turned(first).swapaxes(1, 2), "first_bias": turned(first_bias)}
        found |= {"last": last.swapaxes(1, 2), "last_bias": last_bias}
    else:
        for index in range(COUNT):
            for name, part in zip(spec.first, np.split(first[index], len(spec.first)), strict=True):
                found[f"{name.format(index)}.weight"] = part
            found[f"{spec.last.format(index)}.weight"] = last[index]
            if first_bias is not None and last_bias is not None:
                found[f"{spec.first[0].format(index)}.bias"] = first_bias[index]
                found[f"{spec.last.format(index)}.bias"] = last_bias[index]
    return ((name, torch.from_numpy(np.ascontiguousarray(array))) for name, array in found.items())


SHAPES = ((0, 2), (1, 1), (1, 3), (5, 2), (40, COUNT))
"""Tokens of a step, and experts of each."""


def _case(step: int, core: int) -> Case:
    """What a core computes in a step: shapes in turns, and most tokens choose low numbers."""
    tokens, per_token = SHAPES[(step + 2 * core) % len(SHAPES)][0], SHAPES[step % len(SHAPES)][1]
    draw = np.random.default_rng([step, core])
    ids = np.argsort(draw.random((tokens, COUNT)) + 0.1 * np.arange(COUNT))[:, :per_token].astype(np.int32)
    x, weights = draw.normal(size=(tokens, HIDDEN)), draw.random((tokens, per_token))
    return torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)


def _compare(found: torch.Tensor, case: Case, form: str, factor: int = 1) -> None:
    x, ids, weights = case
    given = [None if tensor is None else factor * tensor for tensor in _wanted(form)]
    expected, scale = experts_of(x.numpy(), given, ids.tolist(), weights.numpy(), SPECS[form].act)
    got = found.numpy()
    assert got.shape == expected.shape, f"{list(got.shape)}, not {list(expected.shape)}"
    assert (np.abs(got - expected) <= NEAR * (1 + scale)).all(), np.abs(got - expected).max(initial=0.0)


def _check(found: Sequence[Sequence[torch.Tensor]], form: str, parallel: Parallel, factor: int = 1) -> None:
    """Of each rank the answers of steps, beside the loop, and beside the other ranks' of its core."""
    for rank, of_rank in enumerate(found):
        core = rank // parallel.world
        for step, got in enumerate(of_rank):
            _compare(got, _case(step, core), form, factor)
            assert torch.equal(got, found[core * parallel.world][step]), "ranks disagree"

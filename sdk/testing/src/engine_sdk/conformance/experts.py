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
from engine.types.parallel import Parallel
from engine_kit.routing import ExpertAct, ExpertSpec
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.model.operations import NamedOperations, defined_operations
from engine_sdk.conformance.model.ranks import ThreadGroup, on_ranks
from engine_sdk.conformance.ops.experts import experts_of
from engine_sdk.conformance.timing import median_seconds

COUNT, HIDDEN, INNER = 8, 12, 16
RANKS = (1, 2, 4)
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
each_size = pytest.mark.parametrize("size", RANKS)


class ExpertsConformance(Conformance):
    """Every rank that has tokens gets what all of their experts give, however they are divided."""

    point = "experts"
    protocol = "Experts"

    @classmethod
    def needs(cls) -> Sequence[ExpertsNeed]:
        return [ExpertsNeed(device=cls.device, parallel=Parallel(tp=size)) for size in RANKS]

    @classmethod
    def impossible(cls) -> Sequence[ExpertsNeed]:
        return [ExpertsNeed(device=cls.device, framework="abacus")]

    # -- what is computed --------------------------------------------------------------------------------------------
    @each_size
    @each_form
    def test_as_a_loop_over_tokens(self, form: str, size: int) -> None:
        """No token, one, few and many; one expert each, and several: complete, and alike on every rank."""

        def work(layer: ExpertLayer) -> list[np.ndarray]:
            return [layer(*given).numpy() for given in _cases()]

        found = self.on(size, form, work)
        for of_rank in found:
            for got, (x, ids, weights) in zip(of_rank, _cases(), strict=True):
                expected, scale = experts_of(
                    x.numpy(), list(_wanted(form)), ids.tolist(), weights.numpy(), SPECS[form].act
                )
                assert got.shape == expected.shape, f"{list(got.shape)}, not {list(expected.shape)}"
                assert (np.abs(got - expected) <= NEAR * (1 + scale)).all(), np.abs(got - expected).max(initial=0.0)
        assert all(np.array_equal(a, b) for a, b in zip(found[0], found[-1], strict=True)), "ranks disagree"

    @each_size
    def test_one_expert_has_all_tokens(self, size: int) -> None:
        """Nobody is spared, and nobody drowned: the last expert, and the first."""
        for expert in (0, COUNT - 1):
            x = torch.from_numpy(np.random.default_rng(1).normal(size=(33, HIDDEN)))
            ids, weights = torch.full((33, 1), expert, dtype=torch.int32), torch.ones(33, 1, dtype=torch.float64)

            def work(layer: ExpertLayer, given: Any = (x, ids, weights)) -> torch.Tensor:
                return layer(*given)

            for found in self.on(size, "one by one", work):
                expected, scale = experts_of(
                    x.numpy(), list(_wanted("one by one")), ids.tolist(), weights.numpy(), ExpertAct()
                )
                assert (np.abs(found.numpy() - expected) <= NEAR * (1 + scale)).all()

    def test_inputs_stay(self) -> None:
        """Tokens, ids and weights are others' too: a shared expert reads the tokens after this."""
        for size in RANKS[:2]:

            def work(layer: ExpertLayer) -> bool:
                x, ids, weights = _cases()[3]
                copies = x.clone(), ids.clone(), weights.clone()
                layer(x, ids, weights)
                return all(torch.equal(a, b) for a, b in zip((x, ids, weights), copies, strict=True))

            assert all(self.on(size, "one by one", work)), "the layer changes what it is given"

    # -- what is loaded ----------------------------------------------------------------------------------------------
    @each_form
    def test_every_tensor_is_asked_for(self, form: str) -> None:
        """By all ranks together: a missing one, and one of another shape, is refused by its name."""
        tensors = dict(_stored(form))
        for size in RANKS[:2]:
            for name in (next(iter(tensors)), next(reversed(tensors))):
                for change in (None, torch.zeros(3, 5, dtype=torch.float64)):
                    given = {n: t for n, t in tensors.items() if n != name}
                    given |= {} if change is None else {name: change}
                    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                        self.on(size, form, lambda layer: None, given)

    @each_size
    def test_what_a_rank_holds(self, size: int) -> None:
        """Its share of the elements, and no more than one expert beside it."""

        def work(layer: ExpertLayer) -> int:
            return sum(part.num_elements() for part in cast("Module", layer).parts())

        each = 3 * HIDDEN * INNER
        for count in self.on(size, "one by one", work):
            assert count <= COUNT * each // size + each, f"{count} of {COUNT * each} elements on one of {size} ranks"

    def test_quantised_experts(self) -> None:
        """They are packed and multiplied by the quantization of kind "expert", where there is one."""
        for size in RANKS[:2]:

            def work(layer: ExpertLayer) -> list[torch.Tensor]:
                return [layer(*given) for given in _cases()]

            doubled = self.on(size, "one by one", work, quantization=_Doubled)
            for of_rank in doubled:
                for got, (x, ids, weights) in zip(of_rank, _cases(), strict=True):
                    given = [None if tensor is None else 2 * tensor for tensor in _wanted("one by one")]
                    expected, scale = experts_of(x.numpy(), given, ids.tolist(), weights.numpy(), ExpertAct())
                    assert (np.abs(got.numpy() - expected) <= NEAR * (1 + scale)).all(), (
                        "they are not the quantised ones"
                    )

    def test_what_cannot_be_divided(self) -> None:
        """Over three ranks is computed right, or refused with the sizes."""

        def work(layer: ExpertLayer) -> torch.Tensor:
            return layer(*_cases()[3])

        try:
            found = self.on(3, "one by one", work)
        except ConfigError as error:
            assert "3" in str(error), error
            return
        x, ids, weights = _cases()[3]
        expected, scale = experts_of(x.numpy(), list(_wanted("one by one")), ids.tolist(), weights.numpy(), ExpertAct())
        assert all((np.abs(one.numpy() - expected) <= NEAR * (1 + scale)).all() for one in found)

    # -- how -----------------------------------------------------------------------------------------------------------
    @classmethod
    def on(
        cls,
        size: int,
        form: str,
        work: Callable[[ExpertLayer], Any],
        tensors: Mapping[str, torch.Tensor] | None = None,
        quantization: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """What `work` gives on each of so many ranks, with a layer that is built and loaded there."""
        cls.require(ExpertsNeed(device=cls.device, parallel=Parallel(tp=size)))
        context = worker_context(cls.subject(), cls.device, "float64")
        named = (*OPERATIONS, "gated_act")
        ops = NamedOperations(context.ops, named, cls.once("ops", lambda: defined_operations(named, context)))

        def rank(group: ThreadGroup) -> Any:
            stored = {} if quantization is None else {"expert": quantization(context.ops)}
            given = SimpleNamespace(
                ops=ops, quantization=stored, covers=None,
                adapters=None, dtype=torch.float64, device=torch.device(cls.device), tp_rank=group.rank, tp_size=size,
                group=group if size > 1 else None,
            )  # fmt: skip
            body: Experts = cls.body()(context)
            layer = body.layer(cast(ModelContext, given), SPECS[form])
            load_weights(cast(Module, layer), dict(_stored(form) if tensors is None else tensors).items())
            return work(layer)

        return on_ranks(size, rank)

    @classmethod
    def figure(cls) -> str | None:
        """What a layer costs beside what its experts compute: one token on one rank."""
        if cls.subject().reasons(ExpertsNeed(device=cls.device)):
            return None
        given = _cases()[1]
        (seconds,) = cls.on(1, "one by one", lambda layer: median_seconds(functools.partial(layer, *given), cls.device))
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


def _cases() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """x, ids, weights of some steps."""
    found = []
    for tokens, per_token in ((0, 2), (1, 1), (1, 3), (5, 2), (40, COUNT)):
        draw = np.random.default_rng(tokens)
        ids = np.argsort(draw.random((tokens, COUNT)))[:, :per_token].astype(np.int32)
        x, weights = draw.normal(size=(tokens, HIDDEN)), draw.random((tokens, per_token))
        found.append((torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)))
    return found

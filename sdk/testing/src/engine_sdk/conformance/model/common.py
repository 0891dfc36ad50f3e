"""What the suites of all models have: who is tested, with which config and weights, and the tests of the card."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import Ops
from engine.interfaces.quantization import EMBEDDING, KINDS, LayerShape, StoredTensor, plain_tensors
from engine.plugin import Registry
from engine.types.errors import CheckpointError, ConfigError, UnsupportedModelError
from engine.types.model import ModelDescription
from engine.types.parallel import Parallel
from engine_kit.plain_layer import plain_layer
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.contexts import worker_context
from engine_sdk.conformance.model.example import Shapes, check_size, draw, encoder_input, prompt
from engine_sdk.conformance.model.operations import NamedOperations, defined_operations
from engine_sdk.conformance.model.oracle import TOLERANCE, Oracle, why_none
from engine_sdk.conformance.model.paged import attention_needs, reference_attention, reference_cards
from engine_sdk.conformance.model.ranks import ThreadGroup
from engine_sdk.conformance.model.session import Session
from engine_sdk.conformance.model.small import own_names, read_config, small_config
from engine_sdk.conformance.subject import Subject
from engine_sdk.conformance.timing import median_seconds

NEAR = 1e-9
"""float64 sums in another order."""
LOOSE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Of values about 1, against float64, after two layers."""
SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "max_position_embeddings",
)
NONSENSE: tuple[Any, ...] = ("nonsense", -1, 0, [], 0.5, True)
"""What no size of a config is."""


class ModelSuite(Conformance):
    """What decoders and encoders have in common.

    Attributes:
        config: goes over the small config.json that transformers' config class gives (`small.small_config`); or the
            path of a config.json that takes its place.
        architecture: the config's, where it is not the driver's name.
        oracle: transformers' class that computes the same; the architecture's where it is left out. None: there is
            none, and the model is held against itself alone.
        shapes: the tensors of a checkpoint; left out, transformers' class says them by what it saves, else the body's
            own params (`engine.modeling.Module`).
        unused: beginnings of names of tensors that a checkpoint may hold and the model has no use for.
        copied: names of tensors of which the model keeps a second copy, as a head of its own that the file lacks.
    """

    point = "model"
    protocol = "Model"
    config: ClassVar[Mapping[str, Any] | str | Path] = {}
    architecture: ClassVar[str] = ""
    oracle: ClassVar[str | None] = ""
    shapes: ClassVar[Shapes | None] = None
    unused: ClassVar[tuple[str, ...]] = ()
    copied: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """Matrices this small gain nothing from several threads, which wait for each other on a busy machine."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    # -- who is tested -----------------------------------------------------------------------------------------------
    @classmethod
    def whole_config(cls) -> dict[str, Any]:
        """config.json."""
        return copy.deepcopy(cast("dict[str, Any]", cls.once("config", cls.config_with)))

    @classmethod
    def config_with(cls, **changed: Any) -> dict[str, Any]:
        """The same with other values of some keys, which are in the architecture's own words."""
        return cls.config_for(cls.architecture or cls.subject().candidate.name, changed)

    @classmethod
    def config_for(cls, architecture: str, changed: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """config.json of a driver of this name."""
        if isinstance(cls.config, Mapping):
            found = small_config(cls.class_for(architecture), {**cls.config, **changed})
        else:
            found = {**read_config(cls.config), **changed}
        return {**found, "architectures": [architecture]}

    @classmethod
    def key(cls, name: str) -> str:
        """A key of `SMALL` in the architecture's own words."""
        return next(iter(own_names(cls.transformers_name(), {name: 0})))

    @classmethod
    def described(cls) -> type[ModelCard]:
        """The card, as what it is."""
        return cast("type[ModelCard]", cls.subject().card)

    @classmethod
    def description(cls) -> ModelDescription:
        """The card's, of this config; made once."""
        return cast("ModelDescription", cls.once("description", lambda: cls.described().describe(cls.whole_config())))

    @classmethod
    def need(cls, tp: int = 1) -> ModelNeed:
        """What the engine asks."""
        config = cls.whole_config()
        return ModelNeed(architecture=config["architectures"][0], config=config, parallel=Parallel(tp=tp))

    @classmethod
    def needs(cls) -> Sequence[ModelNeed]:
        return [cls.need(), cls.need(2), cls.need(4), cls.need(3)]

    @classmethod
    def impossible(cls) -> Sequence[ModelNeed]:
        return [replace(cls.need(), framework="abacus")]

    @classmethod
    def methods(cls) -> Sequence[str]:
        """Without the heads, and the encoder, that the description has not."""
        model = cls.description()
        absent = {"logits"} if not model.generates else set()
        absent |= {"classify"} if not model.pooler.num_labels else set()
        absent |= {"encode"} if model.encoder is None else set()
        absent |= {"embed_vectors"} if not cls.described().takes_embeds else set()
        absent |= {"state_sizes"} if "stages" in cls.described().unsupported_features() else set()
        return [name for name in super().methods() if name not in absent]

    @classmethod
    def transformers_name(cls) -> str:
        """The class of transformers that is the oracle, if there is one."""
        return cls.class_for(cls.architecture or cls.subject().candidate.name)

    @classmethod
    def class_for(cls, architecture: str) -> str:
        """The same of a driver of this name; "" where the author says that there is none."""
        return "" if cls.oracle is None else cls.oracle or architecture

    @classmethod
    def why_no_oracle(cls) -> str:
        """Why nothing of transformers computes the same; "" where something does."""
        return "nothing else computes it: oracle = None" if cls.oracle is None else why_none(cls.transformers_name())

    # -- weights -----------------------------------------------------------------------------------------------------
    @classmethod
    def reference(cls) -> Oracle:
        """transformers' model with the same weights; the test is skipped where there is none."""
        reason = cls.why_no_oracle()
        if reason:
            pytest.skip(reason)
        return cast("Oracle", cls.once("oracle", lambda: Oracle(cls.transformers_name(), cls.whole_config())))

    @classmethod
    def tensors(cls) -> Shapes:
        """The checkpoint's names and shapes."""
        shapes = cast("Shapes", cls.once("shapes", cls._shapes))
        check_size(shapes)
        return shapes

    @classmethod
    def _shapes(cls) -> Shapes:
        if cls.shapes is not None:
            return cls.shapes
        reason = cls.why_no_oracle()
        if not reason:
            return cls.reference().shapes
        parts = getattr(cls.bare(), "parts", None)
        if parts is None:
            pytest.fail(f"name the checkpoint's tensors: shapes = {{...}} ({reason})", pytrace=False)
        return {param.name: param.shape for part in parts() for param in part.params()}

    @classmethod
    def bare(cls) -> Any:
        """A body without weights."""

        class _Bare(Exception):
            pass

        found: list[Any] = []

        class _Stops(cls.body()):  # type: ignore[misc]
            def load_weights(self, weights: Any) -> None:
                found.append(self)
                raise _Bare

        with pytest.raises(_Bare):
            Session(_Stops, cls.description(), cls.context("float64"), cls.attention("float64"), ())
        return found[0]

    @classmethod
    def weights(cls, changed: str = "", without: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, one with other numbers, or left out."""
        return ((name, tensor) for name, tensor in draw(cls.tensors(), changed) if name != without)

    @classmethod
    def needed(cls) -> frozenset[str]:
        """The tensors that a checkpoint must have: those without which it is refused. Not `unused` ones."""

        def find() -> frozenset[str]:
            return frozenset(name for name in cls.tensors() if cls._refuses(cls.weights(without=name), name))

        return cast("frozenset[str]", cls.once("needed", find))

    @classmethod
    def idle(cls, name: str) -> bool:
        """Whether a tensor need not matter: one that the author names, or on which transformers' own answer does not
        depend (a key's bias adds the same to all scores)."""
        if cls.unused and name.startswith(cls.unused):
            return True
        if cls.shapes is not None or cls.why_no_oracle():
            return False
        oracle, ids = cls.reference(), cls.ids(9)
        before = oracle(ids, encoder=cls.read())
        oracle.load(cls.weights(changed=name))
        after = oracle(ids, encoder=cls.read())
        oracle.load(cls.weights())
        return torch.allclose(after, before, rtol=TOLERANCE, atol=TOLERANCE)

    # -- sessions ----------------------------------------------------------------------------------------------------
    @classmethod
    def _context(cls, dtype: str) -> WorkerContext:
        context, card = worker_context(cls.subject(), cls.device, dtype), cast("type[ModelCard]", cls.subject().card)
        defined = defined_operations(card.operations, context)
        return replace(context, ops=cast("Ops", NamedOperations(context.ops, card.operations, defined)))

    @classmethod
    def context(cls, dtype: str) -> WorkerContext:
        """A worker's, with the reference operations; made once."""
        return cast("WorkerContext", cls.once(f"context {dtype}", lambda: cls._context(dtype)))

    @classmethod
    def attention(cls, dtype: str) -> dict[str, Any]:
        """The reference attention's bodies; made once."""
        return cast(
            "dict[str, Any]",
            cls.once(f"attention {dtype}", lambda: reference_attention(cls.context(dtype), cls.registry())),
        )

    @classmethod
    def registry(cls) -> Registry:
        """What is installed; looked up once."""
        return cast("Registry", cls.once("registry", Registry.discover))

    @classmethod
    def session(
        cls, dtype: str = "float64", weights: Any = None, group: ThreadGroup | None = None, **how: Any
    ) -> Session:
        """A model with this config, over caches of its own; skipped where the card or attention does not serve it."""
        size = 1 if group is None else group.size
        cls.servable(size, dtype)
        given = cls.weights() if weights is None else weights
        context, attention = cls.context(dtype), cls.attention(dtype)
        return Session(cls.body(), cls.description(), context, attention, given, group=group, **how)

    @classmethod
    def servable(cls, size: int = 1, dtype: str = "float64") -> None:
        """Skip the test where the card does not serve the config, or the reference attention not its layers."""
        cls.require(cls.need(size))
        reason = cls.unserved(cls.description(), size, dtype)
        if reason:
            pytest.skip(reason)

    @classmethod
    def unserved(cls, model: ModelDescription, size: int = 1, dtype: str = "float64") -> str:
        """Why the suite cannot compute with such a model; "" where it can."""
        cards = reference_cards(cls.registry())
        for need in attention_needs(model, dtype, cls.device, size):
            if need.kind == "state":
                continue
            card = cards.get(need.kind)
            reasons = card.unsupported(need) if card else [f"none of them serves layers of kind '{need.kind}'"]
            if reasons:
                return f"the suite computes with the reference attention: {'; '.join(reasons)}"
        return ""

    @classmethod
    def _refuses(cls, weights: Any, name: str) -> bool:
        """True where these are refused by name; False where they are taken."""
        try:
            cls.session(weights=weights)
        except CheckpointError as error:
            # A checkpoint may have the model's own prefix before each name ("bert."), and may not.
            named = name in str(error) or (name.count(".") > 1 and name.partition(".")[2] in str(error))
            assert named, f"the error does not name {name}: {error}"
            return True
        return False

    @classmethod
    def ids(cls, length: int, seed: int = 0) -> list[int]:
        """A random prompt."""
        return prompt(length, cls.description().vocab_size, seed)

    @classmethod
    def read(cls, model: ModelDescription | None = None) -> np.ndarray | None:
        """What the encoder of an encoder-decoder model, this or another, reads where no test says; None for others."""
        model = model or cls.description()
        return None if model.encoder is None else encoder_input(model)

    @classmethod
    def alone(cls, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """What the model says of a prompt that is computed alone and at once, in float64."""
        return cast("Session", cls.once("session", cls.session)).whole(ids, types)

    @classmethod
    def pooled(cls, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """The same, as transformers gives it: see `Session.pooled`."""
        return cast("Session", cls.once("session", cls.session)).pooled(ids, types)

    # -- the description ---------------------------------------------------------------------------------------------
    def test_describe_is_pure(self) -> None:
        """The same config gives the same facts, is not changed, and the facts travel."""
        config = self.whole_config()
        first = self.described().describe(config)
        assert config == self.whole_config(), "describe changes the config that it is given"
        assert self.described().describe(config) == first, "described again, the model is another"
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=ModelDescription) == first

    def test_describe_agrees_with_the_config(self) -> None:
        """The architecture's name, the config for the body, caches in the layers' order, heads that divide."""
        config, model = self.whole_config(), self.description()
        assert model.architecture == config["architectures"][0]
        assert model.config == config, "the body is built from another config"
        layers = [spec.layer or 0 for spec in model.sites]
        behind = 0 if model.encoder is None else sum(spec.kind == "encoder" for spec in model.sites)
        assert layers == sorted(layers) and set(layers) <= set(range(model.num_layers + behind)), "not in order"
        sizes = {
            "vocab_size": model.vocab_size, "hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_q_heads,
        }  # fmt: skip
        for key, value in ((self.key(name), value) for name, value in sizes.items()):
            said = config.get(key, 0)  # of heads none says what attends to nothing
            assert value == said, f"{key} is {said} in the config, and {value} described"
        for spec in model.sites:
            assert not spec.num_kv_heads or spec.num_q_heads % spec.num_kv_heads == 0
            assert spec.kind == "encoder" or (spec.sliding_window is not None) == (spec.kind == "sliding")
            assert not spec.model, "a layer of a draft model"
        assert model.max_model_len > 0
        assert model.generates or model.pooler.tasks

    @pytest.mark.parametrize("size", SIZES)
    def test_a_config_that_makes_no_sense(self, size: str) -> None:
        """A size that is missing or is none: a typed error that names it, or it changes nothing."""
        config, described, key = self.whole_config(), self.described(), self.key(size)
        for value in NONSENSE:
            try:
                found = described.describe({**config, key: value})
            except (CheckpointError, UnsupportedModelError) as error:
                assert key in str(error), f"{key} is {value!r}, and the error does not name it: {error}"
            else:
                plain = msgspec.structs.replace(self.description(), config={})
                assert msgspec.structs.replace(found, config={}) == plain, f"{key} is {value!r}, and taken for a size"
        config.pop(key, None)
        try:
            described.describe(config)
        except (CheckpointError, UnsupportedModelError) as error:
            assert key in str(error), f"{key} is missing, and the error does not name it: {error}"

    def test_its_layers_are_those_described(self) -> None:
        """Each layer asks for its attention once, gives it what the description says, and is called once a step."""
        session, sites = self.session(), [site.layer for site in self.description().sites]
        layers = session.layers
        assert sorted(layers.built) == sites, "layers ask for their attention, and their states"
        assert layers.features == set(self.description().attention_features)
        session.whole(self.ids(5))
        assert (layers.calls if self.description().encoder is None else sorted(layers.calls)) == sites

    # -- the checkpoint ----------------------------------------------------------------------------------------------
    def test_a_missing_tensor(self) -> None:
        """Is an error that names it: nothing is made up."""
        made_up = [name for name in sorted(self.tensors().keys() - self.needed()) if not self.idle(name)]
        assert not made_up, f"loads without {', '.join(made_up)}"

    def test_an_unexpected_tensor(self) -> None:
        """Is an error that names it: another model's weights, or a layer more than the config has."""
        last = self.description().num_layers
        deeper = [name for name in self.needed() if f".{last - 1}." in name]
        names = ["nobody.knows.this.weight", *(name.replace(f".{last - 1}.", f".{last}.") for name in deeper[:1])]
        for name in names:
            more = [*self.weights(), (name, torch.ones(3, 3))]
            assert self._refuses(more, name), f"{name} is passed over without a word"

    def test_a_tensor_of_another_form(self) -> None:
        """One row more, one column more, flat, turned, or whole numbers: an error that names it."""
        for turn, name in enumerate(sorted(self.needed())):
            shape = self.tensors()[name]
            forms = [(shape[0] + 1, *shape[1:]), (*shape[:-1], shape[-1] + 1), (math.prod(shape), 1), shape[::-1]]
            form = next(form for form in forms[turn % 4 :] + forms if form != shape)
            found = self._refuses(self._instead(name, torch.ones(form)), name)
            assert found, f"{name} of {list(form)} is taken for {list(shape)}"
        assert self._refuses(self._instead(name, torch.ones(shape, dtype=torch.int64)), name), "int64 is no weight"

    def _instead(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(n, tensor if n == name else t) for n, t in self.weights()]

    def test_a_tensor_that_comes_twice(self) -> None:
        """Is an error that names it."""
        name, tensor = next((n, t) for n, t in self.weights() if n in self.needed())
        assert self._refuses([*self.weights(), (name, tensor)], name), f"the second {name} is taken without a word"

    def test_every_tensor_matters(self) -> None:
        """Each tensor that a checkpoint must have changes what is computed, and none else."""
        ids, types = self.ids(9), [0] * 5 + [max(self.description().num_token_types - 1, 0)] * 4

        def trace(session: Session) -> list[torch.Tensor]:
            answer = session.whole(ids, types)
            return [*session.layers.kept, answer]

        before = trace(self.session(keeps=True))
        for name in sorted(self.tensors()):
            after = trace(self.session(weights=self.weights(changed=name), keeps=True))
            same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
            assert not same or self.idle(name), f"{name} has no influence on what is computed"

    def test_the_order_of_tensors(self) -> None:
        """Is the checkpoint's own: backwards they make the same model. They are read once."""
        found = self.session(weights=reversed(list(self.weights()))).whole(self.ids(7))
        assert torch.equal(found, self.session(weights=iter(list(self.weights()))).whole(self.ids(7)))

    @pytest.mark.parametrize("stored", ["bfloat16", "float16"])
    def test_weights_are_cast(self, stored: str) -> None:
        """A file of half precision computes as its numbers do in the model's dtype."""
        half = [(name, tensor.to(getattr(torch, stored))) for name, tensor in self.weights()]
        wide = [(name, tensor.double()) for name, tensor in half]
        found, expected = (self.session(weights=given).whole(self.ids(7)) for given in (half, wide))
        torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)

    def test_counts(self) -> None:
        """Parameters and bytes of the weights that the checkpoint must have."""
        elements = sum(math.prod(self.tensors()[name]) for name in (*self.needed(), *self.copied))
        for dtype in ("float64", "float32"):
            model = self.session(dtype).model
            assert model.num_parameters() == elements
            assert model.weight_bytes() == elements * getattr(torch, dtype).itemsize

    def test_quantised_layers(self) -> None:
        """The kinds of layer that the card names are packed and multiplied by the quantization driver, and no other."""
        ops = self.context("float64").ops
        assert ops is not None
        said = self.described().quantized
        known = {*KINDS, EMBEDDING}
        assert said <= known, f"the card's `quantized` names {sorted(said)}, of {', '.join(sorted(known))}"
        drivers = {kind: _Watched(ops) for kind in KINDS}
        session = self.session(quantization=drivers)
        found = session.whole(self.ids(7))
        torch.testing.assert_close(found, self.alone(self.ids(7)), rtol=NEAR, atol=NEAR)
        packed = {kind for driver in drivers.values() for kind in driver.packed}
        there = said - {EMBEDDING} - (set() if self.description().generates else {"head"})
        routed = any("expert" in name or "_moe." in name for name in self.tensors())
        there = there if routed else there - {"expert"}  # a dense model of an architecture that may have experts
        assert packed == there, f"the card says that {sorted(there)} are packed, and these are: {sorted(packed)}"
        assert packed == {kind for kind, driver in drivers.items() if driver.multiplied}

    def test_quantised_embedding(self) -> None:
        """Where the card names it, its driver packs it and looks its rows up; a head that shares its matrix multiplies
        by what that driver packed, once for both."""
        ops = self.context("float64").ops
        assert ops is not None
        if EMBEDDING not in self.described().quantized:
            not_served("its card does not name embeddings among what others may store")
        driver = _Watched(ops)
        session = self.session(quantization={EMBEDDING: driver})
        torch.testing.assert_close(session.whole(self.ids(7)), self.alone(self.ids(7)), rtol=NEAR, atol=NEAR)
        assert driver.packed == {EMBEDDING} and driver.looked_up, "the embedding is not its driver's"

    # -- computing ---------------------------------------------------------------------------------------------------
    def test_nothing_is_kept_between_calls(self) -> None:
        """What a request gives does not depend on those before it, nor on how many there were."""
        session = self.session()
        first = session.whole(self.ids(7, seed=1))
        for seed, length in ((2, 7), (3, 12)):
            found = session.whole(self.ids(length, seed=seed))
            assert torch.equal(found, self.session().whole(self.ids(length, seed=seed))), "it remembers other requests"
        assert torch.equal(session.whole(self.ids(7, seed=1)), first)

    def test_computes_through_operations_alone(self) -> None:
        """Under the dispatch guard: what is neither an operation, nor attention, nor a view could not be captured."""
        if self.described().captured_by is not None:
            not_served("its card says by captured_by that it computes beside them")
        found = self.session(guarded=True).whole(self.ids(9))
        torch.testing.assert_close(found, self.alone(self.ids(9)), rtol=NEAR, atol=NEAR)

    @pytest.mark.parametrize("dtype", list(LOOSE))
    def test_dtypes(self, dtype: str) -> None:
        """In the dtype that was asked for, near to float64: most tokens, since a router may send some elsewhere where
        two experts are nearly alike."""
        cases = [self.ids(9, seed=4), self.ids(17, seed=5)]
        try:
            session = self.session(dtype)
        except ConfigError as refused:
            not_served(f"its body refuses {dtype}: {refused.found}")
        for ids in cases:
            found, expected = session.whole(ids), self.alone(ids)
            scale = float(expected.abs().mean()) + 1e-6
            error = float((found - expected).abs().mean(-1).median()) / scale
            assert error < LOOSE[dtype], f"{error:.2g} of the values' size away from float64"

    def test_the_heads_take_any_rows(self) -> None:
        """A row's logits or labels are its own: some rows give what they give among all."""
        session = self.session()
        hidden = torch.randn(7, self.description().hidden_size, generator=torch.Generator().manual_seed(0)).double()
        hidden = hidden.to(self.device)
        every = session.heads(hidden)
        for rows in ([3], [6, 0, 6], [1, 2, 3, 4]):
            torch.testing.assert_close(session.heads(hidden[rows]), every[rows], rtol=NEAR, atol=NEAR)

    @classmethod
    def figure(cls) -> str | None:
        """How fast the small model is on the reference operations: what the body itself costs, in the main."""
        session, ids = cls.session("float32"), cls.ids(32)
        seconds = median_seconds(lambda: session.whole(ids), cls.device)
        return f"{session.model.num_parameters():,} parameters, a prompt of {len(ids)} in {seconds * 1e3:.2f} ms"

    @classmethod
    def suite_for(cls, subject: Subject) -> str:
        """The suite of encoders, where the driver is one; of other frameworks' models, where it is one of these."""
        card = cast("type[ModelCard]", subject.card)
        if card.framework not in (None, "torch"):
            return "ServedModelConformance"
        try:
            encoder = card.describe(cls.config_for(subject.candidate.name)).whole_prompts
        except (CheckpointError, UnsupportedModelError):
            encoder = False
        return "EncoderModelConformance" if encoder else "ModelConformance"


class _Watched:
    """Plain layers that remember which kinds they were packed for. Implements `Quantization`."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.packed: set[str] = set()
        self.multiplied = False
        self.looked_up = False

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """A plain layer's."""
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Any:
        """As the operations do, in float64."""
        weight, bias = plain_layer(layer, tensors)
        self.packed.add(layer.kind)
        return self._ops.pack_linear(weight.double(), bias), weight.double()

    def packed_bytes(self, packed: Any) -> int:
        """Nobody asks."""
        return 1

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        self.multiplied = True
        return functools.partial(self._ops.linear, packed=packed[0])(x)

    def embedding(self, ids: torch.Tensor, packed: Any, first: int | None) -> torch.Tensor:
        """ids [T] -> [T, H]; the ranks of these tests have whole vocabularies."""
        assert first is None
        self.looked_up = True
        return self._ops.embedding(ids, packed[1])

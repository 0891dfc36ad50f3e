"""Point `model`: an architecture. The entry point's name is config.json's architecture string, or `*` for a driver that
serves architectures which it does not name. Where several offer a name, the one that fits and has the highest priority
is taken.

Minor version 2 added `ModelContext.state`; 3 `cross_attention`, `Model.encode` and relative biases; 4 `wanted`; 5
`embed_vectors`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from engine.interfaces.ops import MODEL_OPERATIONS
from engine.plugin import Card
from engine.types.model import ModelDescription
from engine.types.parallel import Parallel, Stage

if TYPE_CHECKING:
    import numpy as np
    import torch

    from engine.interfaces.communicator import Group
    from engine.interfaces.experts import Experts
    from engine.interfaces.ops import Ops
    from engine.interfaces.quantization import LayerShape, Quantization

NOT_CAPTURED = "its steps are not captured: its card says captured_by = frozenset()"
"""What is said of a model whose card says so."""

ModelFeature = Literal["listeners", "stages"]
"""What a start may ask of a body beside the forward pass: that others look on between its layers, by the walk that it
is given; that it can be a part of the model's layers, on a pipeline's stage."""


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """What the engine asks of a model's driver.

    Args:
        architecture: config.json's string.
        config: config.json, decoded.
        framework: "torch" or "jax".
        parallel: over how many workers the model is divided.
        features: further demands.
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    framework: str = "torch"
    parallel: Parallel = field(default_factory=Parallel)
    features: frozenset[ModelFeature] = frozenset()
    batch_invariant: bool = False


class ModelCard(Card):
    """Describes an architecture. `unsupported(need)` names the config's features that the body does not have."""

    quantized: ClassVar[frozenset[str]] = frozenset()
    """The kinds of layer (`interfaces.quantization`) that the body packs by `ModelContext.quantization`."""

    operations: ClassVar[frozenset[str]] = frozenset(MODEL_OPERATIONS)
    """All that the body calls of `ModelContext.ops`: of `engine.interfaces.ops`, and what drivers of ops define."""

    captured_by: ClassVar[frozenset[str] | None] = None
    """The recorders (`engine.interfaces.platform.PlatformCard.recorder`) that see a whole step of the body. None: all
    that see its operations and its attention, for it computes through these alone. A body that computes in plain torch
    as well, always alike, says `STREAM`; one that does what depends on values, such as a mixture of experts that looks
    for its tokens, says frozenset(): every step is then launched as it is."""

    batch_invariant = True
    """A body that computes through operations and attention alone is what they are. False where it computes in plain
    torch as well."""

    walks: ClassVar[bool] = True
    """Whether the body iterates its layers by the walk that `forward` is given. False: nobody can look on between them,
    and the model cannot be cut into stages. A body that walks, and yet builds all layers whatever its context's stage
    says, names "stages" in `unsupported_features`."""

    takes_embeds: ClassVar[bool] = False
    """Whether the body has `embed_vectors`, and walks its layers: the runner puts them in before the first."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description of a model with this config.json (without `eos_token_ids` of generation_config.json).

        Raises UnsupportedModelError or CheckpointError naming the config's key that is missing or makes no sense.
        """
        raise NotImplementedError

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """The features that no config of it has. Those of a body that does not walk are `listeners` and `stages`."""
        return frozenset() if cls.walks else frozenset({"listeners", "stages"})

    @classmethod
    def mismatches(cls, need: ModelNeed) -> list[str]:
        """The framework's, and the features that the card does not have."""
        lacking = sorted(need.features & cls.unsupported_features())
        why = "" if cls.walks else ", for its body does not walk its layers"
        return super().mismatches(need) + [f"it does not serve {feature}{why}" for feature in lacking]

    @classmethod
    def remarks(cls, need: ModelNeed) -> list[str]:
        """That its steps are not captured, where the card says so."""
        return [NOT_CAPTURED] if cls.captured_by == frozenset() else []


class State(dict[str, "torch.Tensor"]):
    """A named set of token-major tensors, [T, ...] each: what goes from layer to layer.

    `hidden` [T, H] is always there after the embedding, `token_ids` int32 [T] and `positions` int64 [T] from the
    start, `token_type_ids` int32 [T] too where the description has `num_token_types`; `residual` [T, H] where the
    layers keep one. `wanted` int64 [n], where it is there: the tokens whose hidden states will be read; the last layer
    may compute these alone, and then takes the name away.
    """


class LayerIterator(Protocol):
    """The runner's hold on a model's layers: it decides which run, and looks on between them."""

    def __call__(self, layers: Iterable[Any], state: State) -> Iterator[Any]:
        """Iterate over a stack's layers; the model applies each to `state`, in place, before it asks for the next."""


class PagedAttention(Protocol):
    """One layer's attention with its cache (if it keeps one), in the runner's hands. Where it has the attribute
    `rotates`, and that is true, it takes a `engine.interfaces.attention.Rotation` as fourth argument."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] (rotated) -> [T, Hq * D]; stores k and v first."""


class AttentionFactory(Protocol):
    """Gives each layer its attention."""

    def __call__(
        self,
        layer: int,
        scale: float,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        relative_bias: torch.Tensor | None = None,
    ) -> PagedAttention:
        """layer: index of the model's layer; the others as in `engine.interfaces.attention.AttentionLayer`.

        The description of a model that gives sinks, slopes or biases names them in `attention_features`. They are read
        in every step, so weights may be loaded into them later.
        """


class PagedLatentAttention(Protocol):
    """One layer's latent attention with its cache, in the runner's hands."""

    def __call__(
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> torch.Tensor:
        """q_latent [T, Hq, C] (queries, absorbed), q_rope [T, Hq, P] (rotated), latent [T, C] (normed), rope_key [T, P]
        (rotated) -> [T, Hq, C]; stores latent and rope_key first. C and P are the latent's and the rotated key's
        sizes, see `engine.interfaces.latent_attention`."""


class LatentAttentionFactory(Protocol):
    """Gives each layer of kind "mla" its attention."""

    def __call__(self, layer: int, scale: float) -> PagedLatentAttention:
        """layer: index of the model's layer; scale: of scores."""


class PagedCrossAttention(Protocol):
    """What a decoder's layer sees of the encoder, in the runner's hands: `Model.encode` leaves keys and values, once
    for each input, and the layer reads those of each row's request."""

    def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, Hkv, D], of the n tokens of the input that is being encoded."""

    def __call__(self, q: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq * D]: each token sees all that the encoder made for its row."""


@dataclass(frozen=True, kw_only=True)
class StateBatch:
    """Where a step's rows go on from, and where they leave their states. R rows, row i having the tokens
    query_start_loc[i] .. query_start_loc[i + 1] - 1.

    Args:
        query_start_loc: int32 [R + 1]; query_start_loc_host: the same, numpy.
        read: int64 [R]; the page with the state before a row's first token, -1 where that is the sequence's first.
        write: int64 [n]; pages that get a state, none twice.
        write_at: int64 [m]; the tokens after which states are kept: the first n, in order, those that go to `write`;
            after drafts there are others, of which `StateSite.save` takes care. write_at_host: the same, numpy.
    """

    query_start_loc: torch.Tensor
    query_start_loc_host: np.ndarray
    read: torch.Tensor
    write: torch.Tensor
    write_at: torch.Tensor
    write_at_host: np.ndarray

    @property
    def decodes(self) -> bool:
        """Every row has one token, and a state is kept after each."""
        return len(self.write_at_host) == len(self.read) == int(self.query_start_loc_host[-1])


class StateSite(Protocol):
    """One layer's states, in the runner's hands: a layer loads what it keeps, computes the step's tokens, and saves."""

    @property
    def pool(self) -> Mapping[str, torch.Tensor]:
        """For each `engine.types.model.StateTensor` [pages, *shape], this rank's part, strided: pages lie apart. For
        operations that compute in place: they read and write as `load` and `save` do."""

    @property
    def batch(self) -> StateBatch:
        """The step's."""

    def load(self, name: str) -> torch.Tensor:
        """The states with which the step's rows begin, [R, *shape], in the state's dtype: zeros where a sequence does.
        They may be changed."""

    def save(self, name: str, states: torch.Tensor) -> None:
        """Keep the states after the tokens `batch.write_at`, [m, *shape], of any dtype. Once a step for each state."""


class AdapterLayer(Protocol):
    """What one linear layer of a worker is adapted by for single requests."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The layer's inputs x [T, I] and outputs y [T, O], both as this rank has them -> y with what is added.

        Where a layer's inputs are divided over ranks, their outputs are summed behind this. It may write into y.
        """


class Adapters(Protocol):
    """All adapters of one worker. Linear layers ask for theirs; models themselves know of none."""

    def layer(self, shape: LayerShape) -> AdapterLayer | None:
        """That of a layer; None where it is never adapted. Asked once, while the model is built; also of embeddings,
        kind "embedding", whose x are ids [T]: of this rank's inputs, or of others, for which it adds nothing."""


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """What a model's body is built with. It may grow.

    Args:
        description: the card's.
        ops: the operations to compute with. A model computes only through these, its attention, and views.
        attention: gives each layer its attention.
        dtype, device: of the weights.
        max_model_len: positions that will be asked for.
        tp_rank, tp_size: this worker's place among those that share the layers; each holds 1 / tp_size of the weights.
        group: the ranks that share the layers; None where there is one.
        groups: all that this worker is in, by name, see `engine.types.parallel.GroupPlace`; none of one rank.
        quantization: for each kind of layer who packs and multiplies it; a kind that is not there is the ops'.
        covers: by a layer's name in the checkpoint and its kind, whether it is stored in the quantization's form;
            None: every layer is, or all are plain, for the quantization to round.
        experts: what layers of routed experts are made by; None where the card's operations have none.
        adapters: what adapts layers for single requests; None for nothing.
        latent_attention: gives layers of kind "mla" theirs; None where the description has none of them.
        cross_attention: gives the decoder's layer of an index, with the scale of scores, its view of the encoder.
        state: gives the layer of an index its states; None where the description has no layers of kind "state".
        stage: which of the layers are this worker's.
        target: for a draft model, the model that it drafts for, loaded; else None.
        shares: of "embed" and "head", what a draft model takes from the target (`engine.modeling.Decoder` has them by
            these names) in place of its own, which its checkpoint may hold all the same.
        lends: of the same, what draft models take from this one: also the last of several stages has its embedding.
    """

    description: ModelDescription
    ops: Ops
    attention: AttentionFactory
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    tp_rank: int = 0
    tp_size: int = 1
    group: Group | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    quantization: Mapping[str, Quantization] = field(default_factory=dict)
    covers: Callable[[str, str], bool] | None = None
    experts: Experts | None = None
    adapters: Adapters | None = None
    latent_attention: LatentAttentionFactory | None = None
    cross_attention: Callable[[int, float], PagedCrossAttention] | None = None
    state: Callable[[int], StateSite] | None = None
    stage: Stage = field(default_factory=Stage)
    target: Model | None = None
    shares: frozenset[str] = frozenset()
    lends: frozenset[str] = frozenset()


class Model(Protocol):
    """An architecture at work. Built with a `ModelContext`."""

    def __init__(self, context: ModelContext) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take (name, tensor) pairs as the checkpoint streams them; cut this rank's part, cast and place it; then pack.

        Raises CheckpointError naming a tensor that is missing, unexpected, there twice, or of the wrong shape.
        """

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor | None:
        """The final, normed hidden states [T, H]. None where the context's stage is not the last: what the next one
        goes on with is in `state`.

        A state that brings `hidden` comes from another stage of the walk, and is not embedded again; what it brought
        besides, but for the tensors of `state_sizes`, is not changed in place.
        """

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the first layer reads of vectors [n, hidden_size] that a prompt brings in place of tokens at positions
        int64 [n], [n, hidden_size]: as transformers takes `inputs_embeds`. Called where the card `takes_embeds`."""

    def encode(self, inputs: torch.Tensor) -> None:
        """Compute the encoder over one input, `engine.types.request.EncoderInput.data`, on the device, and leave each
        layer's keys and values with its `PagedCrossAttention`. Called between steps, and only where the description has
        an encoder, whose own layers have the attention of kind "encoder" that the factory gives them."""

    def state_sizes(self) -> Mapping[str, int]:
        """What the next stage needs of a state: for each tensor, [T, size] in the model's dtype, its size. Called only
        where there are several stages, as "stages" of `ModelFeature` says."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, vocab_size], in the model's dtype: the same on every rank, bit by bit.

        Not called where the description says that the model does not generate.
        """

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """The classification head: hidden [R, H], of the token that the description's pooler names (of any, where it
        has `token_labels`) -> [R, num_labels], in the model's dtype. Called only where the description has labels."""

    def num_parameters(self) -> int:
        """Elements of the weights on this rank; tied ones counted once."""

    def weight_bytes(self) -> int:
        """Memory of the weights on this rank, with those that are quantised as they are packed."""

"""What the cards of encoder-decoder models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from engine.interfaces.model import ModelCard, ModelFeature, ModelNeed
from engine.types.errors import EngineError
from engine.types.model import EncoderForm, KVSpec, ModelDescription
from engine_kit.model_config import architecture, bad_key, integer, stored_dtype, token_ids, unsupported_ranks


class EncoderDecoderCard(ModelCard):
    """Base of their cards.

    Attributes:
        defaults: of the architecture's config class: config.json need not have these keys.
        heads, encoder_layers, decoder_layers: the keys of these numbers.
        positions: that of the most tokens, of either side.
        activation: the key of the activation; `activations`: its values, and what the body's layers call them.
        foreign: keys that change the computation in a way that the body does not have: with the values that do not.
        start: the key of the id that the decoder begins with, where config.json has no `decoder_start_token_id`.
    """

    framework = "torch"
    quantized = frozenset({"linear", "head"})
    captured_by = frozenset()
    defaults: ClassVar[Mapping[str, Any]] = {}
    heads: ClassVar[str] = "decoder_attention_heads"
    encoder_layers: ClassVar[str] = "encoder_layers"
    decoder_layers: ClassVar[str] = "decoder_layers"
    positions: ClassVar[str] = "max_position_embeddings"
    activation: ClassVar[str] = "activation_function"
    activations: ClassVar[Mapping[str, str]] = {}
    foreign: ClassVar[Mapping[str, Any]] = {}
    start: ClassVar[str] = "eos_token_id"

    if TYPE_CHECKING:  # mypy takes a class that nobody may make objects of for a function, without class methods

        def __new__(cls) -> Self: ...

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what it leaves out."""
        return {**cls.defaults, **{key: value for key, value in config.items() if value is not None}}

    @classmethod
    def head_size(cls, config: dict[str, Any]) -> int:
        """Elements of one head. Raises CheckpointError where they do not divide the model."""
        size, heads = integer(config, "d_model"), integer(config, cls.heads)
        if size % heads:
            raise bad_key(config, cls.heads, f"{size} elements of d_model do not divide over {heads} heads")
        return size // heads

    @classmethod
    def beginning(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """What the decoder begins with, where generation_config.json does not say."""
        first = token_ids(config, "decoder_start_token_id") or token_ids(config, cls.start)
        return (*first[:1], *token_ids(config, "forced_bos_token_id")[:1])

    @classmethod
    def encoder(cls, config: dict[str, Any]) -> EncoderForm:
        """What the encoder reads."""
        return EncoderForm(max_tokens=integer(config, cls.positions), decoder_prompt=cls.beginning(config))

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says. A decoder's layer has two sites, its own and its view
        of the encoder; the encoder's layers follow, counted on."""
        given, config = config, cls.filled(config)
        heads, head_size = integer(config, cls.heads), cls.head_size(config)
        layers, encoders = integer(config, cls.decoder_layers), integer(config, cls.encoder_layers)
        places = [(kind, layer) for layer in range(layers) for kind in ("full", "cross")]
        places += [("encoder", layers + layer) for layer in range(encoders)]
        bos = token_ids(config, "bos_token_id")
        return ModelDescription(
            architecture=architecture(config),
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "d_model"),
            num_layers=layers,
            num_q_heads=heads,
            max_model_len=integer(config, cls.positions),
            kv_specs=tuple(
                KVSpec(kind=kind, num_kv_heads=heads, head_size=head_size, layer=layer)  # type: ignore[arg-type]
                for kind, layer in places
            ),
            eos_token_ids=token_ids(config, "eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            config=dict(given),
            encoder=cls.encoder(config),
            **cls.features(config),
        )

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Further attributes of the description."""
        return {}

    @classmethod
    def widths(cls, config: dict[str, Any]) -> dict[str, int]:
        """By key, sizes that ranks divide."""
        return {key: integer(config, key) for key in ("encoder_ffn_dim", "decoder_ffn_dim")}

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """A stage would need what the encoder made, and the encoder's layers are nobody's to look on at."""
        return frozenset({"listeners", "stages"})

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config, reasons = cls.filled(need.config), []
        act = config.get(cls.activation)
        if act is not None and not (isinstance(act, str) and act in cls.activations):
            reasons.append(f"{cls.activation} {act!r} is none of {', '.join(cls.activations)}")
        for key, neutral in cls.foreign.items():
            if config.get(key, neutral) != neutral:
                reasons.append(f"the config sets {key} to {config[key]!r}, which the model's body does not have")
        try:
            reasons += unsupported_ranks(cls.describe(need.config), need.parallel.tp, **cls.widths(config))
            reasons += cls.more_unsupported(config)
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Further reasons; `config` is filled."""
        return []

"""The cards of Mamba and Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine_kit.model_config import architecture, bad_key, flag, integer, number, stored_dtype, token_ids
from engine_states.forms import Mamba1Form, Mamba2Form
from engine_states.ops_states.card import OPERATIONS

_LENGTH = 1 << 15
"""Positions of a model whose config says none: its states have no end, but tables of tokens do."""


class MambaCard(ModelCard):
    """Base of the cards of models of mixers alone."""

    framework = "torch"
    takes_embeds = True
    quantized = frozenset({"linear", "head"})
    operations = frozenset(MODEL_OPERATIONS) | OPERATIONS

    if TYPE_CHECKING:  # mypy takes a class that nobody may make objects of for a function, without class methods

        def __new__(cls) -> Self: ...

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> Mamba1Form | Mamba2Form:
        """Of every mixer. Raises CheckpointError where a key is missing or makes no sense."""
        raise NotImplementedError

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As `ModelCard.describe`."""
        layers, spec = integer(config, "num_hidden_layers"), cls.form(config).spec("wide")
        bos = token_ids(config, "bos_token_id")
        return ModelDescription(
            architecture=architecture(config),
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            num_layers=layers,
            num_q_heads=0,
            max_model_len=integer(config, "max_position_embeddings", _LENGTH),
            kv_specs=(spec,) * layers,
            eos_token_ids=token_ids(config, "eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            config=dict(config),
        )

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config, reasons = need.config, []
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            reasons.append(f"hidden_act {config['hidden_act']!r} is not silu")
        try:
            reasons += cls.form(config).unsupported_ranks(need.parallel.tp)
        except EngineError as error:
            reasons.append(str(error))
        return reasons


class Mamba(MambaCard):
    """MambaForCausalLM (Gu, Dao 2023)."""

    body = "engine_models.mamba:MambaModel"

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> Mamba1Form:
        size = integer(config, "hidden_size")
        rank = config.get("time_step_rank", "auto")
        return Mamba1Form(
            hidden_size=size,
            inner=integer(config, "intermediate_size", int(number(config, "expand", 2) * size)),
            state=integer(config, "state_size", 16),
            kernel=integer(config, "conv_kernel", 4, low=2),
            dt_rank=-(-size // 16) if rank == "auto" else integer(config, "time_step_rank"),
            bias=flag(config, "use_bias", False),
            conv_bias=flag(config, "use_conv_bias", True),
        )


class Mamba2(MambaCard):
    """Mamba2ForCausalLM (Dao, Gu 2024)."""

    body = "engine_models.mamba:Mamba2Model"

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> Mamba2Form:
        size = integer(config, "hidden_size")
        form = Mamba2Form(
            hidden_size=size,
            heads=integer(config, "num_heads", 128),
            head_size=integer(config, "head_dim", 64),
            groups=integer(config, "n_groups", 8),
            state=integer(config, "state_size", 128),
            kernel=integer(config, "conv_kernel", 4, low=2),
            eps=number(config, "layer_norm_epsilon", 1e-5),
            dt_limit=bounds(config, "time_step_limit"),
            bias=flag(config, "use_bias", False),
            conv_bias=flag(config, "use_conv_bias", True),
        )
        if form.inner != int(number(config, "expand", 2) * size) or form.heads % form.groups:
            heads = f"{form.heads} heads of head_dim = {form.head_size}"
            found = f"{heads} in n_groups = {form.groups} groups are not expand * hidden_size"
            raise bad_key(config, "num_heads", found)
        return form


def bounds(config: Mapping[str, Any], key: str) -> tuple[float, float]:
    """Two numbers, as transformers writes them: infinity is {"__float__": "Infinity"}."""
    given = config.get(key) or (0.0, "inf")
    try:
        low, high = (float(each["__float__"] if isinstance(each, Mapping) else each) for each in given)
    except (TypeError, ValueError, KeyError) as error:
        raise bad_key(config, key, f"{given!r} is no pair of bounds") from error
    return low, high

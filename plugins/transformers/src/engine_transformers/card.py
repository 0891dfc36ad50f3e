"""The card of the models that transformers has: what config.json says in its usual keys. Without torch or transformers.

What transformers alone knows (a config class's defaults, what each layer asks of attention) is checked by the body,
when the model is built.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from engine.interfaces.model import ModelCard, ModelNeed
from engine.types.errors import EngineError, UnsupportedModelError
from engine.types.model import KVSpec, ModelDescription
from engine_kit.model_config import (
    ROPE_TYPES,
    architecture,
    bad_key,
    embedder,
    head_dim,
    integer,
    kv_heads,
    number,
    read_rope,
    rope_parameters,
    scaled_length,
    stored_dtype,
    token_ids,
    unsupported_ranks,
)

LIBRARY = "transformers"
NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "model_max_length"),
    "sliding_window": ("sliding_window_size", "attention_window_size"),
}
"""A key -> how some architectures call it."""
FULL, SLIDING = "full_attention", "sliding_attention"
_LATENT = "kv_lora_rank"
_OTHERS = ("vision_config", "audio_config", "text_config", "encoder", "decoder")
"""Keys of configs that are made of several models'."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


class TransformersModel(ModelCard):
    """Serves the architectures of transformers' `AutoModelForCausalLM` whose attention can be replaced, and the bare
    decoders of `AutoModel`, whose last token is pooled."""

    framework = "torch"
    operations = frozenset({"linear", "embedding", "embedding_part"})
    quantized = frozenset({"linear", "head", "embedding"})
    captured_by = frozenset()
    batch_invariant = False
    walks = False
    body = "engine_transformers.body:TransformersBody"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """See `ModelCard.describe`. Raises UnsupportedModelError too, where a key shows a model of a kind that is not
        served."""
        asked, usual = f"serve {architecture(config)} by {LIBRARY}", in_usual_words(config)
        if reasons := _kinds_not_served(usual):
            raise UnsupportedModelError(asked, "; ".join(reasons), "install a driver that is made for it")
        layers, heads, size = integer(usual, "num_hidden_layers"), kv_heads(usual), head_dim(usual)
        bos = token_ids(usual, "bos_token_id")
        generates = not is_base(architecture(usual))
        description = ModelDescription(
            architecture=architecture(usual),
            dtype=stored_dtype(usual),
            vocab_size=integer(usual, "vocab_size"),
            hidden_size=integer(usual, "hidden_size"),
            num_layers=layers,
            num_q_heads=integer(usual, "num_attention_heads"),
            max_model_len=_length(usual, size),
            kv_specs=tuple(
                KVSpec(
                    kind="full" if window is None else "sliding",
                    num_kv_heads=heads,
                    head_size=size,
                    sliding_window=window,
                )
                for window in _windows(usual, layers)
            ),
            soft_cap=None if usual.get("attn_logit_softcapping") is None else number(usual, "attn_logit_softcapping"),
            eos_token_ids=token_ids(usual, "eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            config=dict(config),
            generates=generates,
        )
        return description if generates else msgspec.structs.replace(description, pooler=embedder(usual, "last"))

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """That transformers is not installed or has no such decoder, that the model is of a kind that is not served, or
        that it cannot be divided over so many ranks."""
        if reasons := _not_in_the_library(need.architecture, need.config):
            return reasons
        try:
            model, size = cls.describe(need.config), need.parallel.tp
        except UnsupportedModelError as error:
            return [error.found]
        except EngineError as error:
            return [str(error)]
        uneven = {spec.num_kv_heads for spec in model.kv_specs if spec.num_kv_heads % size}
        few = [f"{heads} KV heads are not divided over {size} ranks, and not copied" for heads in sorted(uneven)]
        if size > 1 and any(need.config.get(key) for key in _EXPERTS):
            few.append("it has routed experts, which are not divided over ranks here")
        return unsupported_ranks(model, size) + few


def in_usual_words(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the usual key for each of `NAMES` that it calls otherwise."""
    found = dict(config)
    for usual, others in NAMES.items():
        value = next((config[other] for other in others if config.get(other) is not None), None)
        if found.get(usual) is None and value is not None:
            found[usual] = value
    if found.get("multi_query") is True:
        found["num_key_value_heads"] = 1
    return found


def is_base(name: str) -> bool:
    """Whether an architecture is a bare model, without a head."""
    return name.endswith("Model") and not name.endswith("LMHeadModel")


def _kinds_not_served(config: Mapping[str, Any]) -> list[str]:
    reasons = []
    if config.get("is_encoder_decoder"):
        reasons.append("it is an encoder and a decoder, and this driver serves decoders alone")
    reasons += [
        f"its config has {key}: it is made of several models, and this driver serves one decoder"
        for key in _OTHERS
        if isinstance(config.get(key), Mapping)
    ]
    if config.get(_LATENT) is not None:
        reasons.append(f"its config has {_LATENT}: its cache holds latent vectors, this driver's keys and values")
    types = config.get("layer_types") or config.get("layers_block_type")
    foreign = {str(kind) for kind in types if kind not in (FULL, SLIDING)} if isinstance(types, (list, tuple)) else ()
    reasons += [
        f"it has layers of type {kind!r}, and this driver serves {FULL!r} and {SLIDING!r}" for kind in sorted(foreign)
    ]
    return reasons


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window: by `layer_types`; without them every layer has the window that there is, if
    `use_sliding_window` does not say otherwise."""
    types = config.get("layer_types")
    if types is None:
        uses = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
        return (integer(config, "sliding_window") if uses else None,) * layers
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise bad_key(config, "layer_types", f"it does not name a type for each of the {layers} layers")
    return tuple(integer(config, "sliding_window") if kind == SLIDING else None for kind in types)


def _length(config: Mapping[str, Any], head_size: int) -> int:
    """The positions that are served. Where transformers would go over to other rotary positions for a longer text
    ("dynamic", "longrope"), whose cached keys do not go with the others, those before that."""
    stated = integer(config, "max_position_embeddings")
    if not any(config.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        return stated
    rope = rope_parameters(config)
    if rope["rope_type"] not in ROPE_TYPES or any(isinstance(part, Mapping) for part in rope.values()):
        return stated  # transformers knows more kinds, and several in one model
    read = read_rope(config, head_size)
    return min(stated, read.original_max_position) if read.rope_type == "longrope" else scaled_length(read)


def _not_in_the_library(name: str, config: Mapping[str, Any]) -> list[str]:
    """Why transformers does not have it, as its table of names says, which is read and not imported."""
    try:
        said = f"{LIBRARY} {version(LIBRARY)}"
        found = importlib.util.find_spec(LIBRARY)
    except PackageNotFoundError:
        found = None
    if found is None or found.origin is None:
        return [f"{LIBRARY} is not installed"]
    table = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    source = table.read_text(encoding="utf-8") if table.is_file() else ""
    decoder = name.removesuffix("Model") + "ForCausalLM" if is_base(name) else name
    listed = re.search(rf"^{_CAUSAL}\b.*?^\)", source, re.DOTALL | re.MULTILINE)
    if listed is None or f'"{decoder}"' in listed[0]:
        return []  # where the table is not to be found, the body looks
    remote = "; the code that its auto_map names is not run" if config.get("auto_map") else ""
    return [f"{said} has no decoder {decoder!r}{remote}"]

"""What the metadata of a file says about the model, in the form of config.json, and what its tensors are called there.

llama.cpp's names and its ways to store a model are undone here: each architecture says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.types.errors import CheckpointError, UnsupportedModelError
from engine_gguf.file import read_file
from engine_gguf.parts import GGUFModel
from engine_kit.ggml_blocks import METHOD, TYPES

Config = dict[str, Any]
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)\Z")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_END_TOKENS = ("eos", "eot", "eom")
_ENDS_BY_NAME = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
"""Tokens that end a turn or a text whatever else the file says, as in llama.cpp: many files name one end of several."""


def _experts(block: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    named = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return {"ffn_gate_inp": f"{block}.{router}", **{ours: f"{block}.experts.*.{n}" for ours, n in named.items()}}


class Keys:
    """The keys of a file's metadata that its architecture has.

    Args:
        model: the file.
        prefix: the architecture, as the file names it.
    """

    def __init__(self, model: GGUFModel, prefix: str) -> None:
        self.model = model
        self.path: Path = model.first.path
        self._metadata = model.first.metadata
        self._prefix = prefix

    def bad(self, key: str, found: str) -> CheckpointError:
        """The error for one of them."""
        return CheckpointError(f"read '{self._prefix}.{key}' of {self.path}", found, "convert the model again")

    def get(self, key: str) -> Any:
        """The value; None where there is none."""
        return self._metadata.get(f"{self._prefix}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0; of an array the one that all layers have."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None and default is not None:
            return default
        if value is None:
            raise self.bad(key, "it is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.bad(key, f"it is {value!r:.80}, not one whole number for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.bad(key, "it is missing" if value is None else f"it is {value!r:.80}, no positive number")
        return float(value)

    def has(self, tensor: str) -> bool:
        """Whether the first layer has a tensor, e.g. "attn_q.bias"."""
        return f"blk.0.{tensor}" in self.model.tensors

    def head_size(self) -> int:
        """Elements of a head."""
        heads = self.whole("attention.head_count")
        if not heads:
            raise self.bad("attention.head_count", "it is 0")
        size = self.whole("attention.key_length", self.whole("embedding_length") // heads)
        if not size:
            raise self.bad("attention.key_length", "the size of a head is 0")
        return size

    def factors(self, tensor: str) -> list[float] | None:
        """A tensor of a positive number for each frequency, which is read; None where there is none."""
        found = self.model.tensors.get(tensor)
        if found is None:
            return None
        if found.type != "F32":
            raise CheckpointError(f"read {tensor} of {found.file}", f"it is {found.type}, not F32", "convert it again")
        with open(found.file, "rb") as file:
            values = np.fromfile(file, "<f4", found.size // 4, offset=found.start)
        count = self.whole("rope.dimension_count", self.head_size()) // 2
        if found.shape != (count,) or not (np.isfinite(values).all() and (values > 0).all()):
            least, most = values.min(), values.max()
            raise CheckpointError(
                f"read {tensor} of {found.file}",
                f"it is {list(found.shape)} of numbers from {least} to {most}, not {count} positive ones",
                "convert the model again",
            )
        return [float(value) for value in values]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores an architecture's models.

    Attributes:
        name: config.json's.
        config: what is beside the common keys.
        names: of tensors of layers; "*" is the expert's number.
        neighbours: rows of queries and keys stand so that neighbours are rotated together, not halves.
        offset_norms: the weights of norms are 1 more than config.json's model has them.
    """

    name: str
    config: Callable[[Keys], Config]
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(_NAMES))
    neighbours: bool = False
    offset_norms: bool = False

    def tensor_name(self, name: str) -> str:
        """As the model asks for it; the file's own where it has no such thing."""
        stem, _, kind = name.rpartition(".")
        if stem in _ENDS:
            return f"{_ENDS[stem]}.{kind}"
        match = _BLOCK.match(name)
        if match is None or match[2] not in self.names:
            return name
        return f"model.layers.{match[1]}.{self.names[match[2]]}.{match[3]}"


# -- what each adds ----------------------------------------------------------------------------------------------------
def _llama(keys: Keys) -> Config:
    biases = [keys.has(f"attn_{part}.bias") for part in ("q", "k", "v", "output")]
    if len(set(biases)) > 1:
        raise UnsupportedModelError(
            f"open {keys.path}", "some of its projections of attention have biases, and some have none", "use another"
        )
    window = keys.whole("attention.sliding_window", 0)
    more: Config = {"attention_bias": biases[0], "mlp_bias": keys.has("ffn_gate.bias")}
    return more | ({"sliding_window": window} if window else {})


def _qwen3(keys: Keys) -> Config:
    return {"attention_bias": keys.has("attn_q.bias")}


def _gemma2(keys: Keys) -> Config:
    return _scale(keys, 46) | {
        "sliding_window": keys.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Config:
    pattern = keys.get("attention.sliding_window_pattern")
    cap = keys.get("final_logit_softcapping")
    cap = None if cap is None else keys.number("final_logit_softcapping")
    more: Config = {"sliding_window": keys.whole("attention.sliding_window"), "final_logit_softcapping": cap}
    if isinstance(pattern, np.ndarray):
        more["layer_types"] = [f"{'sliding' if windowed else 'full'}_attention" for windowed in pattern]
    else:
        more["sliding_window_pattern"] = keys.whole("attention.sliding_window_pattern", 6) or 6
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    ropes = {"full_attention": _rope(keys, 1e6), "sliding_attention": local}
    return _scale(keys, 62) | more | {"rope_parameters": ropes}


def _scale(keys: Keys, largest: int) -> Config:
    """Of scores: by the size of a head, but in the largest model of each generation, which llama.cpp too knows by its
    layers."""
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    size = hidden // heads if keys.whole("block_count") == largest else keys.head_size()
    return {"query_pre_attn_scalar": size, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma(keys: Keys) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _phi3(keys: Keys) -> Config:
    more: Config = {}
    if window := keys.whole("attention.sliding_window", 0):
        more["sliding_window"] = window
    long, short = (keys.factors(f"rope_factors_{which}.weight") for which in ("long", "short"))
    if (long is None) != (short is None):
        raise CheckpointError(
            f"open {keys.path}",
            "of rope_factors_long.weight and rope_factors_short.weight it has one alone",
            "fetch all of its parts, or convert the model again",
        )
    if long and short:
        rope = _rope(keys, 10000.0) | {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        if keys.get("rope.scaling.attn_factor") is not None:
            rope["attention_factor"] = keys.number("rope.scaling.attn_factor")
        more |= {
            "rope_parameters": rope,
            "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
        }
    return more


def _mixtral(keys: Keys) -> Config:
    return {
        "num_local_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
    }


def _qwen3_moe(keys: Keys) -> Config:
    return _qwen3(keys) | {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _nothing(keys: Keys) -> Config:
    return {}


_LLAMA = Architecture("LlamaForCausalLM", _llama, neighbours=True)
_ARCHITECTURES = {
    "qwen2": Architecture("Qwen2ForCausalLM", _nothing),
    "qwen3": Architecture("Qwen3ForCausalLM", _qwen3, _NAMES | _HEAD_NORMS),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", _qwen3_moe,
        _NAMES | _HEAD_NORMS | _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma": Architecture("GemmaForCausalLM", _gemma, offset_norms=True),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, _NAMES | _SANDWICH, offset_norms=True),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, _NAMES | _SANDWICH | _HEAD_NORMS, offset_norms=True),
    "phi3": Architecture(
        "Phi3ForCausalLM", _phi3, _NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
}  # fmt: skip
_MISTRAL = Architecture("MistralForCausalLM", _llama, neighbours=True)
_MIXTRAL = Architecture(
    "MixtralForCausalLM", _mixtral, _NAMES | _experts("block_sparse_moe", "gate", "w1", "w3", "w2"), neighbours=True
)
SERVED = ("llama", *_ARCHITECTURES)


def architecture_of(model: GGUFModel) -> tuple[Architecture, Keys]:
    """What a file's model is.

    Raises UnsupportedModelError for an architecture that is not served, CheckpointError where none is named.
    """
    metadata, path = model.first.metadata, model.first.path
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"open {path}", "it names no architecture (general.architecture)", "convert it again")
    keys = Keys(model, name)
    if name == "llama":
        if keys.whole("expert_count", 0):
            return _MIXTRAL, keys
        return (_MISTRAL if keys.whole("attention.sliding_window", 0) else _LLAMA), keys
    if name not in _ARCHITECTURES:
        kind = metadata.get("general.type", "model")
        found = f"its architecture is {name!r}" + ("" if kind == "model" else f", and it is of type {kind!r}")
        raise UnsupportedModelError(
            f"open {path}", f"{found}; of GGUF files served are {', '.join(SERVED)}", "use a checkpoint in safetensors"
        )
    return _ARCHITECTURES[name], keys


def _rope(keys: Keys, theta: float) -> Config:
    """Rotary parameters in transformers' form."""
    rope: Config = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", theta)}
    kind = "none" if keys.get("rope.scaling.type") is None else keys.get("rope.scaling.type")
    if not isinstance(kind, str):
        raise keys.bad("rope.scaling.type", f"it is {kind!r:.80}, no text")
    factors = keys.factors("rope_freqs.weight")
    if factors is not None:
        # Llama 3.1's way to stretch, worked out for each frequency.
        original = keys.whole("context_length")
        both = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return rope | both | {"rope_type": "longrope", "original_max_position_embeddings": original}
    if kind == "longrope" and "rope_factors_long.weight" not in keys.model.tensors:
        raise CheckpointError(
            f"open {keys.path}",
            "its rotary scaling is longrope, and it has no tensor rope_factors_long.weight",
            "fetch all of its parts, or convert the model again",
        )
    if kind in ("none", "longrope"):  # of which the factors tell
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"open {keys.path}", f"its rotary scaling is {kind!r}; served are linear, yarn and longrope", "use another"
        )
    rope |= {"rope_type": "yarn", "factor": keys.number("rope.scaling.factor")}
    rope["original_max_position_embeddings"] = keys.whole("rope.scaling.original_context_length")
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.get(f"rope.scaling.{theirs}") is not None:
            rope[ours] = keys.number(f"rope.scaling.{theirs}")
    return rope


def config_of(model: GGUFModel) -> Config:
    """config.json of a file's model.

    Raises as `architecture_of`, and CheckpointError naming a key or a tensor that is missing or makes no sense.
    """
    architecture, keys = architecture_of(model)
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        found = "it has no matrix token_embd.weight"
        raise CheckpointError(f"open {keys.path}", found, "fetch all of its parts, or convert the model again")
    size = keys.head_size()
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    if not keys.whole("attention.head_count_kv", heads):
        raise keys.bad("attention.head_count_kv", "it is 0")
    if keys.whole("attention.value_length", size) != size:
        raise keys.bad("attention.value_length", f"it is not attention.key_length, {size}")
    types = stored_types(architecture, model)
    in_blocks = any(TYPES[kind].dtype not in ("float32", "bfloat16") for kind in types.values())
    rotated = keys.whole("rope.dimension_count", size)
    if not rotated:
        raise keys.bad("rope.dimension_count", "it is 0")
    config: Config = {
        "architectures": [architecture.name],
        "dtype": _dtype(types),
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "rope_parameters": _rope(keys, 10000.0),
        "tie_word_embeddings": _HEAD not in model.tensors,
        "bos_token_id": _token(keys, "bos"),
        "eos_token_id": _token(keys, "eos"),
    }
    config |= architecture.config(keys)
    if rotated != size:
        ropes = config["rope_parameters"]
        for one in ropes.values() if "full_attention" in ropes else [ropes]:
            one["partial_rotary_factor"] = rotated / size
    if in_blocks:
        config["quantization_config"] = {"quant_method": METHOD, "types": types}
    return config


def _token(keys: Keys, end: str) -> int | None:
    key = f"tokenizer.ggml.{end}_token_id"
    token = keys.model.first.metadata.get(key)
    if token is not None and (isinstance(token, bool) or not isinstance(token, int)):
        raise CheckpointError(
            f"read '{key}' of {keys.path}", f"it is {token!r:.80}, no token", "convert the model again"
        )
    return token


def stored_types(architecture: Architecture, model: GGUFModel) -> dict[str, str]:
    """The type of each matrix that is computed with as it is stored, by the name of its layer."""
    types = {}
    for name, tensor in model.tensors.items():
        layer = architecture.tensor_name(name).removesuffix(".weight")
        if stays(layer):
            types[layer] = tensor.type
    return types


def stays(layer: str) -> bool:
    """Whether a layer of this name is one whose weights are computed with as they are stored: a projection, the head
    or the embedding; not a norm or a router."""
    return layer in (_ENDS["token_embd"], _ENDS["output"]) or layer.endswith(("_proj", ".w1", ".w2", ".w3"))


def _dtype(types: Mapping[str, str]) -> str:
    found = {TYPES[kind].dtype for kind in types.values()}
    return found.pop() if len(found) == 1 and "uint8" not in found else "bfloat16"


def generation_of(model: GGUFModel) -> Config:
    """generation_config.json of a file's model: where a sequence ends, and how the file wants it to be sampled."""
    metadata, key = model.first.metadata, "tokenizer.ggml.tokens"
    found: list[Any] = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS]
    tokens = read_file(model.first.path, lambda one: one == key, tensors=False).metadata.get(key, [])
    if isinstance(tokens, list):
        found += [tokens.index(name) for name in _ENDS_BY_NAME if name in tokens]
    ends = list(dict.fromkeys(token for token in found if isinstance(token, int)))
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
    sampling = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    config: Config = {key: value for key, value in sampling.items() if isinstance(value, (int, float))}
    return config | ({"eos_token_id": ends} if ends else {})

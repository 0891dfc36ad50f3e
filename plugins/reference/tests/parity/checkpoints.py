"""Tiny random checkpoints, made by transformers at test time, with a byte-level tokenizer beside the weights.

`initializer_range=0.2` keeps the logits of a random model far enough apart that greedy tokens are decided by the
mathematics and not by the last bit.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LATENT_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MAX_POSITION = 256
EOS = "<eos>"
VOCAB_SIZE = 272
"""256 bytes, the end of sequence, and some ids that no text has."""

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    # DeepSeek's: what is not 1 of the first goes into cosines and sines, the second into the scale of scores.
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
}


def make_checkpoint(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    rope: str = "default",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    dtype: str = "float32",
    sliding: int | None = None,
    tie: bool = False,
    shards: int = 1,
    layers: int = 2,
    hidden: int | None = None,
    bias: bool = False,
    seed: int = 0,
    **more: Any,
) -> Path:
    """Save a random checkpoint of `architecture` in `folder`.

    Args:
        rope: one of `ROPES`.
        sliding: the window: of every layer (Mistral), or of every second one (Qwen2, Qwen3).
        tie: the embedding and the head share a matrix.
        shards: at least so many files.
        hidden: hidden size; None: 16 for each head.
        bias: `attention_bias` (and `mlp_bias`) where the architecture has a choice.
        more: further keys of the config.
    """
    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    features: dict[str, Any] = {"head_dim": head_dim}
    if architecture == "LlamaForCausalLM":
        features |= {"attention_bias": bias, "mlp_bias": bias}
    elif architecture in LATENT_ARCHITECTURES:
        kv_heads = heads
        features = {
            "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
            "attention_bias": bias, "first_k_dense_replace": layers,
        }  # fmt: skip
        features |= {"mlp_bias": bias} if architecture == "DeepseekV2ForCausalLM" else {}
    elif architecture == "MistralForCausalLM":
        features |= {"sliding_window": sliding}
    else:
        kinds = ["sliding_attention" if sliding and index % 2 else "full_attention" for index in range(layers)]
        features |= {"use_sliding_window": bool(sliding), "sliding_window": sliding, "layer_types": kinds}
        if architecture == "Qwen3ForCausalLM":
            features |= {"attention_bias": bias}
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden or 16 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10000.0, **ROPES[rope]},
        initializer_range=0.2,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
        **{"intermediate_size": 80} | features | more,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, where a mistake would not show
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=2 * size if shards == 1 else size // shards)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: byte b's symbol has some id under 256, `<eos>` is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, pad_token=EOS)


class Checkpoints:
    """Makes checkpoints on demand, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}
        self._numbers = itertools.count()

    def __call__(self, architecture: str = "LlamaForCausalLM", **features: Any) -> Path:
        """The folder of a checkpoint with these arguments of `make_checkpoint`."""
        key = repr((architecture, sorted(features.items())))
        if key not in self._made:
            self._made[key] = make_checkpoint(self._folder / f"model-{next(self._numbers)}", architecture, **features)
        return self._made[key]

    def drop(self, folder: Path) -> None:
        """Delete a checkpoint that no other test needs."""
        self._made = {key: made for key, made in self._made.items() if made != folder}
        shutil.rmtree(folder)


def load_oracle(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint, computing in `dtype`.

    In float64 its norms and rotary tables, which are written for float32, are computed in float64 too.
    """
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    # "eager": its grouped product of experts has no float64.
    oracle = getattr(transformers, kind).from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    if dtype == torch.float64:
        for module in oracle.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = _norm(module)
        oracle.model.rotary_emb.forward = _rotary(oracle.config)
        if kind == "DeepseekV2ForCausalLM":  # turns its pairs as complex numbers, in float32
            oracle.model.rotary_emb.forward = _turns(oracle.config)
            sys.modules[type(oracle).__module__].apply_rotary_emb = _turned  # type: ignore[attr-defined]
    return oracle


def _norm(module: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon) * module.weight

    return forward


def _rotary(config: Any) -> Any:
    from engine_kit.model_config import read_rope
    from engine_kit.rotary import cos_sin_table

    rope = read_rope(config.to_dict(), config.head_dim)
    table = cos_sin_table(rope, config.max_position_embeddings, torch.float64)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = table[position_ids].chunk(2, dim=-1)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    return forward


def _turns(config: Any) -> Any:
    whole = _rotary(config)

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        cos, sin = (half[..., : half.shape[-1] // 2].contiguous() for half in whole(x, position_ids))
        return torch.complex(cos, sin)

    return forward


def _turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' function, in the precision of its inputs."""
    wide = (torch.view_as_complex(x.to(turns.real.dtype).unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    rotated_q, rotated_k = (torch.view_as_real(x * turns.unsqueeze(1)).flatten(3) for x in wide)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)

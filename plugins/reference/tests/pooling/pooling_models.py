"""Tiny random checkpoints of models that pool, and transformers' answers to compare with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checkpoints import _norm, _rotary, make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

DECODERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
ENCODERS = ("Bert", "Roberta", "XLMRoberta")
VOCAB = 272
POSITIONS = 64
PAD = {"Bert": 0, "Roberta": 1, "XLMRoberta": 1}


class PoolingCheckpoints:
    """Makes checkpoints on demand, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = {}
        self._numbers = itertools.count()

    def __call__(self, architecture: str, **features: Any) -> Path:
        """The folder of a checkpoint with this architecture string."""
        key = repr((architecture, sorted(features.items())))
        if key not in self._made:
            folder = self._folder / f"model-{next(self._numbers)}"
            make = encoder_checkpoint if architecture.startswith(ENCODERS) else decoder_checkpoint
            make(folder, architecture, **features)
            self._made[key] = folder
        return self._made[key]


def decoder_checkpoint(folder: Path, architecture: str, **features: Any) -> None:
    """...ForCausalLM as the parity tests make it; ...Model and ...ForSequenceClassification around such a one."""
    family = architecture.removesuffix("ForSequenceClassification").removesuffix("ForCausalLM").removesuffix("Model")
    labels = {key: features.pop(key) for key in ("num_labels", "problem_type") if key in features}
    if family == "Mistral":
        features.setdefault("sliding", None)
    make_checkpoint(folder, f"{family}ForCausalLM", **features)
    if architecture.endswith("ForCausalLM"):
        return
    torch.manual_seed(7)
    model = getattr(transformers, architecture).from_pretrained(folder, **labels)
    if labels:
        torch.nn.init.normal_(model.score.weight, std=0.3)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)


def encoder_checkpoint(folder: Path, architecture: str, *, seed: int = 0, **features: Any) -> None:
    """A BERT or RoBERTa with two layers, biases and norms that are not neutral."""
    family = next(name for name in sorted(ENCODERS, key=len, reverse=True) if architecture.startswith(name))
    config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 80,
            "max_position_embeddings": POSITIONS + (0 if family == "Bert" else PAD[family] + 1),
            "type_vocab_size": 2 if family == "Bert" else 1,
            "pad_token_id": PAD[family],
            "initializer_range": 0.3,
            **features,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)
            elif "LayerNorm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokenizer(types=family == "Bert").save_pretrained(folder)


def tokenizer(types: bool) -> PreTrainedTokenizerFast:
    """Bytes, with <s> before a text and </s> behind it, and between the two of a pair; types as BERT has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    second = 1 if types else 0
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second} </s>:{second}",
        special_tokens=[("<s>", 256), ("</s>", 257)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, cls_token="<s>", sep_token="</s>")


class Oracle:
    """transformers' model of a checkpoint, one prompt at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype, architecture: str | None = None) -> None:
        architecture = architecture or transformers.AutoConfig.from_pretrained(folder).architectures[0]
        self.model = getattr(transformers, architecture).from_pretrained(folder, dtype=dtype).eval()
        if dtype == torch.float64:  # norms and rotary tables are written for float32
            for module in self.model.modules():
                if type(module).__name__.endswith("RMSNorm"):
                    module.forward = _norm(module)
                if hasattr(module, "rotary_emb"):
                    module.rotary_emb.forward = _rotary(self.model.config)

    @torch.inference_mode()
    def states(self, ids: Sequence[int], types: Sequence[int] | None = None) -> np.ndarray:
        """The last hidden states [n, size]."""
        return self.model(**_inputs(ids, types)).last_hidden_state[0].numpy()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], types: Sequence[int] | None = None) -> np.ndarray:
        """The classification head's [labels]."""
        return self.model(**_inputs(ids, types)).logits[0].numpy()


def _inputs(ids: Sequence[int], types: Sequence[int] | None) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if types is not None:
        inputs["token_type_ids"] = torch.tensor([list(types)])
    return inputs


def prompts(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Random ids, none of them the padding id of any family."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 256, n).tolist() for n in lengths]


def unit(x: np.ndarray) -> np.ndarray:
    """Scaled to length 1 over the last dimension."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pooled(states: np.ndarray, kind: str) -> np.ndarray:
    """The definition of each kind of pooling."""
    return {"last": states[-1], "cls": states[0], "mean": states.mean(axis=0)}[kind]

"""Train what drafts for the bundled model:

    python -m engine_drafters.train texts --texts DIR        # the target's own answers, once
    python -m engine_drafters.train eagle3 --texts DIR --minutes 50
    python -m engine_drafters.train medusa --texts DIR --minutes 15
    python -m engine_drafters.train draft --texts DIR --minutes 30
    python -m engine_drafters.train tree --texts DIR --count 16   # of so many drafts, for the shipped Medusa heads

Training ends by writing the head's folder (`--folder`; the shipped one where it is not named). Seeds are fixed; a run
depends on the clock, so two differ by the machine's speed.
"""

import argparse
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine_drafters import heads
from engine_drafters.train.draft_model import Draft
from engine_drafters.train.eagle3 import Eagle3, Eagle3Head
from engine_drafters.train.export import write_folder
from engine_drafters.train.loop import Objective, chosen_tokens, measure, train
from engine_drafters.train.medusa import MedusaHeads, MedusaTraining
from engine_drafters.train.target import Target, batches, make_batch
from engine_drafters.train.texts import SEED, Text, read_texts, write_texts
from engine_drafters.train.tree import grown, right_paths, tokens_per_step
from engine_tiny import model_folder
from engine_tiny.layout import llama_config

LAYERS = (1, 3, 5)
"""Behind these layers of the target the EAGLE-3 head reads."""
DRAFT_VOCAB_SIZE = 1536
"""Tokens that the EAGLE-3 head can say: the ones that the target says most often."""
MEDUSA_HEADS, MEDUSA_LAYERS = 4, 1
DRAFT = {"hidden_size": 192, "layers": 1, "heads": 3, "kv_heads": 1, "intermediate_size": 448}
INTERMEDIATE_SIZE = 704

Made = tuple[Objective, Callable[[Path], None]]
"""What is trained, and how its folder is written."""


def eagle3(target: Target, texts: list[Text]) -> Made:
    """The head in SafeAILab's EAGLE-3 layout, without the embedding, which is the target's."""
    base = target.config
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": base.hidden_size,
        "target_hidden_size": base.hidden_size,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 1,
        "num_attention_heads": base.num_attention_heads,
        "num_key_value_heads": base.num_key_value_heads,
        "head_dim": base.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": base.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": base.max_position_embeddings,
        "vocab_size": base.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
        "torch_dtype": "bfloat16",
    }
    said = chosen_tokens([text.tokens[text.spoken] for text in texts], base.vocab_size, DRAFT_VOCAB_SIZE)
    head = Eagle3Head(config, target.embedding, said)
    objective = Eagle3(target, head, LAYERS, make_batch(texts[:16]))
    return objective, lambda folder: write_folder(folder, config, objective.tensors(), "model.safetensors")


def medusa(target: Target, texts: list[Text]) -> tuple[MedusaTraining, Callable[[Path], None]]:
    """Heads in FasterDecoding's layout, without linears to the vocabulary of their own."""
    base = target.config
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": MEDUSA_HEADS,
        "medusa_num_layers": MEDUSA_LAYERS,
        "base_model_name_or_path": "tiny",
        "hidden_size": base.hidden_size,
        "vocab_size": base.vocab_size,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
    module = MedusaHeads(base.hidden_size, MEDUSA_HEADS, MEDUSA_LAYERS)
    return MedusaTraining(target, module), lambda folder: write_folder(
        folder, config, module.state_dict(), "medusa_lm_head.safetensors"
    )


def draft(target: Target, texts: list[Text]) -> Made:
    """An ordinary Llama folder, but for the tokenizer, which is the target's."""
    config = llama_config(vocab_size=target.config.vocab_size, **DRAFT)
    module = LlamaForCausalLM(LlamaConfig(**(config | {"dtype": "float32", "torch_dtype": None})))

    def write(folder: Path) -> None:
        tensors = {name: tensor for name, tensor in module.state_dict().items() if name != "lm_head.weight"}
        write_folder(folder, config, tensors, "model.safetensors")

    return Draft(target, module), write


KINDS: dict[str, Callable[[Target, list[Text]], Made]] = {"eagle3": eagle3, "medusa": medusa, "draft": draft}


def find_tree(target: Target, texts: list[Text], held_out: list[Text], size: int) -> None:
    """Print a tree for the shipped Medusa heads, and what it gives beside their chain."""
    objective, _ = medusa(target, texts)
    objective.module.load_state_dict(load_file(heads.FOLDER / "medusa" / "medusa_lm_head.safetensors"))
    read = islice(batches(texts, np.random.default_rng(SEED), 3072), 24)
    paths = [path for batch in read for path in right_paths(objective, batch)]
    asked = list(islice(batches(held_out, np.random.default_rng(SEED), 4096), 16))
    for tree in (grown(paths, MEDUSA_HEADS, size), grown(paths, MEDUSA_HEADS, MEDUSA_HEADS)):
        print(
            f"{len(tree)} drafts: {tokens_per_step(objective, asked, tree):.2f} tokens a step: {list(map(list, tree))}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("texts", *KINDS, "tree"))
    parser.add_argument("--texts", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--count", type=int, default=14000, help="of texts to write, or nodes of the tree")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the head is written")
    options = parser.parse_args()
    options.texts.mkdir(parents=True, exist_ok=True)
    if options.what == "texts":
        write_texts(options.texts / "held_out.safetensors", "held_out", 400)
        write_texts(options.texts / "train.safetensors", "train", options.count)
        return
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    texts, held_out = (read_texts(options.texts / f"{split}.safetensors") for split in ("train", "held_out"))
    # float32: a head of this size trains faster so on a CPU than in bf16.
    target = Target(LlamaForCausalLM.from_pretrained(model_folder(), dtype=torch.float32))
    if options.what == "tree":
        find_tree(target, texts, held_out, options.count)
        return
    objective, write = KINDS[options.what](target, texts)
    asked = list(islice(batches(held_out, np.random.default_rng(SEED), 4096), 16))
    print(f"{sum(p.numel() for p in objective.module.parameters() if p.requires_grad) / 1e6:.2f} M parameters")
    rng = np.random.default_rng(SEED)
    train(
        objective, batches(texts, rng, 3072), options.minutes, learning_rate=options.learning_rate,
        report=lambda: f"held out: {measure(objective, asked[:3])}",
    )  # fmt: skip
    print(f"held out: {measure(objective, asked)}", flush=True)
    write(options.folder or heads.FOLDER / options.what)


if __name__ == "__main__":
    main()

"""Writes the checkpoints: seeded random weights in bf16 as safetensors, with a tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.peers.dimensions import Dimensions
from tests.benchmarks.peers.protocol import ADAPTERS, RANK
from tests.benchmarks.peers.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

SEED = 0
DEVIATION = 0.02
FORM = 1
"""Raised with each change of what is written, so that no older folder is taken for a new one."""
DRAFT_LAYERS = 2
"""Of a draft model. They are the target's first ones, as are its embedding and its head."""
FADING = 0.04
"""What the target's other layers add is so much smaller than what a layer adds otherwise: both mostly say the same."""


def draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """One tensor, a function of its name, shape and the seed: norms are 1, all else normal with deviation 0.02."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    own = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
    generator = torch.Generator().manual_seed(own)
    return (torch.randn(shape, generator=generator) * DEVIATION).to(torch.bfloat16)


def write_checkpoint(dimensions: Dimensions, folder: Path, seed: int = SEED, draft: bool = False) -> Path:
    """Write a checkpoint into `folder`, which must not exist. A write that was broken off leaves no such folder.

    draft: with a draft model for it, in the folder `draft` there.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: draw(name, shape, seed) for name, shape in dimensions.shapes().items()}
    if draft:
        fading = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
        for name in fading[2 * DRAFT_LAYERS :]:
            tensors[name] *= FADING
        small = replace(dimensions, name=f"{dimensions.name} draft", num_layers=DRAFT_LAYERS)
        write_checkpoint(small, temporary / "draft", seed)
    save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(dimensions.config(), indent=2))
    write_tokenizer(dimensions.vocab_size, temporary)
    os.replace(temporary, folder)
    return folder


def write_adapters(dimensions: Dimensions, folder: Path, seed: int = SEED) -> Path:
    """Write `ADAPTERS` LoRA adapters of attention's projections and of dense feed-forward layers, as PEFT saves them,
    into `folder`, which must not exist."""
    from safetensors.torch import save_file

    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    shapes = {name: shape for name, shape in dimensions.shapes().items() if name.endswith("_proj.weight")}
    shapes = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if ".experts." not in name}
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    for number in range(ADAPTERS):
        (temporary / str(number)).mkdir(parents=True)
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            for end, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                name = f"base_model.model.{module}.lora_{end}.weight"
                tensors[name] = draw(f"{number} {name}", shape, seed)
        save_file(tensors, temporary / str(number) / "adapter_model.safetensors", {"format": "pt"})
        (temporary / str(number) / "adapter_config.json").write_text(json.dumps(config))
    os.replace(temporary, folder)
    return folder


def checkpoint(
    dimensions: Dimensions, cache: Path, seed: int = SEED, draft: bool = False, adapters: bool = False
) -> Path:
    """The folder of a checkpoint in the cache, written now where it is not there. adapters: with some, in the folder
    `adapters` there."""
    folder = cache / "checkpoints" / f"{dimensions.name}{'-drafted' * draft}-seed{seed}-form{FORM}"
    if not folder.exists():
        write_checkpoint(dimensions, folder, seed, draft)
    if adapters and not (folder / "adapters").exists():
        write_adapters(dimensions, folder / "adapters", seed)
    return folder

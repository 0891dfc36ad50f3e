"""Folders in the layouts in which heads are published, in bf16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], weights: str) -> None:
    """config.json and the file of this name; floating tensors are rounded to bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {n: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(rounded, folder / weights, {"format": "pt"})
    (folder / weights).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

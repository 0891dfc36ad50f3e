"""From a run's state to the model folder: bf16 weights under Hugging Face's names, and the small files."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine_tiny import model_folder
from engine_tiny.layout import generation_config, llama_config, tokenizer_config
from engine_tiny.tokenizer import VOCAB_SIZE
from engine_tiny.train import SIZE


def export(run_dir: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = torch.load(run_dir / "state.pt", weights_only=False)["module"]
    tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in state.items() if n != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copyfile(run_dir / "tokenizer.json", folder / "tokenizer.json")
    files = {
        "config.json": llama_config(vocab_size=VOCAB_SIZE, **SIZE),
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    template = model_folder() / "chat_template.jinja"
    if folder.resolve() != template.parent:
        shutil.copyfile(template, folder / template.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=model_folder())
    options = parser.parse_args()
    export(options.run_dir, options.folder)
    print(options.folder)

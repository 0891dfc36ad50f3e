"""The heads and the draft model that are shipped for the bundled model, `tiny`."""

from pathlib import Path
from typing import Literal

from engine.types.model import ModelDescription

FOLDER = Path(__file__).parent

Kind = Literal["eagle3", "medusa", "draft"]

TRAINED_FOR = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 3,
}
"""What config.json says of the bundled model. A description does not tell a model's name, so this is how it is known;
drafts for another model of the very same form would be worse, and its output the same."""


def find(target: ModelDescription, kind: Kind) -> Path | None:
    """The folder that is shipped for this target; None where it is another model."""
    folder = FOLDER / kind
    known = all(target.config.get(key) == value for key, value in TRAINED_FOR.items())
    return folder if known and (folder / "config.json").exists() else None

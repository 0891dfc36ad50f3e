"""What config.json says about pooling: labels, activation, embedding sizes. For model cards; torch-free."""

from __future__ import annotations

from typing import Any

from engine.modeling.describe import Config, bad_key
from engine.types.pooling import Activation, Pooler, PoolingType

_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}


def embedder(config: Config, pooling_type: PoolingType) -> Pooler:
    """The pooler of a model without a classification head. Raises CheckpointError for a key that makes no sense."""
    sizes = config.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise bad_key(config, "matryoshka_dimensions", f"it is {sizes!r}, no list of sizes")
    return Pooler(pooling_type=pooling_type, dimensions=tuple(sizes))


def classifier(config: Config, pooling_type: PoolingType) -> Pooler:
    """The pooler of a ...ForSequenceClassification. Raises CheckpointError for a key that makes no sense."""
    labels = num_labels(config)
    return Pooler(pooling_type=pooling_type, num_labels=labels, activation=_activation(config, labels))


def num_labels(config: Config) -> int:
    """How many labels there are: those of `id2label`, else `num_labels`, else 2, as in transformers."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    count: Any = config.get("num_labels", 2)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise bad_key(config, "num_labels", f"it is {count!r}, no number of labels")
    return count


def _activation(config: Config, labels: int) -> Activation:
    """What sentence-transformers wrote goes first; then `problem_type`; else one label is a sigmoid, several a softmax.

    (vLLM chooses so too.)
    """
    written = config.get("sentence_transformers")
    name = written.get("activation_fn") if isinstance(written, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if name is not None:
        found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
        if found is None:
            raise bad_key(config, "activation_fn", f"it is {name!r}", f"served are {', '.join(_ACTIVATIONS)}")
        return found
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"

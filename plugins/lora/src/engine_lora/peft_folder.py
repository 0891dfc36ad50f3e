"""A LoRA adapter's folder, as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`. Without torch.

What an adapter asks for and is not served is refused, never passed over: its tokens would be another model's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from typing import Any, NamedTuple

from engine.types.errors import InvalidRequestError, shown
from engine_kit.peft_files import CONFIG, WEIGHTS, read_config, weights_path
from engine_kit.tokenizer_files import tokenizer_hash

PREFIX = "base_model.model."
"""Before the names of a model's modules in the files of PEFT."""
_PATTERN = re.compile(r"\^?(?:[\w-]|\\[.d]\+?|\.[*+]?|\||\([\w-]+(?:\|[\w-]+)*\)|\[[\w-]+\])*\$?")
"""Patterns of names that are tried: names, digits, anything, choices; nothing that would be repeated within what is
repeated, for which a regular expression can take for ever."""
MOST_PATTERN, MOST_REPEATED = 1000, 3
"""Characters of one, and places in it where any number may stand: each multiplies the time that it takes."""

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales the rows of the whole weight, which is no product to be added",
    "lora_bias": "it has biases of its own",
    "modules_to_save": "it brings whole modules in place of the model's, perhaps an embedding or a head of its own",
    "trainable_token_indices": "it brings rows of the embedding in place of the model's",
    "layer_replication": "it puts layers of the model several times over each other",
    "megatron_config": "its layers are those of Megatron",
    "use_qalora": "QALoRA adds up groups of inputs first",
    "use_bdlora": "its matrices are made of blocks",
    "alora_invocation_tokens": "an activated LoRA begins in the middle of a prompt",
    "arrow_config": "it mixes several adapters by token",
}
"""What a config may ask for beside the plain form, and why that is not served."""
_NEEDLESS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
        "target_parameters",
        *("inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "lora_dropout"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("qalora_group_size", "megatron_core", "ensure_weight_tying"),
    }
)
"""What is read here, or says how it was trained, and changes nothing of what is computed."""
_OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to begin with which PEFT changes the model's own weights: the adapter is for these then."""


class AdapterConfig(NamedTuple):
    """What adapter_config.json says.

    Args:
        rank, alpha: of layers that no pattern names. rslora: products are scaled by alpha / sqrt(rank) (Kalajdzievski
            2023), else by alpha / rank.
        ranks, alphas: of other layers, by regular expressions for the ends of their names.
        parameters: that are adapted without being linear layers, by the ends of their names: those of experts.
        version: of PEFT, its first two numbers; () where it is not said.
    """

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    parameters: tuple[str, ...] = ()
    version: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """The largest rank."""
        return max(self.rank, *self.ranks.values(), 1)

    def rank_of(self, module: str) -> int:
        """Of a layer, by its name in the model."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """By which a layer's product B A is multiplied."""
        rank = self.rank_of(module)
        return float(_by_pattern(self.alphas, module, self.alpha)) / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter on disk.

    Args:
        path: the folder.
        config: what its adapter_config.json says.
        revision: another where the files hold something else: a hash of them.
    """

    path: str
    config: AdapterConfig
    revision: str

    @property
    def weights(self) -> str:
        """The file with the matrices."""
        return os.path.join(self.path, WEIGHTS)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT finds it: the first pattern that is the end of the name, from a dot on."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def refusal(path: str, found: str, remedy: str = "") -> InvalidRequestError:
    """The error that an adapter is refused with."""
    return InvalidRequestError(f"load adapter {shown(path, 300)}", found, remedy)


def read_folder(path: str) -> AdapterFolder:
    """Read what stands in a folder, but for its weights. Raises InvalidRequestError: it is no folder of an adapter, its
    files are broken, or it asks for what is not served."""
    refuse = partial(refusal, path)
    config, content = read_config(path, refuse)
    read = _config_of(path, config)
    return AdapterFolder(path, read, _revision(path, content, weights_path(path, refuse)))


def _config_of(path: str, config: Mapping[str, Any]) -> AdapterConfig:
    if (kind := config.get("peft_type")) != "LORA":
        raise refusal(path, f"its peft_type is {shown(kind)}, and LORA is served", "merge it into the model's weights")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise refusal(path, f"{key} is {shown(config[key])}: {why}", "train without it, or merge it into the model")
    if (bias := config.get("bias", "none")) != "none":
        raise refusal(path, f"bias is {shown(bias)}: it changes the model's biases", 'train with bias="none"')
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASE):
        found = f"init_lora_weights is {shown(begun)}: it is for a model whose weights were changed when it began"
        raise refusal(path, found, "save it with path_initial_model_for_weight_conversion, which makes it a plain one")
    unknown = [key for key, value in config.items() if value and key not in _NEEDLESS and key not in _REFUSED]
    if unknown:
        found = f"{CONFIG} has {shown(unknown[0])}, which is not known here: it might change what is computed"
        raise refusal(path, found, "leave it out if it does not, or merge the adapter into the model's weights")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise refusal(path, f"target_parameters is {shown(parameters)}, no list of names")
    version = tuple(int(part) for part in re.findall(r"\d{1,4}", str(config.get("peft_version")))[:2])
    sizes = (config.get("r", 8), config.get("lora_alpha", 8), bool(config.get("use_rslora")))
    read = AdapterConfig(*sizes, ranks, alphas, tuple(parameters), version)
    _check_numbers(path, read)
    return read


def _check_numbers(path: str, read: AdapterConfig) -> None:
    for name, patterns in (("rank_pattern", read.ranks), ("alpha_pattern", read.alphas)):
        if not isinstance(patterns, dict):
            raise refusal(path, f"{name} is {shown(patterns)}, not an object")
        for pattern in patterns:
            if len(pattern) > MOST_PATTERN or _PATTERN.fullmatch(pattern) is None:
                found = f"{name}: {shown(pattern)} is no pattern of names that is known here"
                raise refusal(path, found, "write names of modules, with .* or \\d+ where any may stand")
            if len(re.findall(r"[*+]", pattern)) > MOST_REPEATED:
                found = f"{name}: {shown(pattern)} has more than {MOST_REPEATED} places where any may stand"
                raise refusal(path, found, "write several patterns")
    for rank in (read.rank, *read.ranks.values()):
        if type(rank) is not int or rank < 1:
            raise refusal(path, f"a rank is {shown(rank)}, not a number from 1")
    for alpha in (read.alpha, *read.alphas.values()):
        if type(alpha) not in (int, float) or not abs(alpha) < 1e30:  # which is false of NaN
            raise refusal(path, f"an alpha is {shown(alpha)}, not a number")


def _revision(path: str, config: bytes, weights: str) -> str:
    try:
        with open(weights, "rb") as file:
            found = file_digest(file, "sha256")
        found.update(config)
        found.update(tokenizer_hash(path).encode())  # which others read
    except OSError as error:
        raise refusal(path, f"{error.filename}: {error.strerror}", "see that the engine may read it") from error
    return found.hexdigest()[:16]

"""The methods of `quantization_config`: which layers of a checkpoint are stored, and in what form. Torch-free.

Field names are those that the methods' own tools write (AutoAWQ, AutoGPTQ and GPTQModel, compressed-tensors, AutoFP8,
transformers).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from engine.types.errors import CheckpointError

E4M3 = ("e4m3", "float8_e4m3fn", "float8_e4m3")


class Form(NamedTuple):
    """How a layer is stored.

    Args:
        reader: which function of `engine_quantization.readers` takes its tensors apart.
        bits: of a code.
        group: so many inputs share a scale; 0: all of a row.
        block: so many outputs share one too; 1: each has its own; 0: all of a tensor do.
        symmetric: no code that stands for zero is stored.
        ordered: the groups of inputs are stored (`g_idx`), which do not follow one another.
        legacy: the codes that stand for zero are stored less one.
        scale: the name of the scales, and `static` that of the activations' scale, which is stored too; "": it is not.
        nested: the scales are stored in 8 bits.
        values: what codes of 4 bits stand for: "nf4" or "fp4".
    """

    reader: Literal["awq", "gptq", "packed", "int8", "float8", "mxfp4", "bnb4", "bnb8"]
    bits: int = 8
    group: int = 0
    block: int = 1
    symmetric: bool = True
    ordered: bool = False
    legacy: bool = False
    scale: str = "weight_scale"
    static: str = ""
    nested: bool = False
    values: str = "nf4"


class Method(BaseModel):
    """A `quantization_config` of one method."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    def reasons(self) -> list[str]:
        """Why what it says cannot be read, one sentence each."""
        return []

    def form(self, layer: str, kind: str) -> Form | None:
        """How a layer is stored, by its name in the checkpoint and its kind; None: its weight is plain."""
        raise NotImplementedError


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Lower = Annotated[str, BeforeValidator(_lower)]
Names = list[str] | None


def _up_to_boundary(pattern: str) -> str:
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))"


def _plain_by_boundary(layer: str, patterns: Sequence[str]) -> bool:
    """As transformers has it: a name, its beginning up to a dot, a regular expression of these, or its end."""
    return any(re.match(_up_to_boundary(key), layer) or layer.endswith(key) for key in patterns)


def _marked(targets: Sequence[str] | None) -> list[str]:
    """The regular expressions among names: those behind "re:"."""
    return [target[3:] for target in targets or () if target.startswith("re:")]


def _pattern_reasons(
    field: str, patterns: Iterable[str] | None, whole: Callable[[str], str] = lambda pattern: pattern
) -> list[str]:
    """Of regular expressions that are none. whole: what is matched with."""
    found = []
    for pattern in patterns or ():
        try:
            re.compile(whole(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            found.append(f"{field} has {pattern!r:.120}, which is no regular expression: {error}")
    return found


def _matches(layer: str, target: str) -> bool:
    """As compressed-tensors has it: a name, or a regular expression behind "re:"."""
    return target == layer or any(re.match(pattern, layer) for pattern in _marked([target]))


def _not_one_of(what: str, found: Any, known: Sequence[Any]) -> list[str]:
    return [] if found in known else [f"{what} is {found!r}; what is read is {', '.join(map(str, known))}"]


class Awq(Method):
    """AutoAWQ: 4 bits, a code for zero in each group (Lin et al. 2023)."""

    bits: int = Field(4, validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(128, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool = True
    version: Lower = "gemm"
    modules_to_not_convert: Names = None

    def reasons(self) -> list[str]:
        return [
            *_not_one_of("AWQ's bits", self.bits, (4,)),
            *_not_one_of("AWQ's version", self.version, ("gemm",)),
            *_not_one_of("AWQ's zero_point", self.zero_point, (True,)),
            *_group_reasons("AWQ", self.group_size),
        ]

    def form(self, layer: str, kind: str) -> Form | None:
        # AutoAWQ looks for the words anywhere in a name, transformers for whole parts: "mlp.gate" is no gate_proj.
        if kind == "head" or any(f".{key}." in f".{layer}." for key in self.modules_to_not_convert or ()):
            return None
        return Form("awq", 4, max(0, self.group_size), symmetric=False)


def _group_reasons(method: str, size: int) -> list[str]:
    return [] if size == -1 or size > 0 else [f"{method}'s group_size is {size}; it has to be -1 or more than 0"]


class Differing(BaseModel):
    """What GPTQModel's `dynamic` says of some layers; None: as of all."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None


class Gptq(Method):
    """AutoGPTQ and GPTQModel: 4 or 8 bits, groups of inputs in whatever order (Frantar et al. 2022)."""

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    lm_head: bool = False
    is_marlin_format: bool | None = None
    checkpoint_format: Lower = Field("gptq", validation_alias=AliasChoices("checkpoint_format", "format"))
    dynamic: dict[str, Differing | bool] | None = None
    modules_in_block_to_quantize: list[list[str] | str] | None = None

    def reasons(self) -> list[str]:
        found = [
            *_not_one_of("GPTQ's bits", self.bits, (4, 8)),
            *_not_one_of("GPTQ's checkpoint_format", self.checkpoint_format, ("gptq", "gptq_v2")),
            *_group_reasons("GPTQ", self.group_size),
        ]
        if self.is_marlin_format:
            found.append("its weights stand in Marlin's order (is_marlin_format), which is not read")
        for pattern, more in (self.dynamic or {}).items():
            if isinstance(more, Differing) and not pattern.startswith("-:"):
                if more.bits is not None:
                    found += _not_one_of(f"GPTQ's bits of {pattern!r}", more.bits, (4, 8))
                if more.group_size is not None:
                    found += _group_reasons(f"{pattern!r} of GPTQ", more.group_size)
        return found + _pattern_reasons("GPTQ's dynamic", self.dynamic, _unsigned)

    def form(self, layer: str, kind: str) -> Form | None:
        if kind == "head" and not self.lm_head:
            return None
        inside = [name for part in self.modules_in_block_to_quantize or () for name in _listed(part)]
        if inside and kind != "head" and not any(layer.endswith(f".{name}") for name in inside):
            return None
        bits, group, ordered = self.bits, self.group_size, self.desc_act
        for pattern, more in (self.dynamic or {}).items():
            if not re.match(_unsigned(pattern), layer):
                continue
            if pattern.startswith("-:") or more is False:
                return None
            if isinstance(more, Differing):
                bits = bits if more.bits is None else more.bits
                group = group if more.group_size is None else more.group_size
                ordered = ordered if more.desc_act is None else more.desc_act
            break
        legacy = self.checkpoint_format == "gptq"
        ordered = ordered and group > 0
        return Form("gptq", bits, max(0, group), symmetric=False, ordered=ordered, legacy=legacy)


def _unsigned(pattern: str) -> str:
    """Without what says whether its layers are stored plain."""
    return pattern[2:] if pattern.startswith(("-:", "+:")) else pattern


def _listed(names: list[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else names


class Numbers(BaseModel):
    """What compressed-tensors says of how numbers are rounded."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_bits: int = 8
    type: Lower = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: Lower | None = None
    block_structure: list[int] | None = None
    dynamic: bool | str = False
    actorder: Annotated[str | bool | None, BeforeValidator(_lower)] = None

    @property
    def how(self) -> str:
        """The strategy, which older files leave out."""
        if self.strategy:
            return self.strategy
        return {None: "tensor", -1: "channel"}.get(self.group_size, "group")


class Group(BaseModel):
    """Layers of one scheme."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    targets: list[str] = []
    weights: Numbers | None = None
    input_activations: Numbers | None = None
    format: str | None = None


FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class CompressedTensors(Method):
    """compressed-tensors, as llm-compressor writes it: whole numbers of 4 or 8 bits, or 8-bit floats."""

    format: str = "dense"
    config_groups: dict[str, Group] = {}
    ignore: Names = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def _format(self, group: Group) -> str:
        return group.format or self.format

    def reasons(self) -> list[str]:
        found = []
        if self.kv_cache_scheme:
            found.append("it has scales of an 8-bit KV cache (kv_cache_scheme), which are not read")
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            found.append("its weights are sparse as well (sparsity_config)")
        if (self.transform_config or {}).get("config_groups"):
            found.append("its weights are rotated (transform_config)")
        for name, group in self.config_groups.items():
            if group.weights is not None:
                found += [f"{name}: {reason}" for reason in self._group_reasons(group, group.weights)]
            found += _pattern_reasons(f"{name}: targets", _marked(group.targets))
        return found + _pattern_reasons("ignore", _marked(self.ignore))

    def _group_reasons(self, group: Group, of: Numbers) -> list[str]:
        form = self._format(group)
        found = _not_one_of("compressed-tensors' format", form, FORMATS)
        whole = of.type == "int"
        packed = form == "pack-quantized"
        found += _not_one_of("type", of.type, ("int",) if packed or form == "int-quantized" else ("int", "float"))
        found += _not_one_of("num_bits", of.num_bits, (4, 8) if packed else (8,))
        found += _not_one_of("strategy", of.how, ("group", "channel", "tensor") if whole else
                             ("channel", "tensor", "block"))  # fmt: skip
        if of.how == "group" and (of.group_size or 0) < 1:
            found.append(f"group_size is {of.group_size}; it has to be more than 0")
        if of.how == "block" and not _two_sizes(of.block_structure):
            found.append(f"block_structure is {of.block_structure}; it has to be two sizes")
        if not whole and not of.symmetric:
            found.append("8-bit floats are not symmetric")
        if packed and of.how == "tensor" and not of.symmetric:
            found.append("a code for zero of a whole tensor is not read")
        if whole and group.input_activations is not None and group.input_activations.dynamic is False:
            found.append("activations have a fixed scale; whole numbers are read with dynamic ones, or none")
        return found

    def _group(self, layer: str) -> Group | None:
        """A layer's name goes before a regular expression, and that before its class, in whatever group they are."""
        groups = self.config_groups.values()
        named = [group for group in groups if layer in group.targets]
        matched = [group for group in groups if any(_matches(layer, target) for target in group.targets)]
        of_class = [group for group in groups if "Linear" in group.targets]
        return next(iter(named + matched + of_class), None)

    def form(self, layer: str, kind: str) -> Form | None:
        if any(_matches(layer, target) for target in self.ignore or ()) or "Linear" in (self.ignore or ()):
            return None
        group = self._group(layer)
        if group is None or group.weights is None:
            return None
        of, inputs = group.weights, group.input_activations
        size = (of.group_size or 0) if of.how == "group" else 0
        if self._format(group) == "pack-quantized":
            ordered = of.actorder in ("group", "dynamic", True) and of.how == "group"
            block = 0 if of.how == "tensor" else 1
            return Form("packed", of.num_bits, size, block, of.symmetric, ordered=ordered)
        static = "input_scale" if inputs is not None and inputs.dynamic is False else ""
        block = {"tensor": 0, "block": (of.block_structure or [1])[0]}.get(of.how, 1)
        size = (of.block_structure or [1, 0])[1] if of.how == "block" else size
        return Form("float8" if of.type == "float" else "int8", 8, size, block, of.symmetric, static=static)


def _two_sizes(sizes: Sequence[int] | None) -> bool:
    return sizes is not None and len(sizes) == 2 and min(sizes) > 0


class Fp8(Method):
    """8-bit floats: transformers' and DeepSeek's in blocks, AutoFP8's with a scale for each tensor."""

    activation_scheme: Lower = "dynamic"
    fmt: Lower = "e4m3"
    weight_block_size: list[int] | None = None
    modules_to_not_convert: Names = None
    ignored_layers: Names = None
    kv_cache_scheme: Any = None

    @property
    def _of_transformers(self) -> bool:
        return "weight_block_size" in self.model_fields_set

    def reasons(self) -> list[str]:
        found = _not_one_of("fp8's fmt", self.fmt, E4M3)
        found += _not_one_of("fp8's activation_scheme", self.activation_scheme, ("dynamic", "static"))
        if self.weight_block_size is not None and not _two_sizes(self.weight_block_size):
            found.append(f"fp8's weight_block_size is {self.weight_block_size}; it has to be two sizes")
        if self.kv_cache_scheme:
            found.append("it has scales of an 8-bit KV cache (kv_cache_scheme), which are not read")
        found += _pattern_reasons("fp8's ignored_layers", _marked(self.ignored_layers))
        return found + _pattern_reasons("fp8's modules_to_not_convert", self.modules_to_not_convert, _up_to_boundary)

    def form(self, layer: str, kind: str) -> Form | None:
        if any(_matches(layer, target) for target in self.ignored_layers or ()):
            return None
        # Without a list transformers leaves the head out; one alone says what is left out.
        if self._of_transformers and kind == "head" and self.modules_to_not_convert is None:
            return None
        if _plain_by_boundary(layer, self.modules_to_not_convert or ()):
            return None
        block, group = self.weight_block_size or (0, 0)
        fixed = self.activation_scheme == "static"
        scale, static = "weight_scale", "input_scale" if fixed else ""
        if self._of_transformers:
            scale, static = "weight_scale_inv", "activation_scale" if fixed else ""
        return Form("float8", 8, group, block, scale=scale, static=static)


class Mxfp4(Method):
    """gpt-oss: experts in 4-bit floats, 32 of which share a power of two (OCP Microscaling Formats, 2023)."""

    modules_to_not_convert: Names = None

    def reasons(self) -> list[str]:
        return _pattern_reasons("mxfp4's modules_to_not_convert", self.modules_to_not_convert, _up_to_boundary)

    def form(self, layer: str, kind: str) -> Form | None:
        if kind != "expert" or _plain_by_boundary(layer, self.modules_to_not_convert or ()):
            return None
        return Form("mxfp4", 4, 32)


class Bitsandbytes(Method):
    """bitsandbytes: nf4 or fp4 with scales of their own in 8 bits (QLoRA, Dettmers et al. 2023), or int8."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Lower = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str = "uint8"
    llm_int8_skip_modules: Names = None

    def reasons(self) -> list[str]:
        if not (self.load_in_4bit or self.load_in_8bit):
            return ["neither load_in_4bit nor load_in_8bit is set"]
        found = _pattern_reasons("llm_int8_skip_modules", self.llm_int8_skip_modules, _up_to_boundary)
        if not self.load_in_4bit:
            return found
        return [
            *found,
            *_not_one_of("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4")),
            *_not_one_of("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage.removeprefix("torch."), ("uint8",)),
        ]

    def form(self, layer: str, kind: str) -> Form | None:
        skipped = self.llm_int8_skip_modules
        if (kind == "head" and skipped is None) or _plain_by_boundary(layer, skipped or ()):
            return None
        if not self.load_in_4bit:
            return Form("bnb8", 8, scale="SCB")
        # Scales stand for 64 weights, unless the file says so otherwise.
        return Form("bnb4", 4, 64, nested=self.bnb_4bit_use_double_quant, values=self.bnb_4bit_quant_type)


METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {
        "awq": Awq,
        "gptq": Gptq,
        "compressed-tensors": CompressedTensors,
        "fp8": Fp8,
        "mxfp4": Mxfp4,
        "bitsandbytes": Bitsandbytes,
    }
)
"""By `quant_method`."""


def method_of(stored: Mapping[str, Any]) -> Method:
    """What a `quantization_config` says. Raises CheckpointError where it is none of these methods', or malformed."""
    name = stored.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise CheckpointError(
            "read quantization_config of config.json",
            f"its quant_method is {name!r}, which is none of {', '.join(METHODS)}",
            "take a checkpoint of one of these",
        )
    try:
        return METHODS[name].model_validate(dict(stored))
    except ValidationError as error:
        where = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg'][0].lower()}{one['msg'][1:]}"
            for one in error.errors()
        )
        raise CheckpointError(
            f"read quantization_config of config.json, of method '{name}'", where, "mend it, or fetch the file again"
        ) from None


def reasons(stored: Mapping[str, Any]) -> list[str]:
    """Why weights that are stored so cannot be read, one sentence each."""
    try:
        return method_of(stored).reasons()
    except CheckpointError as error:
        return [str(error)]

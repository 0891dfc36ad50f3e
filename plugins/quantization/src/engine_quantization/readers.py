"""A layer's tensors, as each method stores them, taken apart into one form for all: codes, scales and zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from engine.interfaces.quantization import LayerShape, StoredTensor
from engine.types.errors import CheckpointError, ConfigError
from engine.types.parallel import Shard
from engine_quantization.methods import Form

FLOATS = frozenset({"float32", "bfloat16", "float16"})
INT32 = frozenset({"int32"})
BYTES = frozenset({"uint8"})
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4-bit floats, by their codes."""
NESTED = 256
"""Scales that share a scale of their own (bitsandbytes)."""
ANY = -1
"""A size that the file alone knows, see `StoredTensor`."""


class Codes(NamedTuple):
    """A layer: weight[o, i] = scales[o, g] * (number of codes[o, i] - zeros[o, g]), g being the group of input i.

    Args:
        codes: uint8 [O, I].
        bits: of a code.
        scales: float32, float16 or bfloat16 [O, groups].
        zeros: uint8 [O, groups], where codes are the numbers; else None.
        values: float32 [2 ** bits], the numbers that codes stand for; None: themselves.
        group_size: so many inputs are a group, one after another.
        group_of: int64 [I], the group of each input, where they are not.
    """

    codes: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    values: torch.Tensor | None
    group_size: int
    group_of: torch.Tensor | None = None


class Reader(NamedTuple):
    """One method's.

    Args:
        tensors: what a layer is made of, but for its bias.
        codes: takes them apart.
    """

    tensors: Callable[[LayerShape, Form], list[StoredTensor]]
    codes: Callable[[LayerShape, Form, Mapping[str, torch.Tensor]], Codes]


def stored_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """The checkpoint's tensors that a layer is made of. Raises ConfigError where this rank's part cannot be cut out."""
    bias = layer.stored("bias", inputs=0, cast=True) if layer.bias else []
    # Rows that belong into another order are put there when they are apart.
    return [one._replace(in_order=False) for one in (*READERS[form.reader].tensors(layer, form), *bias)]


def taken_apart(
    layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]
) -> tuple[Codes, torch.Tensor | None]:
    """The codes of a layer, and its bias [O], with the rows where the layer has them.

    Raises CheckpointError where its tensors contradict one another or the config.
    """
    found, bias = READERS[form.reader].codes(layer, form, tensors), tensors.get("bias")
    if layer.orders:
        rows = rows_of(layer)
        zeros = None if found.zeros is None else found.zeros[rows]
        found = found._replace(codes=found.codes[rows], scales=found.scales[rows], zeros=zeros)
        bias = None if bias is None else bias[rows]
    return found, bias


def rows_of(layer: LayerShape) -> torch.Tensor:
    """Which of the rows that were stored comes where."""
    found, start = [], 0
    for name, length in zip(layer.names, lengths_of(layer), strict=True):
        found += [start + row for row in layer.orders.get(name, range(length))]
        start += length
    return torch.tensor(found)


def lengths_of(layer: LayerShape) -> list[int]:
    """Rows of each name on this rank."""
    rows = [part.length for part in layer.outputs]
    return [sum(rows)] if len(layer.names) == 1 else rows


def _named(layer: LayerShape) -> str:
    return ", ".join(layer.names)


# -- tensors -----------------------------------------------------------------------------------------------------------
def _of_groups(
    layer: LayerShape, key: str, form: Form, *, outputs: int = 1, turned: bool = False,
    dtypes: frozenset[str] = FLOATS,
) -> list[StoredTensor]:  # fmt: skip
    """Tensors with an element for each group of inputs. Groups in another order are whole on each rank."""
    if form.group and not form.ordered:
        return layer.stored(key, outputs=outputs, inputs=form.group, turned=turned, dtypes=dtypes)
    groups = -(-layer.inputs.total // form.group) if form.group else 1
    return layer._replace(inputs=Shard.of(groups)).stored(key, outputs=outputs, turned=turned, dtypes=dtypes)


def _whole(layer: LayerShape, key: str, shape: tuple[int, ...], dtypes: frozenset[str]) -> list[StoredTensor]:
    """Tensors that every rank has whole."""
    return [StoredTensor(key, f"{name}.{key}", shape, dtypes=dtypes) for name in layer.names]


def _order(layer: LayerShape, key: str) -> list[StoredTensor]:
    """The group of each input, of each name."""
    size, part = layer.inputs, layer.inputs.part
    pieces = () if size.length == size.total else ((part,),)
    return [StoredTensor(key, f"{name}.{key}", (size.total,), pieces, INT32) for name in layer.names]


# -- numbers -----------------------------------------------------------------------------------------------------------
def unpacked(words: torch.Tensor, bits: int, order: Sequence[int] = ()) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits]: the codes of each word from its lowest bits on; or in an order."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = nibbles(codes)
    return codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2) if order else codes


def nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]."""
    pair = (packed & 15, packed >> 4)
    return torch.stack(pair[::-1] if high_first else pair, dim=-1).flatten(-2)


def _scales(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[O, groups] of what stands for tensors, for blocks of outputs, or for outputs."""
    scales, rows = tensors[form.scale], lengths_of(layer)
    if form.block == 0:
        return scales.repeat_interleave(torch.tensor(rows, device=scales.device)).unsqueeze(1)
    if form.block == 1:
        return scales
    found, start = [], 0
    for length in rows:
        blocks = -(-length // form.block)
        found.append(scales[start : start + blocks].repeat_interleave(form.block, 0)[:length])
        start += blocks
    return torch.cat(found)


def _group_of(layer: LayerShape, form: Form, order: torch.Tensor) -> torch.Tensor | None:
    """int64 [I] of the stored ones of all names; None where the groups follow one another, as the config says."""
    each = order.view(len(layer.names), -1).long()
    groups = -(-layer.inputs.total // form.group) if form.group else 1
    if int(each.min()) < 0 or int(each.max()) >= groups:
        raise CheckpointError(
            f"load {_named(layer)}", f"g_idx names group {int(each.max())} of {groups}", "fetch the file again"
        )
    if not bool((each == each[0]).all()):
        raise CheckpointError(
            f"load {_named(layer)} as one matrix",
            "their groups of inputs are in different orders (g_idx)",
            "use a checkpoint that was quantised without desc_act (actorder)",
        )
    size = form.group or layer.inputs.total
    plain = torch.arange(layer.inputs.start, layer.inputs.start + layer.inputs.length, device=order.device) // size
    if torch.equal(each[0], plain):
        return None if not form.ordered or layer.inputs.length == layer.inputs.total else each[0]
    if form.ordered:
        counts = torch.bincount(each[0], minlength=groups)
        whole = layer.inputs.length == layer.inputs.total
        if bool((counts > size).any()) or (whole and bool((counts[:-1] != size).any())):
            raise CheckpointError(
                f"load {_named(layer)}",
                f"g_idx has groups of {int(counts.min())} to {int(counts.max())} inputs, and quantization_config says "
                f"that each has {size}",
                "fetch the file again, or mend group_size in quantization_config",
            )
        return each[0]
    raise CheckpointError(
        f"load {_named(layer)}",
        "its groups of inputs do not follow one another (g_idx), and the config says that they do",
        "mend desc_act in quantization_config",
    )


def _in_words(layer: LayerShape, bits: int) -> None:
    """Raises CheckpointError where the last word of a name's zeros would not be full."""
    each = 32 // bits
    for name, rows in zip(layer.names, _totals(layer), strict=True):
        if rows % each:
            raise CheckpointError(
                f"load {name}",
                f"it has {rows} outputs, and the codes that stand for zero are stored {each} to a word",
                f"use a checkpoint whose layers have a multiple of {each} outputs, or one that is symmetric",
            )


# -- AWQ ---------------------------------------------------------------------------------------------------------------
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has outputs 0, 1, 2, ... of its eight."""


def _awq_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """qweight int32 [I, O / 8], qzeros int32 [groups, O / 8], scales [groups, O]."""
    _in_words(layer, 4)
    return [
        *layer.stored("qweight", outputs=8, turned=True, dtypes=INT32),
        *_of_groups(layer, "qzeros", form, outputs=8, turned=True, dtypes=INT32),
        *_of_groups(layer, "scales", form, turned=True),
    ]


def _awq_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    codes, zeros = (unpacked(tensors[key], 4, AWQ_ORDER).T for key in ("qweight", "qzeros"))
    return Codes(codes, 4, tensors["scales"].T, zeros, None, form.group or layer.inputs.length)


# -- GPTQ --------------------------------------------------------------------------------------------------------------
def _gptq_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """qweight int32 [I * bits / 32, O], qzeros int32 [groups, O * bits / 32], scales [groups, O], g_idx int32 [I]."""
    each = 32 // form.bits
    _in_words(layer, form.bits)
    return [
        *layer.stored("qweight", inputs=each, turned=True, dtypes=INT32),
        *_of_groups(layer, "qzeros", form, outputs=each, turned=True, dtypes=INT32),
        *_of_groups(layer, "scales", form, turned=True),
        *_order(layer, "g_idx"),
    ]


def _gptq_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    zeros = tensors["qzeros"]
    codes = unpacked(tensors["qweight"].T, form.bits)[:, : layer.inputs.length]
    if form.legacy:  # each is stored less one: taken off word by word, so that it is added so
        ones = sum(1 << shift for shift in range(0, 32, form.bits))
        zeros = (zeros.long() + ones << 32 >> 32).to(torch.int32)
    zeros = unpacked(zeros, form.bits).T[: codes.shape[0]]
    group_of = _group_of(layer, form, tensors["g_idx"])
    size = form.group or layer.inputs.length
    return Codes(codes, form.bits, tensors["scales"].T, zeros, None, size, group_of)


# -- compressed-tensors ------------------------------------------------------------------------------------------------
def _by_strategy(layer: LayerShape, key: str, form: Form, dtypes: frozenset[str] = FLOATS) -> list[StoredTensor]:
    """Scales for tensors, blocks, outputs, or groups of inputs."""
    if form.block == 0:
        return _whole(layer, key, (1,), dtypes)
    if form.block > 1:
        return layer.stored(key, outputs=form.block, inputs=form.group, dtypes=dtypes)
    return _of_groups(layer, key, form, dtypes=dtypes)


def _packed_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """weight_packed int32 [O, I * bits / 32], weight_scale [O, groups], weight_zero_point int32 [O * bits / 32,
    groups], weight_g_idx int32 [I], and weight_shape, of two numbers."""
    each = 32 // form.bits
    if not form.symmetric:
        _in_words(layer, form.bits)
    zeros = [] if form.symmetric else _of_groups(layer, "weight_zero_point", form, outputs=each, dtypes=INT32)
    return [
        *layer.stored("weight_packed", inputs=each, dtypes=INT32),
        *_by_strategy(layer, "weight_scale", form),
        *zeros,
        *(_order(layer, "weight_g_idx") if form.ordered else ()),
        *_whole(layer, "weight_shape", (2,), frozenset({"int64", "int32"})),
    ]


def _packed_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    scales = _scales(layer, form, tensors)
    codes = unpacked(tensors["weight_packed"], form.bits)[:, : layer.inputs.length]
    if form.symmetric:
        zeros = torch.full_like(scales, 1 << form.bits - 1, dtype=torch.uint8)
    else:
        zeros = unpacked(tensors["weight_zero_point"].T, form.bits).T[: codes.shape[0]]
    group_of = _group_of(layer, form, tensors["weight_g_idx"]) if form.ordered else None
    return Codes(codes, form.bits, scales, zeros, None, form.group or layer.inputs.length, group_of)


def _int8_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """weight int8 [O, I], weight_scale [O, groups], weight_zero_point int8 [O, groups]."""
    signed = frozenset({"int8"})
    zeros = [] if form.symmetric else _by_strategy(layer, "weight_zero_point", form, signed)
    return [*layer.stored("weight", dtypes=signed), *_by_strategy(layer, form.scale, form), *zeros]


def _int8_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    scales = _scales(layer, form, tensors)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    if not form.symmetric:
        zeros = _unsigned(_scales(layer, form._replace(scale="weight_zero_point"), tensors))
    return Codes(_unsigned(tensors["weight"]), 8, scales, zeros, None, form.group or layer.inputs.length)


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, 128 more."""
    return codes.view(torch.uint8) ^ 128


# -- 8-bit floats ------------------------------------------------------------------------------------------------------
def _float8_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """weight float8_e4m3fn [O, I], its scales, and the scale of activations where that is fixed: it is not needed."""
    static = _whole(layer, form.static, (1,), FLOATS) if form.static else []
    weight = layer.stored("weight", dtypes=frozenset({"float8_e4m3fn"}))
    return [*weight, *_by_strategy(layer, form.scale, form), *static]


def _float8_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    codes = tensors["weight"].view(torch.uint8)
    if bool(((codes & 127) == 127).any()):
        raise CheckpointError(f"load {_named(layer)}", "some of its weights are no numbers", "fetch the file again")
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    return Codes(codes, 8, _scales(layer, form, tensors), None, values, form.group or layer.inputs.length)


# -- MXFP4 -------------------------------------------------------------------------------------------------------------
def _mxfp4_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """blocks uint8 [O, I / 32, 16], scales uint8 [O, I / 32]."""
    blocks = [
        one._replace(shape=(*one.shape, form.group // 2))
        for one in layer.stored("blocks", inputs=form.group, dtypes=BYTES)
    ]
    return [*blocks, *layer.stored("scales", inputs=form.group, dtypes=BYTES)]


def _mxfp4_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    codes = nibbles(tensors["blocks"]).flatten(1)[:, : layer.inputs.length]
    exponents = tensors["scales"].int() - 127
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents).bfloat16()
    return Codes(codes, 4, scales, None, torch.tensor(E2M1), form.group)


# -- bitsandbytes ------------------------------------------------------------------------------------------------------
def _bnb4_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """weight uint8 [O * I / 2, 1], with the scale of each 64 weights, and what says how these are stored: of all ranks,
    for their order is the weights', of a matrix that is not divided."""
    found = []
    floats = frozenset({"float32"})
    for place, (name, rows) in enumerate(zip(layer.names, _totals(layer), strict=True)):
        size = rows * layer.inputs.total
        blocks = -(-size // form.group)
        made: list[tuple[str, tuple[int, ...], frozenset[str]]] = [
            ("weight", (-(-size // 2), 1), BYTES),
            ("weight.absmax", (blocks,), BYTES if form.nested else floats),
            ("weight.quant_map", (16,), floats),
            (f"weight.quant_state.bitsandbytes__{form.values}", (ANY,), BYTES),
        ]
        if form.nested:
            made += [
                ("weight.nested_absmax", (-(-blocks // NESTED),), floats),
                ("weight.nested_quant_map", (256,), floats),
            ]
        found += [StoredTensor(f"{key}.{place}", f"{name}.{key}", shape, dtypes=dtypes) for key, shape, dtypes in made]
    return found


def _totals(layer: LayerShape) -> list[int]:
    """Rows of each name on all ranks."""
    rows = [part.total for part in layer.outputs]
    return [sum(rows)] if len(layer.names) == 1 else rows


def _kept(layer: LayerShape, matrix: torch.Tensor, place: int) -> torch.Tensor:
    """This rank's rows of a name's matrix."""
    parts = layer.outputs if len(layer.names) == 1 else layer.outputs[place : place + 1]
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.total)
    rows = [matrix[start + part.start : start + part.start + part.length]
            for (start, _), part in zip(pairwise(starts), parts, strict=True)]  # fmt: skip
    return torch.cat(rows)


def _bnb4_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    codes, scales, total, inputs = [], [], layer.inputs.total, layer.inputs
    if total % form.group or inputs.start % form.group or inputs.length % form.group:
        raise ConfigError(
            f"load {_named(layer)}",
            f"{inputs.length} of its {total} inputs are no whole blocks of {form.group} that share a scale",
            "choose a smaller --tensor-parallel-size, or a checkpoint of another form",
        )
    values = tensors["weight.quant_map.0"].clone()
    for place, rows in enumerate(_totals(layer)):
        if not torch.equal(tensors[f"weight.quant_map.{place}"], values):
            raise CheckpointError(
                f"load {_named(layer)} as one matrix",
                "their codes stand for different numbers (quant_map)",
                "use a checkpoint that stores them alike",
            )
        state = _state(layer, tensors[f"weight.quant_state.bitsandbytes__{form.values}.{place}"])
        if state.get("blocksize") != form.group or state.get("shape") not in (None, [rows, total]):
            raise CheckpointError(
                f"load {layer.names[place]}",
                f"its state says blocks of {state.get('blocksize')} and shape {state.get('shape')}, not blocks of "
                f"{form.group} and [{rows}, {total}]",
                "use a checkpoint of the model that config.json describes, quantised with the default block size",
            )
        absmax = tensors[f"weight.absmax.{place}"]
        if form.nested:
            outer = tensors[f"weight.nested_absmax.{place}"].repeat_interleave(NESTED)[: len(absmax)]
            inner = tensors[f"weight.nested_quant_map.{place}"][absmax.long()]
            absmax = inner * outer + _offset(layer.names[place], state)
        whole = nibbles(tensors[f"weight.{place}"].flatten(), high_first=True).view(rows, total)
        first = slice(inputs.start // form.group, (inputs.start + inputs.length) // form.group)
        codes.append(_kept(layer, whole, place)[:, inputs.part])
        scales.append(_kept(layer, absmax.view(rows, -1), place)[:, first])
    return Codes(torch.cat(codes), 4, torch.cat(scales), None, values, form.group)


def _offset(name: str, state: Mapping[str, Any]) -> float:
    """What is added to scales that are stored in 8 bits."""
    offset, size = state.get("nested_offset"), state.get("nested_blocksize")
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not math.isfinite(offset) or size != NESTED:
        raise CheckpointError(
            f"load {name}",
            f"its state says nested_offset {offset!r:.80} and nested_blocksize {size!r:.80}, not a number and {NESTED}",
            "use a checkpoint that was quantised with the default block sizes, or fetch the file again",
        )
    return float(offset)


def _state(layer: LayerShape, stored: torch.Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(stored.cpu().tolist()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"load {_named(layer)}", "its quant_state is no JSON object", "fetch the file again")
    return found


def _bnb8_tensors(layer: LayerShape, form: Form) -> list[StoredTensor]:
    """weight int8 [O, I], SCB float32 [O], weight_format."""
    return [
        *layer.stored("weight", dtypes=frozenset({"int8"})),
        *layer.stored("SCB", inputs=0, dtypes=FLOATS),
        *_whole(layer, "weight_format", (1,), BYTES),
    ]


def _bnb8_codes(layer: LayerShape, form: Form, tensors: Mapping[str, torch.Tensor]) -> Codes:
    if tensors["weight_format"].any():
        raise CheckpointError(
            f"load {_named(layer)}", "its weight_format is not 0, rows", "save it with a newer bitsandbytes"
        )
    scales = (tensors["SCB"].double() / 127).float().unsqueeze(1)
    zeros = torch.full_like(scales, 128, dtype=torch.uint8)
    return Codes(_unsigned(tensors["weight"]), 8, scales, zeros, None, layer.inputs.length)


READERS: Mapping[str, Reader] = {
    "awq": Reader(_awq_tensors, _awq_codes),
    "gptq": Reader(_gptq_tensors, _gptq_codes),
    "packed": Reader(_packed_tensors, _packed_codes),
    "int8": Reader(_int8_tensors, _int8_codes),
    "float8": Reader(_float8_tensors, _float8_codes),
    "mxfp4": Reader(_mxfp4_tensors, _mxfp4_codes),
    "bnb4": Reader(_bnb4_tensors, _bnb4_codes),
    "bnb8": Reader(_bnb8_tensors, _bnb8_codes),
}

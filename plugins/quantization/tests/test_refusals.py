"""What a checkpoint may say that cannot be read, or not be multiplied together: refused by name, never computed."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.errors import CheckpointError, UnsupportedModelError
from engine.types.parallel import Shard
from engine_cpu.packed import PackedLinear
from engine_cpu.packed_experts import joined
from engine_quantization.methods import Form, method_of, reasons
from engine_quantization.native import NativeBody
from engine_quantization.readers import Codes, stored_tensors, taken_apart

LAYER = LayerShape(("a",), "linear", Shard.of(256), (Shard.of(64),), False)


def written(name: str, *, names: tuple[str, ...] = ("a",)) -> tuple[LayerShape, Form, dict[str, torch.Tensor]]:
    """A layer of 64 outputs a name and 256 inputs, in a form."""
    case = CASES[name]
    layer = LAYER._replace(names=names, outputs=(Shard.of(64),) * len(names))
    form = method_of(case.stored).form("a", "linear")
    assert form is not None
    rng, found = np.random.default_rng(0), dict[str, torch.Tensor]()
    for one in names:
        found |= case.write(one, rng.standard_normal((64, 256)).astype(np.float32))[0]
    tensors = dict[str, torch.Tensor]()
    for stored in stored_tensors(layer, form):
        tensor = found[stored.name]
        before = tensors.get(stored.key)
        tensors[stored.key] = tensor if before is None else torch.cat([before, tensor])
    taken_apart(layer, form, tensors)  # sound as it was written
    return layer, form, tensors


# -- experts -----------------------------------------------------------------------------------------------------------
def body() -> NativeBody:
    context: Any = SimpleNamespace(
        options=SimpleNamespace(level="auto"), start=SimpleNamespace(model=SimpleNamespace(config={}))
    )
    return NativeBody(context)


def codes_of(zero: int, group: int, dtype: torch.dtype = torch.float32, bits: int = 8) -> Codes:
    codes = torch.full((64, 256), 3, dtype=torch.uint8)
    scales = torch.ones((64, 256 // group), dtype=dtype)
    return Codes(codes, bits, scales, torch.full_like(scales, zero, dtype=torch.uint8), None, group)


@pytest.mark.parametrize("other", [codes_of(9, 64), codes_of(9, 128, torch.bfloat16), codes_of(9, 128, bits=4)])
def test_experts_that_are_stored_unlike_are_refused(other: Codes) -> None:
    """In other groups, with scales of another type, in other bits: the kernels take one layout for all."""
    native, layer = body(), LAYER._replace(kind="expert")
    one, another = (native._packed(layer, codes, None) for codes in (codes_of(9, 128), other))
    native.pack_experts([(one, one), (one, one)])
    for pairs in ([(one, one), (another, one)], [(one, one), (one, another)]):
        with pytest.raises(UnsupportedModelError, match="stores expert 1 as codes.*--quantization stored"):
            native.pack_experts(pairs)


def test_plain_layouts_that_are_unlike_are_refused() -> None:
    """Whoever packs them."""
    packs = PackedLinear("ops", "auto")
    wide, narrow = (packs.pack("int8", torch.ones(32, inputs), None) for inputs in (128, 64))
    with pytest.raises(UnsupportedModelError, match=r"expert 1 as int8 \[32, 64\]"):
        joined([(wide, wide), (narrow, wide)])


def test_zeros_do_not_tell_how_an_expert_is_packed() -> None:
    """One with zeros of 128 throughout lies as the others do; a projection may be plain int8."""
    native, layer = body(), LAYER._replace(kind="expert")
    symmetric, other = (native._packed(layer, codes_of(zero, 256), None) for zero in (128, 7))
    native.pack_experts([(symmetric, symmetric), (other, other)])
    assert native._packed(LAYER, codes_of(128, 256), None).made_of[0] == "int8"
    x = torch.ones(1, 256)
    torch.testing.assert_close(native.linear(x, symmetric), torch.full((1, 64), 256 * (3.0 - 128)))


# -- tensors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "key"), [("gptq ordered", "g_idx"), ("w4a16 ordered", "weight_g_idx")])
def test_groups_of_other_sizes_are_refused(name: str, key: str) -> None:
    layer, form, tensors = written(name)
    order = tensors[key].clone()
    order[(order == 1).nonzero()[0]] = 0
    with pytest.raises(CheckpointError, match=f"g_idx has groups of {form.group - 1} to {form.group + 1} inputs"):
        taken_apart(layer, form, tensors | {key: order})


@pytest.mark.parametrize("name", ["awq", "gptq", "w4a16 asymmetric"])
def test_zeros_that_fill_no_word_are_refused(name: str) -> None:
    form = method_of(CASES[name].stored).form("a", "linear")
    assert form is not None
    layer = LAYER._replace(names=("a", "b"), outputs=(Shard.of(64), Shard.of(12)))
    with pytest.raises(CheckpointError, match="load b; it has 12 outputs.*8 to a word"):
        stored_tensors(layer, form)
    assert stored_tensors(layer, form._replace(reader="packed", symmetric=True, ordered=False))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"nested_offset": None}, "nested_offset None"),
        ({"nested_offset": "x"}, "nested_offset 'x'"),
        ({"nested_offset": float("nan")}, "nested_offset nan"),
        ({"nested_blocksize": 128}, "nested_blocksize 128"),
        ({"blocksize": 128}, "blocks of 128"),
        (None, "quant_state is no JSON object"),
    ],
)
def test_states_of_bitsandbytes(change: dict[str, Any] | None, found: str) -> None:
    layer, form, tensors = written("nf4 nested")
    (key,) = (key for key in tensors if "quant_state" in key)
    state = [] if change is None else json.loads(bytes(tensors[key].tolist())) | change
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=found):
        taken_apart(layer, form, tensors | {key: text})


def test_codes_of_bitsandbytes_stand_for_the_same_numbers() -> None:
    layer, form, tensors = written("nf4", names=("a", "b"))
    changed = tensors["weight.quant_map.1"] / 2
    with pytest.raises(CheckpointError, match="different numbers"):
        taken_apart(layer, form, tensors | {"weight.quant_map.1": changed})


# -- configs -----------------------------------------------------------------------------------------------------------
GPTQ, COMPRESSED = CASES["gptq"].stored, CASES["w4a16"].stored


def weights_of(form: str, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' config with such weights."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "group_size": 64, **more}
    return COMPRESSED | {"format": form, "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (GPTQ | {"dynamic": {"+:(": {"bits": 8}}}, r"dynamic has '\+:\(', which is no regular expression"),
        (GPTQ | {"dynamic": {"x{99999999999}": {}}}, "no regular expression"),
        (GPTQ | {"dynamic": {"x": {"group_size": 0}}}, "group_size is 0"),
        (GPTQ | {"dynamic": {"x": {"group_size": "many"}}}, r"group_size: input should be a valid integer"),
        (GPTQ | {"dynamic": {"x": {"bits": 3}}}, "bits of 'x' is 3"),
        (GPTQ | {"dynamic": {"x": {"desc_act": [1]}}}, r"desc_act: input should be a valid boolean"),
        (GPTQ | {"is_marlin_format": True}, "Marlin"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "compressed-tensors' format is 'nvfp4-pack-quantized'"),
        (weights_of("float-quantized", "float", "group"), "strategy is 'group'"),
        (weights_of("int-quantized", "int", "tensor_group"), "strategy is 'tensor_group'"),
        (weights_of("float-quantized", "float", "channel", num_bits=4), "num_bits is 4"),
        (weights_of("pack-quantized", "int", "channel", num_bits=3), "num_bits is 3"),
        (COMPRESSED | {"ignore": ["re:*"]}, "ignore has"),
        (
            COMPRESSED | {"config_groups": {"g": COMPRESSED["config_groups"]["group_0"] | {"targets": ["re:["]}}},
            "g: targets has",
        ),
        (CASES["deepseek"].stored | {"modules_to_not_convert": ["a("]}, r"modules_to_not_convert has 'a\('"),
        (CASES["autofp8"].stored | {"ignored_layers": ["re:a("]}, "ignored_layers has"),
        (CASES["mxfp4"].stored | {"modules_to_not_convert": ["*a"]}, "modules_to_not_convert has"),
        (CASES["nf4"].stored | {"llm_int8_skip_modules": ["a("]}, "llm_int8_skip_modules has"),
        (CASES["llm.int8"].stored | {"llm_int8_skip_modules": ["a("]}, "llm_int8_skip_modules has"),
    ],
)
def test_configs_that_make_no_sense(stored: dict[str, Any], found: str) -> None:
    """Each by the name of the field, and none but by an error of the engine's."""
    assert re.search(found, "; ".join(reasons(stored)))


def test_names_go_before_patterns_and_patterns_before_classes() -> None:
    """In whatever group they stand."""
    groups = {
        name: {"targets": targets, "weights": {"num_bits": 4, "strategy": "group", "group_size": size}}
        for name, targets, size in (("c", ["Linear"], 32), ("r", [r"re:.*\.q"], 64), ("n", ["x.q"], 128))
    }
    method = method_of(COMPRESSED | {"config_groups": groups})
    forms = [method.form(layer, "linear") for layer in ("x.q", "y.q", "y.k")]
    assert [form and form.group for form in forms] == [128, 64, 32]

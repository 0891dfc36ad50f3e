"""The loader: what it takes, what it refuses, and what it keeps."""

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import PlainOps, body_of, describe, make_context, open_model, run

from engine.interfaces.quantization import LayerShape, StoredTensor
from engine.modeling import (
    ColumnParallelLinear,
    Embedding,
    Linear,
    LMHead,
    MergedColumnLinear,
    Module,
    QKVLinear,
    RMSNorm,
    RowParallelLinear,
    load_weights,
)
from engine.types.errors import CheckpointError, ConfigError, DeviceMemoryError, UnsupportedModelError
from engine.types.parallel import Shard
from engine_kit.safetensors_files import read_safetensors

Tensors = dict[str, torch.Tensor]


def load(folder: Path, tensors: Any) -> Any:
    """The folder's model with these tensors."""
    description, _, card = describe(folder)
    model = body_of(card)(make_context(description))
    model.load_weights(tensors.items() if isinstance(tensors, dict) else tensors)
    return model


@pytest.fixture(scope="module")
def folder(checkpoints) -> Path:
    return checkpoints("LlamaForCausalLM")


@pytest.fixture
def tensors(folder: Path) -> Tensors:
    return {name: tensor.clone() for name, tensor in read_safetensors(describe(folder)[1])}


def test_any_order(folder: Path, tensors: Tensors) -> None:
    """Fused parts may come in any order, with others between."""
    expected = run(load(folder, tensors), [1, 2, 3])
    assert torch.equal(run(load(folder, dict(reversed(tensors.items()))), [1, 2, 3]), expected)
    assert torch.equal(run(open_model(folder, torch.float32), [1, 2, 3]), expected)


def test_every_problem_in_one_error(folder: Path, tensors: Tensors) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 80, dtype=torch.int8)
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        load(folder, tensors)
    message = str(caught.value)
    for words in (
        "load the weights of LlamaForCausalLM",
        "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight",
        "1 unexpected: model.layers.9.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight [3, 4] for [80, 64]",
        "model.layers.0.mlp.down_proj.weight of dtype int8",
    ):
        assert words in message, message


def test_long_lists_are_cut(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"21 missing: (\S+, ){5}\S+ and 15 more"):
        load(folder, {})


def test_twice(folder: Path, tensors: Tensors) -> None:
    with pytest.raises(CheckpointError, match=r"1 there twice: model\.norm\.weight"):
        load(folder, [*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])])


def test_harmless_tensors(folder: Path, tensors: Tensors) -> None:
    """Old checkpoints hold rotary frequencies in each layer."""
    load(folder, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})


def test_missing_bias(checkpoints) -> None:
    """Qwen2's biases are not optional."""
    folder = checkpoints("Qwen2ForCausalLM")
    weights = [(n, t) for n, t in read_safetensors(describe(folder)[1]) if not n.endswith("0.self_attn.q_proj.bias")]
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder, weights)


@pytest.mark.parametrize("where", ["load", "finish"])
def test_memory_that_ends(folder: Path, tensors: Tensors, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor at which it ended, how much is missing behind it, torch's own numbers, and what helps."""
    name, said = "model.layers.1.mlp.down_proj.weight", "Tried to allocate 2.00 MiB. GPU 0 has 7 GiB of which 1 is free"
    whole = getattr(RowParallelLinear, where)

    def full(self: RowParallelLinear, *arguments: Any) -> None:
        if "layers.1.mlp.down_proj" in self.shape.names[0]:
            raise torch.OutOfMemoryError(f"Device out of memory. {said}. See the manual of memory. PLEASE DO")
        whole(self, *arguments)

    monkeypatch.setattr(RowParallelLinear, where, full)
    with pytest.raises(DeviceMemoryError) as caught:
        load(folder, tensors)
    place = list(tensors).index(name)
    after = sum(tensor.nbytes for tensor in list(tensors.values())[place + 1 :])
    assert after and caught.value.asked == "load the weights of LlamaForCausalLM"
    assert caught.value.found == (
        f"the device's memory ends at {name} {list(tensors[name].shape)}, {tensors[name].nbytes:,} bytes, and "
        f"{after:,} bytes of weights come after it: Device out of memory. {said}"
    )
    assert "--quantization" in caught.value.remedy and "--tensor-parallel-size" in caught.value.remedy


def test_memory_that_ends_in_the_checkpoints_hands(folder: Path, tensors: Tensors) -> None:
    """A checkpoint that makes its tensors on the device: what is still to come is told as well."""

    def streamed() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors.items())[:3]
        raise torch.OutOfMemoryError("Device out of memory. Tried to allocate 2.00 MiB")

    with pytest.raises(DeviceMemoryError) as caught:
        load(folder, streamed())
    found = re.fullmatch(
        r"the device's memory ends at (\S+) \[.*\], ([\d,]+) bytes, and ([\d,]+) bytes of weights come after it: .*",
        caught.value.found,
    )
    assert found is not None and found[1] in list(tensors)[3:]
    own, after = (int(number.replace(",", "")) for number in found.groups()[1:])
    assert own + after == sum(tensor.nbytes for tensor in list(tensors.values())[3:])
    assert "--quantization" in caught.value.remedy


def test_tied(checkpoints) -> None:
    """A tied model's file holds one matrix; a second one is passed over; an untied model needs it."""
    folder = checkpoints("LlamaForCausalLM", tie=True)
    weights = {name: tensor.clone() for name, tensor in read_safetensors(describe(folder)[1])}
    assert "lm_head.weight" not in weights
    expected = run(load(folder, weights), [5, 6])
    copy = weights | {"lm_head.weight": torch.full_like(weights["model.embed_tokens.weight"], 9.0)}
    assert torch.equal(run(load(folder, copy), [5, 6]), expected)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(checkpoints("LlamaForCausalLM"), weights)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """They leave aside what stood before the test, for as long as it runs: cycles in that, too, are to be freed."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("quick_collections")
def test_streamed_and_freed(folder: Path, tensors: Tensors) -> None:
    """No checkpoint tensor outlives its turn, and no unpacked weight its packing."""
    alive: list[weakref.ref[torch.Tensor]] = []
    unpacked: list[weakref.ref[torch.Tensor]] = []

    class Packing(PlainOps):
        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            assert sum(ref() is not None for ref in unpacked) == 0  # one unpacked layer at a time
            unpacked.append(weakref.ref(weight))
            return weight.clone(), bias

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in list(tensors):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1  # the one that the loader has in hand
            tensor = tensors.pop(name)
            alive.append(weakref.ref(tensor))
            yield name, tensor

    description, _, card = describe(folder)
    context = make_context(description)
    object.__setattr__(context, "ops", Packing())
    model = body_of(card)(context)
    model.load_weights(stream())
    gc.collect()
    assert not any(ref() is not None for ref in [*alive, *unpacked])


def test_layers_compute_what_they_say() -> None:
    """Each kind of layer, alone, against torch."""
    context: Any = SimpleNamespace(
        ops=PlainOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_rank=0,
        tp_size=1,
        attention=None,
        quantization={},
        adapters=None,
        description=SimpleNamespace(config={}),
    )

    class Parts(Module):
        def __init__(self) -> None:
            self.column = ColumnParallelLinear(context, 4, 6, "column", bias=True)
            self.row = RowParallelLinear(context, 6, 4, "row")
            self.merged = MergedColumnLinear(context, 4, [3, 5], ["a", "b"], bias=True)
            self.several = [QKVLinear(context, 4, 4, 2, 3, "attn", bias=True)]
            self.norm = RMSNorm(context, 4, 1e-5, "norm")
            self.embed = Embedding(context, 7, 4, "embed")
            self.head = LMHead(context, 7, 4, "head", bias=True)
            self.tied = LMHead(context, 7, 4, "tied", self.embed)

    parts = Parts()
    named = {param.name: torch.randn(param.shape) for part in parts.parts() for param in part.params()}
    load_weights(parts, named.items())
    x, linear = torch.randn(5, 4), torch.nn.functional.linear

    def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    y = linear(x, named["column.weight"], named["column.bias"])
    close(parts.column(x), y)
    close(parts.row(y), linear(y, named["row.weight"]))
    both = [linear(x, named[f"{n}.weight"], named[f"{n}.bias"]) for n in "ab"]
    close(parts.merged(x), torch.cat(both, dim=-1))
    for ours, part, heads in zip(parts.several[0](x), "qkv", (4, 2, 2), strict=True):
        name = f"attn.{part}_proj"
        close(ours, linear(x, named[f"{name}.weight"], named[f"{name}.bias"]).view(5, heads, 3))
    close(parts.embed(torch.tensor([6, 0, 6])), named["embed.weight"][[6, 0, 6]])
    close(parts.head(x), linear(x, named["head.weight"], named["head.bias"]))
    close(parts.tied(x), linear(x, named["embed.weight"]))
    normed = torch.nn.functional.rms_norm
    close(parts.norm(x), normed(x, (4,), named["norm.weight"], 1e-5))
    first, kept = parts.norm.add(x, None)
    assert kept is x
    close(first, normed(x, (4,), named["norm.weight"], 1e-5))
    total = x + 1.0
    second, summed = parts.norm.add(x.clone(), torch.ones(5, 4))
    close(second, normed(total, (4,), named["norm.weight"], 1e-5))
    close(summed, total)


def test_ranks_that_do_not_divide_the_model(folder: Path) -> None:
    description, _, card = describe(folder)
    with pytest.raises(ConfigError, match="over 3 ranks; 4 does not divide evenly"):
        body_of(card)(make_context(description, tp_rank=1, tp_size=3, group=object()))
    with pytest.raises(ConfigError, match="no such rank"):
        body_of(card)(make_context(description, tp_rank=1, tp_size=1))


def test_parts_that_are_stored_unlike_are_refused(folder: Path) -> None:
    """One matrix has one form."""
    description, _, card = describe(folder)
    context = make_context(
        description, quantization={"linear": object()}, covers=lambda name, kind: not name.endswith(".v_proj")
    )
    with pytest.raises(UnsupportedModelError, match=r"v_proj as one matrix.*v_proj is stored plain"):
        body_of(card)(context)


def test_elements_of_packed_forms() -> None:
    """Eight outputs in one integer, a scale for 32 inputs: cut where ranks may, refused where they may not."""

    def layer(start: int, length: int) -> LayerShape:
        return LayerShape(("x",), "linear", Shard.of(80), (Shard(96, start, length), Shard(32, 0, 32)), False)

    (codes,) = layer(48, 48).stored("codes", outputs=8, turned=True)
    assert codes.shape == (80, 16) and codes.along == 1
    assert codes.pieces == ((slice(0, 80), slice(6, 12)), (slice(0, 80), slice(12, 16)))
    (scales,) = layer(0, 48).stored("scales", inputs=32)
    assert scales.shape == (128, 3) and scales.pieces[0] == (slice(0, 48), slice(0, 3))
    with pytest.raises(ConfigError, match=r"44 \.\. 87 of the 128.*stores 8 of them as one"):
        layer(44, 44).stored("codes", outputs=8)


def test_elements_that_parts_share() -> None:
    """Where one rank holds all of a tensor, nothing is cut: it may be stored in elements of several parts."""
    shape = LayerShape(("x",), "linear", Shard.of(8), (Shard.of(3), Shard.of(4)), False)
    (codes,) = shape.stored("codes", outputs=8)
    assert codes.shape == (1, 8) and codes.pieces == ()


class TwoScales:
    """A form in which each part has one scale, without dimensions, and its name has a point in it."""

    def tensors(self, layer: LayerShape) -> list[StoredTensor]:
        scales = [StoredTensor("scale", f"{name}.weight.scale", ()) for name in layer.names]
        return [*layer.stored("weight.codes", dtypes=frozenset({"int8"})), *scales]

    def pack(self, layer: LayerShape, tensors: Tensors) -> Tensors:
        return {key: tensor.clone() for key, tensor in tensors.items()}

    def linear(self, x: torch.Tensor, packed: Tensors) -> torch.Tensor:
        rows = packed["weight.codes"].double().chunk(2)
        return x @ torch.cat([part * scale for part, scale in zip(rows, packed["scale"], strict=True)]).T


@pytest.mark.parametrize("turned", [False, True])
def test_parts_with_a_scale_each(turned: bool) -> None:
    """Tensors of one key follow one another, also where each is one number; rows are put into their order."""
    context: Any = SimpleNamespace(
        ops=None, quantization={"linear": TwoScales()}, covers=None, adapters=None,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip
    orders = {"b": [2, 0, 1]} if turned else {}
    layer = Linear(context, 4, [3, 3], ["a", "b"], False, kind="linear", orders=orders)
    codes = {name: torch.randint(-9, 9, (3, 4), dtype=torch.int8) for name in "ab"}
    scales = {"a": torch.tensor(2.0), "b": torch.tensor(0.5)}
    tensors = {f"{n}.weight.codes": codes[n] for n in "ab"} | {f"{n}.weight.scale": scales[n] for n in "ab"}
    load_weights(layer, tensors.items())
    a, b = (codes[name].double() * scales[name] for name in "ab")
    assert torch.equal(layer(torch.eye(4, dtype=torch.float64)).T, torch.cat((a, b[[2, 0, 1]] if turned else b)))


class Noted(TwoScales):
    """A form that has two rows in each element, a note of any length, and scales that may be stored as [1] or []."""

    def tensors(self, layer: LayerShape) -> list[StoredTensor]:
        signed = frozenset({"int8"})
        found = layer.stored("pairs", outputs=2, dtypes=signed)
        for place, name in enumerate(layer.names):
            found.append(StoredTensor("scale", f"{name}.scale", (1,)))
            found.append(StoredTensor(f"note.{place}", f"{name}.note", (-1,), dtypes=frozenset({"uint8"})))
        return [one._replace(in_order=False) for one in found]

    def linear(self, x: torch.Tensor, packed: Tensors) -> torch.Tensor:
        assert [packed[f"note.{place}"].tolist() for place in range(2)] == [[1, 2, 3], [4]]
        rows = packed["pairs"].double().repeat_interleave(2, 0) * packed["scale"].repeat_interleave(4).unsqueeze(1)
        return x @ rows[[0, 1, 2, 3, 6, 7, 4, 5]].T


def test_forms_that_put_rows_in_order_themselves() -> None:
    context: Any = SimpleNamespace(
        ops=None, quantization={"linear": Noted()}, covers=None, adapters=None,
        dtype=torch.float64, device=torch.device("cpu"),
    )  # fmt: skip
    orders = {"b": [2, 3, 0, 1]}
    layer = Linear(context, 4, [4, 4], ["a", "b"], False, kind="linear", orders=orders)
    pairs = {name: torch.randint(-9, 9, (2, 4), dtype=torch.int8) for name in "ab"}
    tensors = {f"{name}.pairs": pairs[name] for name in "ab"}
    tensors |= {"a.scale": torch.tensor(2.0), "b.scale": torch.tensor([0.5])}
    notes = {"a.note": torch.tensor([1, 2, 3], dtype=torch.uint8), "b.note": torch.tensor([4], dtype=torch.uint8)}
    load_weights(layer, [*tensors.items(), *notes.items()])
    a, b = (pairs[name].double().repeat_interleave(2, 0) * scale for name, scale in (("a", 2.0), ("b", 0.5)))
    assert torch.equal(layer(torch.eye(4, dtype=torch.float64)).T, torch.cat((a, b[orders["b"]])))
    with pytest.raises(CheckpointError, match=r"of the wrong form: a\.note"):
        layer = Linear(context, 4, [4, 4], ["a", "b"], False, kind="linear", orders=orders)
        load_weights(layer, [*tensors.items(), *notes.items(), ("a.note", torch.zeros(1))][::-1])

"""What each rank holds: the loader's parts against slices of the full weights, cut here by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import body_of, describe, make_context

from engine.modeling import MergedColumnLinear, QKVLinear, RowParallelLinear, load_weights
from engine.modeling.module import Param
from engine.modeling.parallel import vocabulary
from engine.types.errors import CheckpointError
from engine.types.parallel import Shard
from engine_kit.model_config import unsupported_ranks
from engine_kit.safetensors_files import read_safetensors

HEADS, HEAD_SIZE = 4, 32


class NoGroup:
    """Ranks that never speak: only their weights are looked at."""


def load_rank(folder: Path, rank: int, size: int) -> Any:
    description, weights, card = describe(folder)
    context = make_context(description, tp_rank=rank, tp_size=size, group=NoGroup() if size > 1 else None)
    model = body_of(card)(context)
    model.load_weights(read_safetensors(weights))
    return model


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("kv_heads", "tie"), [(1, False), (2, True), (4, False)])
def test_parts_are_slices_of_the_whole(checkpoints, kv_heads: int, tie: bool, size: int) -> None:
    folder = checkpoints("LlamaForCausalLM", kv_heads=kv_heads, bias=True, tie=tie, shards=2)
    full = dict(read_safetensors(describe(folder)[1]))
    models = [load_rank(folder, rank, size) for rank in range(size)]
    for rank, model in enumerate(models):
        for index, layer in enumerate(model.layers):

            def heads(part: str, count: int, first: int, length: int, index: int = index) -> torch.Tensor:
                whole = full[f"model.layers.{index}.self_attn.{part}"].unflatten(0, (count, HEAD_SIZE))
                return whole[first : first + length].flatten(0, 1)

            def cut(name: str, dim: int, rank: int = rank, index: int = index) -> torch.Tensor:
                return full[f"model.layers.{index}.{name}"].chunk(size, dim)[rank]

            queries = HEADS // size
            per_rank = max(1, kv_heads // size)
            first_kv = (rank * queries) // (HEADS // kv_heads)  # the head that the rank's first query reads
            weight, bias = layer.attention.qkv._packed
            for kind, packed in (("weight", weight), ("bias", bias)):
                expected = [
                    heads(f"q_proj.{kind}", HEADS, rank * queries, queries),
                    heads(f"k_proj.{kind}", kv_heads, first_kv, per_rank),
                    heads(f"v_proj.{kind}", kv_heads, first_kv, per_rank),
                ]
                assert torch.equal(packed, torch.cat(expected))
            assert (layer.attention.qkv.num_q_heads, layer.attention.qkv.num_kv_heads) == (queries, per_rank)
            for linear, name in ((layer.attention.o, "self_attn.o_proj"), (layer.mlp.down, "mlp.down_proj")):
                weight, bias = linear._packed
                assert torch.equal(weight, cut(f"{name}.weight", 1))
                assert (bias is not None) == (rank == 0), "the bias is added once"
                assert bias is None or torch.equal(bias, full[f"model.layers.{index}.{name}.bias"])
            for i, kind in enumerate(("weight", "bias")):
                expected = [cut(f"mlp.gate_proj.{kind}", 0), cut(f"mlp.up_proj.{kind}", 0)]
                assert torch.equal(layer.mlp.gate_up._packed[i], torch.cat(expected))
            assert torch.equal(layer.attention_norm.weight, full[f"model.layers.{index}.input_layernorm.weight"])
        rows = full["model.embed_tokens.weight"].tensor_split(size)[rank]
        assert torch.equal(model.embed.weight, rows)
        assert model.embed.weight.untyped_storage().nbytes() == rows.numel() * rows.element_size(), "a copy of the part"
        head = model.head.linear._packed
        assert torch.equal(head[0], rows if tie else full["lm_head.weight"].tensor_split(size)[rank])
    whole = sum(tensor.numel() for name, tensor in full.items() if not (tie and name == "lm_head.weight"))
    held = sum(model.num_parameters() for model in models)
    norms = sum(tensor.numel() for name, tensor in full.items() if "norm" in name)
    kv = sum(tensor.numel() for name, tensor in full.items() if ".k_proj." in name or ".v_proj." in name)
    copies = max(size // kv_heads, 1)
    assert held == whole + (size - 1) * norms + (copies - 1) * kv


def test_shapes_are_checked_before_they_are_cut(checkpoints) -> None:
    """A tensor whose part would fit by chance is still of the wrong shape."""
    folder = checkpoints("LlamaForCausalLM")
    description, weights, card = describe(folder)
    model = body_of(card)(make_context(description, tp_rank=1, tp_size=2, group=NoGroup()))
    tensors = dict(read_safetensors(weights))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name]))
    with pytest.raises(CheckpointError, match=rf"{name} \[160, 64\] for \[80, 64\]"):
        model.load_weights(tensors.items())


def test_a_bias_that_another_rank_adds_is_passed_over(checkpoints) -> None:
    """But not a bias that nobody knows."""
    context = make_context(describe(checkpoints("LlamaForCausalLM"))[0], tp_rank=1, tp_size=2, group=NoGroup())
    tensors = {"x.weight": torch.ones(3, 4), "x.bias": torch.ones(3)}
    load_weights(RowParallelLinear(context, 4, 3, "x", bias=True), tensors.items())
    with pytest.raises(CheckpointError, match=r"unexpected: x\.bias"):
        load_weights(RowParallelLinear(context, 4, 3, "x", bias=False), tensors.items())


@pytest.mark.parametrize(("total", "size"), [(275, 4), (272, 4), (7, 3), (5, 5), (9, 1)])
def test_a_vocabulary_is_covered_once(total: int, size: int) -> None:
    shards = vocabulary(total, size)
    assert [index for shard in shards for index in range(total)[shard.part]] == list(range(total))
    assert {shard.total for shard in shards} == {total}
    assert max(shard.length for shard in shards) - min(shard.length for shard in shards) <= 1


def test_shards() -> None:
    assert Shard.of(7) == Shard(7, 0, 7)
    assert Shard(4, 2, 1).of_units(8) == Shard(32, 16, 8)


def test_every_reason_why_ranks_do_not_fit(checkpoints) -> None:
    model = describe(checkpoints("LlamaForCausalLM"))[0]  # 4 heads, 2 KV heads, 272 words
    assert unsupported_ranks(model, 1, intermediate_size=7) == []
    assert unsupported_ranks(model, 4, intermediate_size=80) == []
    assert len(unsupported_ranks(model, 3, intermediate_size=80)) == 3
    assert "vocabulary" in unsupported_ranks(model, 1024)[-1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_fused_tensors_give_each_rank_what_separate_ones_do(checkpoints, kv_heads: int, size: int) -> None:
    """A checkpoint's qkv_proj and gate_up_proj: of one tensor a rank keeps several pieces, in their order."""
    description = describe(checkpoints("LlamaForCausalLM"))[0]
    width, rows, inner = 6, {"q": 4 * 3, "k": kv_heads * 3, "v": kv_heads * 3}, 8
    qkv = {name: torch.randn(count, width) for name, count in rows.items()}
    biases = {name: torch.randn(count) for name, count in rows.items()}
    mlp = [torch.randn(inner, width) for _ in range(2)]
    for rank in range(size):
        context = make_context(description, tp_rank=rank, tp_size=size, group=NoGroup() if size > 1 else None)
        apart = QKVLinear(context, width, 4, kv_heads, 3, "x", bias=True, parts=("q", "k", "v"))
        named = [(f"x.{n}.{kind}", of[n]) for kind, of in (("weight", qkv), ("bias", biases)) for n in rows]
        load_weights(apart, named)
        fused = QKVLinear(context, width, 4, kv_heads, 3, "x", bias=True, parts=("qkv",))
        whole = {"x.qkv.weight": torch.cat(list(qkv.values())), "x.qkv.bias": torch.cat(list(biases.values()))}
        load_weights(fused, whole.items())
        for ours, expected in zip(fused._packed, apart._packed, strict=True):
            assert torch.equal(ours, expected)
        assert [param.local_shape[0] for param in fused.params()] == [
            sum(part.length for part in fused.shape.outputs)
        ] * 2
        gate_up = MergedColumnLinear(context, width, [inner, inner], ["x"])
        load_weights(gate_up, [("x.weight", torch.cat(mlp))])
        assert torch.equal(gate_up._packed[0], torch.cat([part.chunk(size)[rank] for part in mlp]))


def test_pieces_follow_one_another_where_they_differ() -> None:
    tensor = torch.arange(24).reshape(4, 6)
    every = slice(None)
    param = Param("x", (4, 6), None, pieces=((every, slice(4, 6)), (every, slice(0, 1))))  # type: ignore[arg-type]
    assert param.local_shape == (4, 3) and torch.equal(param.cut(tensor), tensor[:, [4, 5, 0]])


def test_a_fused_tensor_of_another_size_is_refused(checkpoints) -> None:
    context = make_context(describe(checkpoints("LlamaForCausalLM"))[0])
    linear = QKVLinear(context, 4, 1, 1, 3, "x", parts=("qkv",))
    with pytest.raises(CheckpointError, match=r"wrong form: x\.qkv\.weight \[5, 4\] for \[9, 4\]"):
        load_weights(linear, [("x.qkv.weight", torch.ones(5, 4))])

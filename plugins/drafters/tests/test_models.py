"""The heads' bodies beside the papers' formulas, in float64 and over whole sequences at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain
import published
import pytest
import torch
import torch.nn.functional as F
from heads_at_once import opened, state
from published import HEADS, HIDDEN, KV_HEADS, LAYER, SIZE, VOCAB

from engine.interfaces.model import ModelNeed
from engine.types.errors import CheckpointError, UnsupportedModelError
from engine.types.parallel import Parallel
from engine_drafters.layouts import TENSORS
from engine_drafters.models import card as cards

Tensors = dict[str, torch.Tensor]


class Target:
    """What heads take of the model that they draft for."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(9)
        self.table = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
        self.matrix = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
        self.embed = self

    @property
    def weight(self) -> torch.Tensor:
        return self.table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids.long()]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.matrix.T


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + LAYER["rms_norm_eps"]).sqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, SIZE], each pair (i, i + SIZE / 2) turned by its position."""
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * LAYER["rope_theta"] ** (
        -torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE
    )
    pairs = (
        torch.complex(x[..., : SIZE // 2], x[..., SIZE // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def attended(x: torch.Tensor, weights: Tensors, name: str) -> torch.Tensor:
    q, k, v = (
        (x @ weights[f"{name}.self_attn.{part}_proj.weight"].T).view(len(x), heads, SIZE)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (turned(k), v))
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (turned(q), k, v)), is_causal=True)
    return out.transpose(0, 1).flatten(1) @ weights[f"{name}.self_attn.o_proj.weight"].T


def behind(x: torch.Tensor, weights: Tensors, name: str) -> torch.Tensor:
    """The feed-forward block with its norm and residual."""
    y = norm(x, weights[f"{name}.post_attention_layernorm.weight"])
    gate, up, down = (weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T


def eagle(weights: Tensors, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """EAGLE (Li et al. 2024): features [T, HIDDEN] of the next positions."""
    x = F.linear(torch.cat((embedded, features), -1), weights["fc.weight"], weights.get("fc.bias"))
    return behind(x + attended(x, weights, "layers.0"), weights, "layers.0")


def eagle3(weights: Tensors, embedded: torch.Tensor, features: torch.Tensor, before: bool = False) -> torch.Tensor:
    """EAGLE-3 (Li et al. 2025); features are fused, or its own."""
    normed = norm(features, weights["midlayer.hidden_norm.weight"])
    read = torch.cat((norm(embedded, weights["midlayer.input_layernorm.weight"]), normed), -1)
    x = (normed if before else features) + attended(read, weights, "midlayer")
    return behind(x, weights, "midlayer")


IDS = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(2))
STREAMS = torch.randn(3, 14, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def walked(body: Any, features: torch.Tensor, drafts: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(features made, all tokens, all features read): the sequence in two pieces, then greedy drafts one by one."""
    made = [body.forward(state(IDS[:9], features[:9]), plain.plain_walk)]
    made.append(body.forward(state(IDS[9:], features[9:], 9), plain.plain_walk))
    ids, read = IDS, features
    for i in range(drafts):
        token = body.logits(made[-1][-1:].clone()).argmax(-1)
        ids, read = torch.cat((ids, token)), torch.cat((read, made[-1][-1:]))
        made.append(body.forward(state(token, made[-1][-1:], 14 + i), plain.plain_walk))
    return torch.cat(made), ids, read


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["folder", "speculators"])
def test_eagle(form: str, bias: bool, tmp_path: Path) -> None:
    """Features, drafts and logits, with the target's embedding and head."""
    weights, target = published.eagle(bias=bias), Target()
    config, stored = {**LAYER, "architectures": ["LlamaForCausalLM"]}, weights
    if form == "speculators":
        config, stored = published.of_speculators("eagle", weights, fusion_bias=bias)
    body = opened(published.write(tmp_path, config, stored), target)
    made, ids, read = walked(body, STREAMS[0])
    expected = eagle(weights, target(ids), read)
    assert torch.allclose(made, expected, atol=1e-12)
    assert torch.allclose(body.logits(made), expected @ target.matrix.T, atol=1e-11)


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("folder", {}),
        ("folder", {"draft_vocab_size": VOCAB}),
        ("speculators", {"norm_before_residual": True}),
        ("speculators", {"norm_before_fc": True, "target_hidden_size": None}),
        ("speculators", {"fc_norm": True, "norm_output": True}),
    ],
)
def test_eagle3(form: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Fused streams, features, drafts, and logits in the target's vocabulary, of which it drafts a part."""
    drafted = more.get("draft_vocab_size", published.DRAFTED)
    weights, target = published.eagle3(drafted=drafted), Target()
    if more.get("norm_before_fc"):
        weights |= published.weights({"input_norm.weight": (3 * HIDDEN,)}, 8)
    if more.get("fc_norm"):
        weights |= published.weights({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}, 8)
    config, stored = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafted}, weights
    if form == "speculators":
        config, stored = published.of_speculators("eagle3", weights, draft_vocab_size=drafted, **more)
    body = opened(published.write(tmp_path, config, stored), target)
    joined = torch.cat(list(STREAMS), -1)
    if more.get("norm_before_fc"):
        joined = norm(joined, weights["input_norm.weight"])
    if more.get("fc_norm"):
        joined = torch.cat([norm(one, weights[f"fc_norm.{i}.weight"]) for i, one in enumerate(STREAMS)], -1)
    features = body.fuse(list(STREAMS))
    assert torch.allclose(features, joined @ weights["fc.weight"].T, atol=1e-12)
    made, ids, read = walked(body, features)
    expected = eagle3(weights, target(ids), read, before=more.get("norm_before_residual", False))
    normed = norm(expected, weights["norm.weight"])
    assert torch.allclose(made, normed if more.get("norm_output") else expected, atol=1e-12)
    own = normed @ weights["lm_head.weight"].T
    spread = torch.full((len(made), VOCAB), -torch.inf, dtype=torch.float64)
    for i in range(drafted):
        spread[:, i + int(weights["d2t"][i]) if "d2t" in weights else i] = own[:, i]
    assert torch.allclose(body.logits(made), spread, atol=1e-11)
    assert "t2d" not in weights or bool(weights["t2d"][ids[14:]].all())


def test_eagle3_by_the_targets_head(tmp_path: Path) -> None:
    """A head without a matrix of its own."""
    weights, target = published.eagle3(drafted=VOCAB), Target()
    del weights["lm_head.weight"]
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}
    body = opened(published.write(tmp_path, config, weights), target)
    hidden = STREAMS[0]
    assert torch.allclose(body.logits(hidden), target.logits(norm(hidden, weights["norm.weight"])), atol=1e-11)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa(layers: int, tmp_path: Path) -> None:
    """x + silu(W x + b), some times, and a matrix: head by head."""
    weights = published.medusa(heads=3, layers=layers)
    config = {"medusa_num_heads": 3, "medusa_num_layers": layers, "torch_dtype": "float64"}
    folder = published.write(tmp_path, config, weights, "medusa_lm_head.pt")
    body = opened(folder, Target(), {"vocab_size": VOCAB, "hidden_size": HIDDEN})
    for number, head in enumerate(body.heads):
        x = STREAMS[0]
        for block in range(layers):
            name = f"{number}.{block}.linear"
            x = x + F.silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        assert torch.allclose(head(STREAMS[0]), x @ weights[f"{number}.{layers}.weight"].T, atol=1e-11)


def test_medusa_by_the_targets_head(tmp_path: Path) -> None:
    """Heads without matrices of their own."""
    weights, target = published.medusa(heads=2), Target()
    weights = {name: tensor for name, tensor in weights.items() if "linear" in name}
    folder = published.write(tmp_path, {"medusa_num_heads": 2}, weights, "medusa_lm_head.safetensors")
    body = opened(folder, target, {"vocab_size": VOCAB, "hidden_size": HIDDEN})
    x = STREAMS[0] + F.silu(STREAMS[0] @ weights["1.0.linear.weight"].T + weights["1.0.linear.bias"])
    assert torch.allclose(body.heads[1](STREAMS[0]), target.logits(x), atol=1e-11)


# -- what is shared, and what does not fit -----------------------------------------------------------------------------
@pytest.mark.parametrize("differs", [False, True])
def test_an_embedding_in_the_file_is_kept_where_it_differs(differs: bool, tmp_path: Path) -> None:
    weights, target = published.eagle(), Target()
    weights["embed_tokens.weight"] = target.table + differs
    config = {**LAYER, "architectures": ["LlamaForCausalLM"]}
    body = opened(published.write(tmp_path, config, weights), target)
    found = body.forward(state(IDS, STREAMS[0]), plain.plain_walk)
    assert torch.allclose(found, eagle(weights, (target.table + differs)[IDS], STREAMS[0]), atol=1e-12)
    own = sum(tensor.numel() for tensor in weights.values())
    assert body.num_parameters() == own - (0 if differs else VOCAB * HIDDEN)


@pytest.mark.parametrize("head", ["eagle", "eagle3", "medusa"])
def test_a_tensor_too_many_or_missing_is_named(head: str, tmp_path: Path) -> None:
    weights: Tensors = getattr(published, head)()
    config = {
        "eagle": {**LAYER, "architectures": ["LlamaForCausalLM"]},
        "eagle3": {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": published.DRAFTED},
        "medusa": {"medusa_num_heads": 3, "vocab_size": VOCAB, "hidden_size": HIDDEN},
    }[head]
    gone = next(name for name in weights if "down_proj" in name or name == "1.0.linear.bias")
    del weights[gone]
    weights["more.weight"] = torch.ones(2)
    published.write(tmp_path, config, weights)
    with pytest.raises(CheckpointError, match="1 missing.*1 unexpected") as refused:
        opened(tmp_path, Target())
    assert gone.removeprefix("midlayer.") in str(refused.value) and "more.weight" in str(refused.value)


def test_a_map_to_no_token_is_refused(tmp_path: Path) -> None:
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": published.DRAFTED}
    for wrong in (torch.zeros(published.DRAFTED).long() + VOCAB, -torch.arange(published.DRAFTED)):
        weights = {**published.eagle3(), "d2t": wrong}
        with pytest.raises(CheckpointError, match="d2t"):
            opened(published.write(tmp_path, config, weights), Target())


@pytest.mark.parametrize(
    ("card", "more", "said"),
    [
        (cards.LlamaEagle, {"num_hidden_layers": 2}, "2 layers"),
        (cards.LlamaEagle, {"layernorms": True}, "layernorms"),
        (cards.LlamaEagle, {"hidden_act": "gelu"}, "gelu"),
        (cards.LlamaEagle3, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (cards.LlamaEagle3, {"draft_vocab_size": 24}, "no d2t"),
        (cards.LlamaEagle3, {"draft_vocab_size": 24, TENSORS: ["d2t"]}, "no lm_head"),
        (cards.LlamaEagle3, {"draft_vocab_size": 100}, "100"),
        (cards.LlamaEagle3, {"rope_scaling": {"rope_type": "wide"}}, "wide"),
        (cards.Medusa, {"medusa_num_heads": 0}, "medusa_num_heads"),
    ],
)
def test_what_a_body_does_not_have_is_refused(card: Any, more: dict[str, Any], said: str) -> None:
    need = ModelNeed(architecture="X", config={**LAYER, "architectures": ["X"], **more})
    assert any(said in reason for reason in card.unsupported(need))


def test_more_ranks_than_it_can_be_divided_over() -> None:
    config = {**LAYER, "architectures": ["X"]}
    need = ModelNeed(architecture="X", config=config, parallel=Parallel(tp=3))
    assert any("3 ranks" in reason for reason in cards.LlamaEagle3.unsupported(need))


def test_a_target_without_an_embedding_or_none_at_all(tmp_path: Path) -> None:
    folder = published.write(tmp_path, {**LAYER, "architectures": ["LlamaForCausalLM"]}, published.eagle())
    for target, said in ((None, "another model"), (object(), "`embed`")):
        with pytest.raises(UnsupportedModelError, match=said):
            opened(folder, target)

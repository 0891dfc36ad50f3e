"""Drafter `mtp` with Qwen3-Next's layer, whose target keeps states: they go back to where drafts stop to count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from proposals import Drafted
from schedules import Schedule, examples, schedules

pytest.importorskip("transformers", reason="transformers is not installed")

from checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint
from mtp_schedules import CROWDED, REQUESTS, SETTINGS, WAYS, held, run, sampled
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.types.errors import EngineError

HIDDEN, LAYER = 64, "model.layers.2."
TYPES = ["linear_attention", "full_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
}  # fmt: skip
NORMS = {"embedding": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden", "last": "mtp.norm"}
TABLES = 3
"""Of blocks: of states, of the target's keys and values, and of the layer's that drafts."""
MTP = {"drafter": "mtp", "drafter.num_tokens": 3, "drafter.adaptive": False}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, of which the last becomes the one for further tokens. States fade slowly."""
    made = make_checkpoint(
        tmp_path_factory.mktemp("three"), "Qwen3NextForCausalLM", layers=3, dtype="float64", layer_types=TYPES, **SIZES
    )
    tensors, generator = load_file(made / "model.safetensors"), torch.Generator().manual_seed(3)
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = -4 * torch.rand(4, dtype=torch.float64, generator=generator)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@pytest.fixture(scope="module")
def folder(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen publishes it: two layers, and the tensors `mtp.*`."""
    made = tmp_path_factory.mktemp("mtp")
    for file in three.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((three / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": TYPES[:2]}
    (made / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name.replace(LAYER, "mtp.layers.0."): tensor for name, tensor in load_file(three / "model.safetensors").items()
    }
    for name in NORMS.values():
        tensors[f"{name}.weight"] = torch.randn(HIDDEN, dtype=torch.float64, generator=generator) / 8
    tensors["mtp.fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64, generator=generator) / 8
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def by_token(q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """The gated delta rule by its definition, in the precision of its inputs: [1, T, heads, ...]."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = v.new_zeros(*v.shape[2:3], k.shape[-1], v.shape[-1]), torch.empty_like(v)
    for t in range(v.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        wrong = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t]))
        state = state + k[0, t][:, :, None] * wrong[:, None, :]
        out[0, t] = torch.einsum("hkv,hk->hv", state, q[0, t]) / q.shape[-1] ** 0.5
    return out, None


@pytest.fixture
def oracle(three: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' model, in float64 where it says float32."""
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", by_token)
    found = load_oracle(three, torch.float64)
    for module in found.modules():
        if isinstance(module, theirs.Qwen3NextRMSNorm):
            module.forward = lambda x, of=module: norm(x, 1 + of.weight)
        elif isinstance(module, theirs.Qwen3NextRMSNormGated):
            module.forward = lambda x, gate, of=module: norm(x, of.weight) * torch.nn.functional.silu(gate)
    return found


@torch.inference_mode()
def test_drafts_are_those_of_the_formula(folder: Path, oracle: Any, proposals: list[Drafted]) -> None:
    """The layer is transformers' own. And the tokens are those without drafts."""

    def generate(**settings: Any) -> tuple[list[list[int]], Any]:
        greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        with LLM(str(folder), **SETTINGS | settings) as llm:
            outputs = llm.generate(["Once upon a", "one two", "The sea"], greedy, use_tqdm=False)
            return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs], llm.llm_engine.stats()

    found, stats = generate(max_num_batched_tokens=12, max_num_seqs=3, num_kv_pages=30, **MTP)
    assert found == generate()[0] and stats.num_preemptions > 0 and len(proposals) > 20
    tensors = load_file(folder / "model.safetensors")
    embedding, hidden, last = (1 + tensors[f"{name}.weight"] for name in NORMS.values())
    behind = oracle.model.layers[2]
    oracle.model.layers = oracle.model.layers[:2]
    oracle.config.num_hidden_layers = 2

    def made(ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """The states [T, HIDDEN] behind the tokens that follow the states."""
        embedded = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        x = torch.cat((norm(embedded, embedding), norm(states, hidden)), -1) @ tensors["mtp.fc.weight"].T
        places = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotary = oracle.model.rotary_emb(x[None], places)
        out = behind(x[None], attention_mask=mask, position_ids=places, position_embeddings=rotary)
        return norm(out.view(x.shape), last)

    for text in found:
        final = oracle.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        mine = [one for one in proposals if one.tokens == text[: len(one.tokens)]]
        assert mine
        for tokens, drafts in mine[::4]:
            expected, ids, states = [], tokens[1:], final[: len(tokens) - 1]
            for _ in range(3):
                after = made(ids, states)
                expected.append(int((after[-1] @ tensors["lm_head.weight"].T).argmax()))
                ids, states = [*ids, expected[-1]], torch.cat((states, after[-1:]))
            assert drafts == expected[: len(drafts)]


@given(schedule=schedules(VOCAB_SIZE, max_requests=4))
@hypothesis_settings(max_examples=examples(2), deadline=None, suppress_health_check=list(HealthCheck))
def test_drafts_change_no_token(folder: Path, schedule: Schedule) -> None:
    held(folder, TABLES, schedule)


@pytest.mark.slow
@given(schedule=schedules(VOCAB_SIZE, crowded=True))
@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules(folder: Path, schedule: Schedule) -> None:
    stats = held(folder, TABLES, schedule)
    event(f"preemptions: {min(stats.num_preemptions, 3)}, accepted: {stats.num_accepted_drafts > 0}")


@pytest.mark.parametrize(
    "way", [name if name == "alone" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_in_a_crowded_cache_and_over_workers(folder: Path, way: str) -> None:
    """Prefixes are shared, requests are preempted and go on, hardly a draft counts."""
    stats = held(folder, TABLES, Schedule(settings=CROWDED, requests=REQUESTS), **WAYS[way])
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts > 50, stats


@pytest.mark.parametrize("right", [0.8, pytest.param(1.0, marks=pytest.mark.slow)])
def test_drafts_of_which_some_count(folder: Path, tmp_path: Path, right: float) -> None:
    """States go back to the last draft that counts, wherever that is."""
    schedule = Schedule(settings=replace(CROWDED, num_drafts=5), requests=REQUESTS[1::2])
    answers, _ = run(folder, sampled(schedule))
    known = [[len(one.prompt), [*one.prompt, *answers[one.request_id].tokens]] for one in schedule.requests]
    (tmp_path / "answers.json").write_text(json.dumps(known))
    options = {"drafter.answers": str(tmp_path / "answers.json"), "drafter.right": right}
    stats = held(folder, TABLES, schedule, drafter="known", **options)
    assert 30 < stats.num_accepted_drafts <= stats.num_drafts and (
        right == 1 or stats.num_accepted_drafts < stats.num_drafts
    )


def test_a_checkpoint_without_the_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "mtp.fc.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"mtp\.fc\.weight"):
        LLM(str(tmp_path), **SETTINGS, drafter="mtp")

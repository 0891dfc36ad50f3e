"""Drafter `mtp` in a whole engine, beside transformers' own layer of the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from proposals import Drafted
from schedules import Schedule, examples, schedules

pytest.importorskip("transformers", reason="transformers is not installed")

from checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint
from mtp_schedules import CROWDED, REQUESTS, WAYS, held
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.types.errors import EngineError
from engine_drafters.mtp.card import MTPDrafter
from engine_models.deepseek_card import DeepseekV3

ARCHITECTURE, LAYER, HIDDEN = "DeepseekV3ForCausalLM", "model.layers.2", 64
SETTINGS: dict[str, Any] = {
    "dtype": "float64", "max_num_seqs": 3, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64,
    "num_kv_pages": 18, "enable_prefix_caching": False,
}  # fmt: skip
TEXTS = ["Once upon a", "one two", "The sea"]
TABLES = 1
"""Of blocks: all layers have the latent vectors of every token, and that which drafts has them there too."""
NORMS = ("enorm", "hnorm", "shared_head.norm")


EXPERTS = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 2,
}  # fmt: skip
"""DeepSeek-V3's own form: all layers but the first have routed experts, that for further tokens too."""


@pytest.fixture(scope="module", params=[{}, EXPERTS], ids=["dense", "experts"])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, of which the last becomes the one for further tokens."""
    return make_checkpoint(tmp_path_factory.mktemp("three"), ARCHITECTURE, layers=3, dtype="float64", **request.param)


@pytest.fixture(scope="module")
def folder(three: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As DeepSeek publishes it: two layers, and one behind them with norms, `eh_proj`, and copies of what it shares."""
    made = tmp_path_factory.mktemp("mtp")
    for file in three.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    config = json.loads((three / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (made / "config.json").write_text(json.dumps(config))
    tensors, generator = load_file(three / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in NORMS:
        tensors[f"{LAYER}.{name}.weight"] = 1 + torch.randn(HIDDEN, dtype=torch.float64, generator=generator) / 8
    joined = torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64, generator=generator) / 8
    tensors[f"{LAYER}.eh_proj.weight"] = joined
    tensors[f"{LAYER}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{LAYER}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def generate(folder: Path, **settings: Any) -> tuple[list[list[int]], Any]:
    """(prompts and answers, statistics)."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), **SETTINGS | settings) as llm:
        outputs = llm.generate(TEXTS, greedy, use_tqdm=False)
        stats = llm.llm_engine.stats()
    return [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs], stats


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@torch.inference_mode()
def test_drafts_are_those_of_the_formula(folder: Path, three: Path, proposals: list[Drafted]) -> None:
    """DeepSeek-V3's report, section 2.2; the layer is transformers' own. And the tokens are those without drafts."""
    found, stats = generate(folder, drafter="mtp", **{"drafter.adaptive": False, "drafter.num_tokens": 3})
    assert found == generate(folder, num_kv_pages=80)[0]
    assert stats.num_preemptions > 0 and len(proposals) > 20
    oracle, tensors = load_oracle(three, torch.float64), load_file(folder / "model.safetensors")
    behind = oracle.model.layers[2]
    oracle.model.layers = oracle.model.layers[:2]
    embedding, state_weight, last = (tensors[f"{LAYER}.{name}.weight"] for name in NORMS)

    def made(ids: list[int], states: torch.Tensor) -> torch.Tensor:
        """The states [T, HIDDEN] behind the tokens that follow the states."""
        embedded = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        x = (
            torch.cat((norm(embedded, embedding), norm(states, state_weight)), -1)
            @ tensors[f"{LAYER}.eh_proj.weight"].T
        )
        places = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotary = oracle.model.rotary_emb(x[None], places)
        out = behind(x[None], attention_mask=mask, position_ids=places, position_embeddings=rotary)
        return norm((out[0] if isinstance(out, tuple) else out).view(x.shape), last)

    for text in found:
        final = oracle.model(torch.tensor([text])).last_hidden_state[0]
        mine = [one for one in proposals if one.tokens == text[: len(one.tokens)]]
        assert mine
        for tokens, drafts in mine[::4]:
            expected, ids, states = [], tokens[1:], final[: len(tokens) - 1]
            for _ in range(3):
                hidden = made(ids, states)
                expected.append(int((hidden[-1] @ tensors["lm_head.weight"].T).argmax()))
                ids, states = [*ids, expected[-1]], torch.cat((states, hidden[-1:]))
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


@pytest.mark.parametrize("way", WAYS)
def test_in_a_crowded_cache_and_over_workers(folder: Path, way: str) -> None:
    """Prefixes are shared, requests are preempted and go on, and the layer's heads are divided as the model's are."""
    stats = held(folder, TABLES, Schedule(settings=CROWDED, requests=REQUESTS), **WAYS[way])
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts > 50, stats


def test_a_model_without_such_a_layer_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    target = DeepseekV3.describe({**config, "num_nextn_predict_layers": 0})
    with pytest.raises(EngineError, match="num_nextn_predict_layers of its config.json is 0"):
        MTPDrafter.models(target, MTPDrafter.Options())
    other = msgspec.structs.replace(target, architecture="Glm4MoeForCausalLM")
    with pytest.raises(EngineError, match="for a Glm4MoeForCausalLM.*those of other models are not"):
        MTPDrafter.models(other, MTPDrafter.Options())

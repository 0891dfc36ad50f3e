"""Writes docs/reference/drafters.md: which drafter goes with what, as the launcher decides it.

`python docs/generate_drafters.py` takes two seconds: each engine of the table is launched as far as its drivers are
chosen, and no weights are read. A test compares the page with what comes out.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from generate_reference import ROOT, table
from reference_source import escape

sys.path.insert(0, str(ROOT / "plugins" / "drafters" / "tests"))

import published

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.plugin import Registry
from engine.types.errors import EngineError
from engine_tiny import model_folder

PAGE = ROOT / "docs" / "reference" / "drafters.md"
HEAD = """# Drafters and what they go with

For each drafter of this repository, and each thing that an engine can do beside it: **yes**, the engine starts; **no**,
it is refused at start, before weights are read, for the reason in the note, in the engine's own words. Written by
`python docs/generate_drafters.py` from what the launcher says of small models on a processor; a test regenerates it and
compares. An empty cell: there is no such thing to ask of this drafter.

Where an engine starts, its output is that of an engine without drafts: token by token, up to the rounding that any
other batch shape brings, or, where acceptance is by rejection, in its distribution. That is tested apart: random
schedules of requests under each drafter, with preemption, swapping, prefix hits, prompts in chunks, steps in flight and
ranks, in `core/tests/loop`, `core/tests/system` and `plugins/drafters/tests`. Requests with penalties or logits
processors, and steps with constrained ones, get of a tree the chain that it begins with.
[Speculative decoding](../operators/speculation.md) says which drafter to choose.
"""
SIZES = published.SMALL
TREE = [[0], [1], [0, 0]]
YES = "yes"
OWN = "own"
"""Of a feature's model: the one that the drafter was made for."""


class Drafter(NamedTuple):
    """A column.

    Args:
        driver: its name.
        options: as settings, without "drafter.".
        model: of `TARGETS`, what it drafts for.
        draft: of `DRAFTS`, what it drafts with; None: nothing.
    """

    driver: str
    options: Mapping[str, Any] = {}
    model: str = "full"
    draft: str | None = None


class Feature(NamedTuple):
    """A row.

    Args:
        settings: what is asked for.
        model: of `TARGETS`; `OWN`: the drafter's.
        draft: in place of the drafter's own, for those that have one that is an ordinary model.
    """

    settings: Mapping[str, Any] = {}
    model: str = OWN
    draft: str | None = None


BRANCHES = {"tree": TREE}
DRAFTERS = {
    "`ngram`": Drafter("ngram"),
    "`suffix`": Drafter("suffix"),
    "`known`": Drafter("known"),
    "`draft_model`": Drafter("draft_model", draft="full"),
    "`eagle` (EAGLE, EAGLE-2)": Drafter("eagle", draft="eagle"),
    "`eagle` (EAGLE-3)": Drafter("eagle", draft="eagle3"),
    "`eagle` with a tree": Drafter("eagle", BRANCHES, draft="eagle3"),
    "`medusa`": Drafter("medusa", draft="medusa"),
    "`medusa` with a tree": Drafter("medusa", BRANCHES, draft="medusa"),
    "`mtp` (DeepSeek-V3)": Drafter("mtp", model="latent"),
    "`mtp` (Qwen3-Next)": Drafter("mtp", model="states"),
}
FEATURES = {
    "tensor parallel": Feature({"tensor_parallel_size": 2}),
    "tensor parallel, what drafts whole on each rank": Feature(
        {"tensor_parallel_size": 2, "drafter.tensor_parallel_size": 1}
    ),
    "pipeline parallel": Feature({"pipeline_parallel_size": 2}),
    "data parallel": Feature({"data_parallel_size": 2}),
    "prefix cache": Feature({"enable_prefix_caching": True}),
    "prompts in chunks": Feature({"max_num_batched_tokens": 16}),
    "preemption, computed again": Feature({"preemption_mode": "recompute"}),
    "preemption, swapped to the host": Feature({"swap_space": "64MiB"}),
    "several steps in flight": Feature({"in_flight": 3}),
    "KV connector that keeps pages (`file`)": Feature({"kv_connector": "file"}),
    "KV connector between engines (`tcp`)": Feature({"kv_connector": "tcp"}),
    "blending of cached blocks (`cacheblend`)": Feature({"evictor": "cacheblend"}),
    "marks of pages (`--kv-canary`)": Feature({"kv_canary": True}),
    "keys and values of 8 bits": Feature({"kv_cache_dtype": "fp8"}),
    "weights quantised as they are loaded": Feature({"quantization": "absmax"}),
    "batch-invariant computation": Feature({"batch_invariant": True}),
    "captured steps": Feature({"platform.capture": "always"}),
    "acceptance by rejection": Feature({"drafter.acceptance": "rejection"}),
    "always as many drafts as are set": Feature({"drafter.adaptive": False}),
    "grammars": Feature({"grammar": "choice"}),
    "logits processors": Feature({"logits_processor": "logit_bias"}),
    "embedding in place of writing": Feature({"runner": "pooling"}),
    "a model with sliding windows": Feature(model="sliding"),
    "a model with windows shorter than a request's drafts": Feature({"drafter.num_tokens": 16}, model="narrow"),
    "a model with latent attention (DeepSeek)": Feature(model="latent"),
    "a model with states (Qwen3-Next)": Feature(model="states"),
    "a draft model with states": Feature(draft="states"),
    "a draft model of another vocabulary": Feature(draft="words"),
}


def _config(architecture: str, sizes: published.Sizes = SIZES, **more: Any) -> dict[str, Any]:
    return {**sizes.layer(), "architectures": [architecture], "num_hidden_layers": 6, "torch_dtype": "float32", **more}


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 6}
TARGETS: Mapping[str, dict[str, Any]] = {
    "full": _config("LlamaForCausalLM"),
    "words": _config("LlamaForCausalLM", SIZES._replace(vocab=100)),
    "sliding": _config("MistralForCausalLM", sliding_window=64),
    "narrow": _config("MistralForCausalLM", sliding_window=8),
    "latent": _config(
        "DeepseekV3ForCausalLM", num_key_value_heads=SIZES.heads, num_nextn_predict_layers=1, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=8, n_group=4,
        topk_group=2, **_EXPERTS,
    ),
    "states": _config(
        "Qwen3NextForCausalLM", layer_types=["linear_attention", "full_attention"] * 3, num_experts=4,
        shared_expert_intermediate_size=24, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, **_EXPERTS,
    ),
}  # fmt: skip
"""By name the config.json of a model."""


def _heads(folder: Path) -> dict[str, Path]:
    """By name the folder of a head, for any of the targets."""
    layer = SIZES.layer()
    return {
        "eagle": published.write(folder / "eagle", layer, published.eagle()),
        "eagle3": published.write(folder / "eagle3", {**layer, "draft_vocab_size": 24}, published.eagle3()),
        "medusa": published.write(folder / "medusa", {"medusa_num_heads": 3}, published.medusa(), "medusa_lm_head.pt"),
    }


def cells() -> dict[tuple[str, str], str]:
    """Feature and drafter -> "yes", "" where there is no such thing, or why it is refused."""
    registry = Registry.discover()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = _heads(folder)
        for target, config in TARGETS.items():
            places[target] = folder / target
            places[target].mkdir()
            (places[target] / "config.json").write_text(json.dumps(config))
            (places[target] / "model.safetensors").write_bytes(b"")
        asked = {
            (row, column): _asked(feature, drafter, places)
            for row, feature in FEATURES.items()
            for column, drafter in DRAFTERS.items()
        }
        said = {place: "" if given is None else _said(given, registry) for place, given in asked.items()}
    return {place: reason.replace(f"{name}/", "") for place, reason in said.items()}


def _asked(feature: Feature, drafter: Drafter, places: Mapping[str, Path]) -> dict[str, Any] | None:
    """The settings of an engine; None where the drafter has nothing that is asked for."""
    if feature.draft is not None and drafter.driver != "draft_model":
        return None
    if "drafter.tensor_parallel_size" in feature.settings and drafter.draft is None:
        return None
    model = drafter.model if feature.model == OWN else feature.model
    draft = feature.draft or drafter.draft
    options = {**drafter.options, **({} if draft is None else {"model": str(places[draft])})}
    given = {f"drafter.{name}": value for name, value in options.items()}
    common = {"model": str(places[model]), "tokenizer": str(model_folder()), "platform": "cpu", "dtype": "float32"}
    common |= {"attention": "torch_mla"} if model == "latent" else {}  # one driver's word, and not that of all
    return {**common, "drafter": drafter.driver, **given, **feature.settings}


def _said(settings: Mapping[str, Any], registry: Registry) -> str:
    """What the launcher says of an engine."""
    if not (reason := _refusal(settings, registry)):
        return YES
    plain = {name: value for name, value in settings.items() if not name.startswith("drafter")}
    before = _refusal(plain, registry)
    return f"without drafts too: {before}" if before else reason


def _refusal(settings: Mapping[str, Any], registry: Registry) -> str:
    """Why an engine does not start; "" where it does."""
    try:
        launch(EngineConfig(**settings), registry)
    except EngineError as error:
        return re.sub(r" \([\w-]+ \d[\d.]*\)| \d+(\.\d+)+", "", error.found)  # a new version is no other reason
    return ""


def page() -> str:
    """The page's text."""
    said, notes = cells(), dict[str, int]()
    rows = [[row, *(_cell(said[row, column], notes) for column in DRAFTERS)] for row in FEATURES]
    told = [f"{number}. {escape(note)}" for note, number in notes.items()]
    return "\n".join([HEAD, *table(["", *DRAFTERS], rows), *told, ""])


def _cell(said: str, notes: dict[str, int]) -> str:
    if said in ("", YES):
        return said
    return f"no ({notes.setdefault(said, len(notes) + 1)})"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The launcher: every decision from plain facts, without torch and without a body."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from engine.config.settings import EngineConfig
from engine.frontend.drafts import with_trees
from engine.frontend.launch import attention_needs, by_kind, choose_dtype, launch
from engine.interfaces.drafter import DrafterCard, DrafterOptions
from engine.interfaces.model import ModelCard
from engine.interfaces.platform import PlatformCard, PlatformFacts
from engine.plugin import Candidate, Registry
from engine.plugin.manifest import check_choices
from engine.plugin.points import CHECKPOINT, MODEL
from engine.process import wire
from engine.types.errors import (
    ConfigError,
    DriverNotFoundError,
    EngineError,
    PluginError,
    UnfitDriverError,
    UnsupportedModelError,
)
from engine.types.model import EncoderForm, KVSpec, ModelDescription
from engine.types.parallel import Parallel
from engine.types.start import CoreStart
from engine_reference.attention_torch import card as attention_card
from engine_reference.models.llama_card import Llama

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")  # looked for, not read
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_the_default_model_is_its_own_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder of that name lies about, which another driver would open."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError, match="several drivers claim it"):
        launch(EngineConfig(model="tiny"))
    (checkpoint,) = (plan := launch(EngineConfig())).chosen(CHECKPOINT)
    assert checkpoint.candidate.name == "tiny" and not checkpoint.asked and plan.model_name == "tiny"


@pytest.mark.parametrize(("features", "dtype"), [({"avx512_bf16"}, "bfloat16"), ({"avx2"}, "float32")])
def test_decisions(folder: Path, monkeypatch: pytest.MonkeyPatch, features: set[str], dtype: str) -> None:
    monkeypatch.setattr("engine_reference.platform_host.card.processor", lambda: ("a processor", frozenset(features)))
    config = EngineConfig(model=str(folder), platform="host", max_num_seqs=8, seed=3, in_flight=1, block_size=32)
    plan = launch(config)
    worker = plan.start.worker
    assert (plan.max_model_len, worker.dtype, worker.max_num_seqs, plan.start.in_flight) == (128, dtype, 8, 1)
    assert plan.model.eos_token_ids == (3,)
    (group,) = worker.layout.groups
    assert (group.sites, group.tokens_per_block, worker.layout.block_size) == ((0, 1), 32, 32)
    assert plan.start.tokenizer_folder == str(folder)
    points = {selection.point for selection in plan.selections}
    assert points == {
        "platform", "ops", "attention", "executor", "nodes", "evictor", "model", "checkpoint", "tokenizer",
        "scheduling_policy", "logits_processor", "grammar",
    }  # fmt: skip
    assert all(selection.verdicts for selection in plan.selections)  # the reasons are kept
    assert tuple(selection.choice() for selection in plan.selections) == worker.choices
    check_choices(plan.registry, worker.choices)
    assert wire.decoder(CoreStart).decode(wire.encode(plan.start)) == plan.start  # it can travel


def test_several_ranks(folder: Path) -> None:
    """Needs, layout and start message are those of one rank; an executor and communicators for all are chosen."""
    plan = launch(EngineConfig(model=str(folder), tensor_parallel_size=4))
    worker = plan.start.worker
    (group,) = worker.layout.groups
    assert (worker.parallel, worker.rendezvous, group.num_kv_heads) == (Parallel(tp=4), "", 1)
    chosen = {selection.point: selection for selection in plan.selections}
    one = launch(EngineConfig(model=str(folder)))
    assert "communicator" not in {selection.point for selection in one.selections}
    assert chosen["communicator"].choice() in worker.choices
    refused = [v.candidate.name for v in chosen["executor"].verdicts if not v.fit and v.candidate.name != "ray"]
    assert refused == [s.candidate.name for s in one.selections if s.point == "executor"], "one process cannot do"
    facts = PlatformFacts("cpu", "a CPU", ("float32",))
    needs = attention_needs(plan.model, block_size=16, dtype="float32", facts=facts, size=4)
    assert {(need.num_q_heads, need.num_kv_heads) for need in needs} == {(1, 1)} and group.num_q_heads == 1
    with pytest.raises(UnsupportedModelError, match="4 does not divide over 8 ranks"):
        launch(EngineConfig(model=str(folder), tensor_parallel_size=8))


def test_defaults(folder: Path) -> None:
    plan = launch(EngineConfig(model=str(folder)))
    assert plan.start.in_flight == 2
    assert plan.model_name == str(folder)
    assert launch(EngineConfig(model=str(folder), served_model_name="m")).model_name == "m"


def test_a_drafter_is_used_only_where_one_is_named(folder: Path) -> None:
    plan = launch(EngineConfig(model=str(folder), drafter="ngram", **{"drafter.num_tokens": 3}))
    (drafter,) = (choice for choice in plan.start.worker.choices if choice.point == "drafter")
    assert drafter.driver == "ngram" and drafter.options["num_tokens"] == 3
    assert wire.decoder(CoreStart).decode(wire.encode(plan.start)) == plan.start
    with pytest.raises(ConfigError, match=r"set drafter.num_tokens to 3.*no drafter is chosen.*--drafter DRIVER"):
        launch(EngineConfig(model=str(folder), **{"drafter.num_tokens": 3}))
    with pytest.raises(DriverNotFoundError, match="ngram"):
        launch(EngineConfig(model=str(folder), drafter="ngrams"))


def test_a_drafter_that_needs_what_is_not_served_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are those of a model whose body walks; a card that reads none is taken beside another too."""
    module = ModuleType("needy")
    monkeypatch.setitem(sys.modules, "needy", module)
    config = EngineConfig(model=str(folder), drafter="needy")

    def launched(need: str, streams: tuple[int, ...]) -> set[str]:
        registry = Registry.discover(extra=(Candidate("drafter", "needy", 1, "stranger", "1", "needy:Needy"),))
        reads = classmethod(lambda cls, target, options: streams)
        needy = {"needs": frozenset({need}), "streams": reads, "body": "needy:Body"}
        vars(module)["Needy"] = type("Needy", (DrafterCard,), needy)
        return {choice.driver for choice in launch(config, registry).start.worker.choices}

    with pytest.raises(UnfitDriverError, match="needs 'hidden_states', which is not offered here"):
        launched("hidden_states", ())
    assert "needy" in launched("streams", (0,))
    monkeypatch.setattr(ModelCard, "walks", False)
    assert "needy" in launched("streams", ())
    with pytest.raises(UnfitDriverError, match=r"it reads streams between the layers of .*nobody can look on there"):
        launched("streams", (0,))


def test_trees_are_asked_of_attention(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is read: of a driver that has none, and where a window is shorter than a path may be."""
    module = ModuleType("branching")
    monkeypatch.setitem(sys.modules, "branching", module)
    branching = {"branches": classmethod(lambda cls, options: 4), "body": "branching:Body"}
    vars(module)["Branching"] = type("Branching", (DrafterCard,), branching)
    registry = Registry.discover(extra=(Candidate("drafter", "branching", 1, "stranger", "1", "branching:Branching"),))
    config = EngineConfig(model=str(folder), drafter="branching", attention="torch", dtype="float64")
    model = launch(config, registry).start.worker.model
    assert "tree" in model.attention_features
    assert with_trees(msgspec.structs.replace(model, kv_specs=()), DrafterOptions()), "heads alone attend to nothing"
    monkeypatch.setattr(attention_card, "FEATURES", attention_card.FEATURES - {"tree"})
    with pytest.raises(UnfitDriverError, match=r"attention \(full\).*feature 'tree' is not served"):
        launch(config, registry)
    windows = {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | windows))
    with pytest.raises(ConfigError, match=r"trees of up to 4 drafts.*see 4 tokens.*num_tokens to 3 or less"):
        launch(config, registry)


def test_generation_config_has_the_last_word_on_the_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert launch(EngineConfig(model=str(folder))).model.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert launch(EngineConfig(model=str(folder))).model.eos_token_ids == (3,)


def test_nothing_starts_where_no_package_reads_that_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    with pytest.raises(EngineError, match="no installed package brings 'data_parallel'; pip install --upgrade"):
        launch(EngineConfig(model=str(folder)))


def test_max_model_len(folder: Path) -> None:
    assert launch(EngineConfig(model=str(folder), max_model_len=64)).max_model_len == 64
    with pytest.raises(ConfigError, match="made for 128 positions"):
        launch(EngineConfig(model=str(folder), max_model_len=129))


def test_no_torch_and_no_body(folder: Path) -> None:
    code = (
        "import sys\n"
        "import engine.llm, engine.frontend.output_processor\n"
        "from engine.config.settings import EngineConfig\n"
        "from engine.frontend.launch import launch\n"
        f"launch(EngineConfig(model={str(folder)!r}))\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tokenizer_body_is_torch_free() -> None:
    code = "import sys, engine_reference.tokenizer_hf.tokenizer; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("asked", "stored", "dtypes", "expected"),
    [
        ("auto", "bfloat16", ("float32", "bfloat16"), "float32"),
        ("auto", "bfloat16", ("bfloat16", "float32"), "bfloat16"),
        ("auto", "float16", ("float32", "bfloat16"), "float32"),
        ("auto", "bfloat16", ("float16", "float64", "float32"), "float64"),
        ("auto", "float32", ("bfloat16", "float16"), "bfloat16"),
        ("auto", "int8", ("bfloat16",), "bfloat16"),
        ("float64", "bfloat16", ("float32", "float64"), "float64"),
    ],
)
def test_choose_dtype(asked: str, stored: str, dtypes: tuple[str, ...], expected: str) -> None:
    assert choose_dtype(asked, stored, PlatformFacts("cpu", "a CPU", dtypes)) == expected


def test_a_dtype_that_the_platform_has_not() -> None:
    with pytest.raises(ConfigError, match="a CPU computes in float32"):
        choose_dtype("float16", "float16", PlatformFacts("cpu", "a CPU", ("float32",)))


def describe(*specs: KVSpec) -> ModelDescription:
    return ModelDescription(
        architecture="X", dtype="float32", vocab_size=1, hidden_size=1, num_layers=len(specs), num_q_heads=4,
        max_model_len=1, kv_specs=specs, soft_cap=30.0, attention_features=("sinks", "alibi"),
    )  # fmt: skip


def test_attention_needs() -> None:
    full = KVSpec(kind="full", num_kv_heads=2, head_size=8)
    sliding = KVSpec(kind="sliding", num_kv_heads=1, head_size=16, sliding_window=5)
    facts = PlatformFacts("cpu", "a CPU", ("float32",))
    other = KVSpec(kind="full", num_kv_heads=2, head_size=16, num_q_heads=8, soft_cap=20.0)
    needs = attention_needs(describe(full, sliding, full, other), block_size=16, dtype="float32", facts=facts)
    assert [need.kind for need in needs] == ["full", "sliding", "full", "full"] and needs[0] == needs[2]
    assert (needs[1].sliding_window, needs[1].head_size, needs[0].soft_cap) == (5, 16, 30.0)
    assert needs[0].features == {"sinks", "alibi"}
    assert (needs[3].num_q_heads, needs[3].head_size, needs[3].soft_cap) == (8, 16, 20.0)
    assert by_kind(needs) == {"full": (needs[0], needs[3]), "sliding": (needs[1],)}


def test_windows_of_encoders_are_a_feature() -> None:
    """Which drivers that do not know them refuse."""
    whole = KVSpec(kind="encoder", num_kv_heads=2, head_size=8)
    windowed = KVSpec(kind="encoder", num_kv_heads=2, head_size=8, sliding_window=5)
    facts = PlatformFacts("cpu", "a CPU", ("float32",))
    needs = attention_needs(describe(whole, windowed), block_size=16, dtype="float32", facts=facts)
    assert needs[0].features == {"sinks", "alibi"}
    assert (needs[1].features, needs[1].sliding_window) == ({"sinks", "alibi", "two_sided"}, 5)


def test_an_encoder_whose_input_is_no_steps_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Llama.describe

    def mixed(config: dict[str, Any]) -> ModelDescription:
        cross = KVSpec(kind="cross", num_kv_heads=2, head_size=64, layer=0)
        model = plain(config)
        form = EncoderForm(max_tokens=100)
        return msgspec.structs.replace(model, kv_specs=(*model.kv_specs, cross), encoder=form)

    monkeypatch.setattr(Llama, "describe", mixed)
    found = launch(EngineConfig(model=folder, dtype="float32", max_num_batched_tokens=101)).start.worker
    cross = found.layout.groups[-1]
    assert (cross.kind, cross.table, cross.layer_bytes) == ("cross", None, 2 * 2 * 64 * 4 * 16)
    assert len(found.layout.tables) == 1 and found.layout.tables[0].kind == "full"
    with pytest.raises(ConfigError, match="max_num_batched_tokens=100 .*up to 100 tokens.*set .* to 101 or more"):
        launch(EngineConfig(model=folder, dtype="float32", max_num_batched_tokens=100))


def test_the_caches_element_type(folder: Path) -> None:
    plain = launch(EngineConfig(model=folder, dtype="float32")).start.worker
    narrow = launch(EngineConfig(model=folder, dtype="float32", kv_cache_dtype="bfloat16")).start.worker
    assert (plain.kv_cache_dtype, narrow.kv_cache_dtype, narrow.dtype) == ("float32", "bfloat16", "float32")
    assert plain.layout.page_bytes == 2 * narrow.layout.page_bytes
    size = plain.layout.groups[0].head_size
    for name, kept in (("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("int8", "int8")):
        eight = launch(EngineConfig(model=folder, dtype="float32", kv_cache_dtype=name)).start.worker
        assert eight.kv_cache_dtype == kept  # with a scale of two bytes for each of a head's vectors
        assert eight.layout.page_bytes * size * 4 == plain.layout.page_bytes * (size + 2)
    with pytest.raises(PluginError, match="a cache of float64 under queries of float32 saves no memory"):
        launch(EngineConfig(model=folder, dtype="float32", kv_cache_dtype="float64"))


def test_a_type_of_what_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no layer keeps keys and values."""
    plain = Llama.describe

    def encoder(config: dict[str, Any]) -> ModelDescription:
        spec = KVSpec(kind="encoder", num_kv_heads=2, head_size=16)
        return msgspec.structs.replace(plain(config), kv_specs=(spec,) * plain(config).num_layers)

    monkeypatch.setattr(Llama, "describe", encoder)
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8.*no layer keeps keys and values.*leave it out"):
        launch(EngineConfig(model=folder, dtype="float32", kv_cache_dtype="int8"))


def test_tokens_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's number, unless the user names one."""
    monkeypatch.setattr(PlatformCard, "step_tokens", classmethod(lambda cls: 4096))
    for given, expected in (({}, 4096), ({"max_num_batched_tokens": 0}, 4096), ({"max_num_batched_tokens": 64}, 64)):
        plan = launch(EngineConfig(model=str(folder), **given))
        assert plan.start.worker.max_num_batched_tokens == plan.config.max_num_batched_tokens == expected


class OwnWorker(PlatformCard):
    """A platform whose worker brings its own operations, attention and stored weights."""

    framework = "jax"
    worker = "nowhere:Worker"
    own_points = frozenset({"ops", "attention", "quantization", "logits_processor"})

    @classmethod
    def describe(cls) -> PlatformFacts:
        return PlatformFacts("array", "an array processor", ("float32",), framework="jax")

    @classmethod
    def tokens_per_page(cls, kind: str, block_size: int) -> int:
        return 3 * block_size


class JaxLlama(Llama):
    framework = "jax"


def test_a_platform_whose_worker_brings_its_own_drivers(folder: Path) -> None:
    extra = [
        Candidate("platform", "array", 0, "engine-array", "1.2", f"{__name__}:OwnWorker"),
        Candidate("model", "LlamaForCausalLM", 0, "engine-array", "1.2", f"{__name__}:JaxLlama"),
    ]
    registry = Registry.discover(extra)
    registry._cards.update(zip(extra, (OwnWorker, JaxLlama), strict=True))
    config = {"model": str(folder), "platform": "array"}
    plan = launch(EngineConfig(**config), registry)
    assert {s.point for s in plan.selections}.isdisjoint(OwnWorker.own_points)
    (model,) = plan.chosen(MODEL)
    assert model.candidate.distribution == "engine-array" and plan.start.worker_class == "nowhere:Worker"
    assert plan.start.worker.layout.groups[0].tokens_per_block == 48
    for more in ({"ops": "torch"}, {"attention": "torch"}, {"options": {"attention": {"splits": 4}}}):
        with pytest.raises(ConfigError, match=r"platform 'array' \(engine-array 1\.2\) brings its own"):
            launch(EngineConfig(**config, **more), registry)

"""What the card says, on machines that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flash_body import KernelBody

from engine.interfaces.attention import AttentionNeed
from engine.types.errors import ConfigError
from engine.types.model import KVSpec
from engine.types.parallel import Parallel
from engine_flashattn import card as card_module
from engine_flashattn import installed
from engine_flashattn.card import FlashAttention, FlashAttentionOptions
from engine_flashattn.installed import Facts
from engine_flashattn.table import FA2, FA3, TORCH, choose

ALL = {"fa2": "2.8.3", "fa3": "3.0.0", "fa4": "4.0.0b36", "torch": "2.13.0"}
Machine = Callable[..., None]


def need(**changes: Any) -> AttentionNeed:
    facts = {
        "kind": "full", "head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16",
        "kv_dtype": "bfloat16", "device": "cuda", "block_size": 16,
    }  # fmt: skip
    return AttentionNeed(**{**facts, **changes})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Puts the card onto a machine."""

    def put(*capabilities: tuple[int, int], versions: tuple[str, ...] = tuple(ALL), **more: Any) -> None:
        found = Facts(capabilities, {name: ALL[name] for name in versions}, **more)
        monkeypatch.setattr(card_module, "facts", lambda: found)

    return put


def test_this_machine_is_told_apart() -> None:
    """Without a GPU there is one reason, which says so; on a GPU something is said too, or nothing is wrong."""
    reasons = FlashAttention.unsupported(need())
    if not installed.facts().capabilities:
        assert reasons == ["no NVIDIA GPU was found: the driver's NVML does not answer"]
    assert FlashAttention.unsupported(need(device="cpu")) == ["it needs an NVIDIA GPU, not device cpu"]


@pytest.mark.parametrize(
    ("capability", "versions", "changes", "chosen"),
    [
        ((9, 0), ("fa2", "fa3", "fa4", "torch"), {}, "fa3"),
        ((9, 0), ("fa2", "fa3", "torch"), {"features": frozenset({"alibi"})}, "fa2"),
        ((9, 0), ("fa2", "fa3", "torch"), {"kind": "encoder"}, "fa2"),
        ((9, 0), ("fa2", "torch"), {"kind": "sliding", "sliding_window": 128, "soft_cap": 30.0}, "fa2"),
        ((8, 0), ("fa2", "fa3", "fa4", "torch"), {}, "fa2"),
        ((10, 0), ("fa2", "fa3", "fa4", "torch"), {"features": frozenset({"sinks"})}, "fa4"),
        ((12, 0), ("fa4", "torch"), {}, "torch"),
        ((9, 0), ("fa4", "torch"), {"head_size": 192}, "fa4"),
        ((10, 0), ("fa4", "torch"), {"head_size": 192}, "torch"),
    ],
)
def test_who_is_taken(machine: Machine, capability: Any, versions: Any, changes: Any, chosen: str) -> None:
    machine(capability, versions=versions)
    asked = need(**changes)
    assert FlashAttention.unsupported(asked) == []
    found = choose(asked, card_module.facts())
    assert found is not None and found.name == chosen
    said = FlashAttention.remarks(asked)
    assert f"({ALL[chosen]})" in said[0] and "never run on a GPU" in said[1]
    pages = 256 if chosen in ("fa2", "torch") else 16
    assert FlashAttention.tokens_per_page(asked) == pages
    assert any("256" in line for line in said) == (pages == 256 and asked.kind != "encoder")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kind": "mla"}, "mla"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "dtype float32"),
        ({"kv_dtype": "float16"}, "must be the same"),
        ({"features": frozenset({"kv_index"})}, "kv_index"),
        ({"features": frozenset({"tree_mask"})}, "tree_mask"),
    ],
)
def test_what_none_can(machine: Machine, changes: Any, word: str) -> None:
    machine((9, 0))
    (reason,) = FlashAttention.unsupported(need(**changes))
    assert word in reason


@pytest.mark.parametrize(
    ("asked", "features", "kinds", "level"),
    [
        ("auto", (), ("full", "sliding"), "any"),
        ("auto", ("alibi",), ("full",), "uniform"),
        ("auto", (), ("full", "encoder"), "uniform"),
        ("fa3", (), ("full",), "any"),
        ("fa2", (), ("full",), "uniform"),
    ],
)
def test_which_steps_are_captured(asked: Any, features: Any, kinds: Any, level: str) -> None:
    """Those of any rows where FlashAttention 3 serves every group of layers; that is asked before any has its cache."""
    sites = [KVSpec(kind=kind, num_kv_heads=2, head_size=128, num_q_heads=8) for kind in kinds]
    groups = [SimpleNamespace(sites=(index,), model=0) for index in range(len(sites))]
    start = SimpleNamespace(
        model=SimpleNamespace(attention_features=features), drafts=(), sites=sites, parallel=Parallel(), device="cuda",
        dtype="bfloat16", kv_cache_dtype=None, batch_invariant=False,
        layout=SimpleNamespace(groups=groups, block_size=16),
    )  # fmt: skip
    context: Any = SimpleNamespace(start=start, options=FlashAttentionOptions(implementation=asked))
    assert KernelBody(context).capture_level == level


def test_reasons_name_each_library(machine: Machine) -> None:
    """Where some are missing and the others cannot, each says why, and how to install it."""
    machine((9, 0), versions=("fa4", "torch"))
    reasons = FlashAttention.unsupported(need(features=frozenset({"alibi"}), soft_cap=5.0))
    assert len(reasons) == 5
    assert any("FlashAttention 3" in r and "pip install flash-attn-3" in r for r in reasons)
    assert any("FlashAttention 2" in r and "pip install flash-attn " in r for r in reasons)
    assert any(r.startswith("torch's varlen_attn: it has no soft cap") for r in reasons)
    machine((7, 5), versions=("fa2",))
    assert any("8.x" in r and "not 7.5" in r for r in FlashAttention.unsupported(need()))
    machine((9, 0), rocm=True)
    assert "ROCm" in FlashAttention.unsupported(need())[0]
    machine((9, 0), triton=False)
    assert "pip install triton" in FlashAttention.unsupported(need())[0]
    machine((9, 0))
    assert FlashAttention.unsupported(need(head_size=300)) and FlashAttention.unsupported(need(head_size=100))
    machine((9, 0), (8, 0), versions=("fa3",))
    assert FlashAttention.unsupported(need()) == [], "the fastest GPU is the first"


def test_pages_of_two_multiples(machine: Machine) -> None:
    machine((8, 0))
    assert FlashAttention.tokens_per_page(need(block_size=48)) == 768
    assert FlashAttention.tokens_per_page(need(block_size=512)) == 512


def test_installed_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's empty flash-attn-3 0.0.0 is none, nor is a torch whose function takes no block table."""
    versions = {"flash-attn": "2.8.3", "flash-attn-3": "0.0.0", "flash-attn-4": "4.0.0b36", "torch": "2.10.0+rocm7"}
    monkeypatch.setattr(installed, "version_of", versions.get)
    monkeypatch.setattr(installed, "_fa3_folder", lambda: None)
    monkeypatch.setattr(installed, "_takes_pages", lambda: False)
    monkeypatch.setattr(installed, "capabilities", lambda: ((9, 0),))
    installed.facts.cache_clear()
    try:
        found = installed.facts()
    finally:
        monkeypatch.undo()
        installed.facts.cache_clear()
    assert found.versions == {"fa2": "2.8.3", "fa4": "4.0.0b36"} and found.rocm


FLAGS = """# written by a build
CONFIG = {'build_flags': {'FLASHATTENTION_DISABLE_SOFTCAP': True, 'FLASHATTENTION_DISABLE_LOCAL': False,
'FLASHATTENTION_DISABLE_HDIM256': True, 'FLASHATTENTION_ENABLE_VCOLMAJOR': True}}
"""


@pytest.mark.parametrize("inside", [True, False])
def test_fa3_is_found_by_its_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool) -> None:
    """Whoever built it and whatever the distribution is called; its flags lie in the package or beside it."""
    package = tmp_path / "flash_attn_3"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "version_of", {"tokenspeed-fa3": "3.0.0.post1"}.get)
    monkeypatch.setattr(installed, "capabilities", lambda: ((9, 0),))
    for step in ("no module", "no flags", "flags"):
        installed.facts.cache_clear()
        if step != "no module":
            (package / "_C.abi3.so").write_bytes(b"")
        if step == "flags":
            ((package if inside else tmp_path) / "flash_attn_config.py").write_text(FLAGS)
        found = installed.facts()
        assert found.versions.get("fa3") == (None if step == "no module" else "tokenspeed-fa3 3.0.0.post1")
        assert found.fa3_without == (frozenset({"SOFTCAP", "HDIM256"}) if step == "flags" else frozenset())
    monkeypatch.setattr(installed, "version_of", {}.get)
    installed.facts.cache_clear()
    assert installed.facts().versions["fa3"] == "of an unknown version"
    installed.facts.cache_clear()


def test_what_a_build_left_out(machine: Machine) -> None:
    """Each feature that a flag takes away is refused for FlashAttention 3 alone, and the next library serves it."""
    machine((9, 0), versions=("fa3", "fa2"), fa3_without=frozenset({"SOFTCAP", "HDIM96"}))
    assert choose(need(), card_module.facts()) is FA3
    assert choose(need(head_size=96), card_module.facts()) is FA3, "computed by the kernels of 128"
    assert choose(need(soft_cap=30.0), card_module.facts()) is FA2
    for flag, changes, words in (
        ("SOFTCAP", {"soft_cap": 30.0}, "a soft cap"),
        ("LOCAL", {"kind": "sliding", "sliding_window": 64}, "sliding windows"),
        ("FP16", {"dtype": "float16", "kv_dtype": "float16"}, "float16"),
        ("HDIM256", {"head_size": 200}, "heads of 200 elements"),
        ("PAGEDKV", {}, "pages"),
        ("VARLEN", {}, "rows of different lengths"),
    ):
        machine((9, 0), versions=("fa3",), fa3_without=frozenset({flag}))
        reasons = FlashAttention.unsupported(need(**changes))
        assert reasons[0] == f"FlashAttention 3: this build (3.0.0) has no kernels for {words}"


def test_torch_is_read_and_not_run() -> None:
    """The text of the installed torch says what the function says of itself."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    import inspect

    assert installed._takes_pages() == ("block_table" in inspect.signature(varlen.varlen_attn).parameters)


def test_doubles_have_the_libraries_signatures() -> None:
    """Of those that are installed; torch is."""
    pytest.importorskip("triton")
    import inspect

    import flash_libraries
    import torch

    from engine_flashattn.implementations import fa4

    def arguments(function: Any) -> dict[str, tuple[Any, Any]]:
        """Kind and default of each, in order."""
        return {name: (p.kind, p.default) for name, p in inspect.signature(function).parameters.items()}

    def check(double: Any, real: Any) -> None:
        """The double's arguments are the library's, in its order, with its kinds and defaults."""
        of_double, of_real = arguments(double), arguments(real)
        assert of_double == {name: facts for name, facts in of_real.items() if name in of_double}
        assert list(of_double) == [name for name in of_real if name in of_double]

    there = installed.facts().versions
    if "torch" in there:
        from torch.nn.attention.varlen import varlen_attn

        check(flash_libraries.varlen_attn, varlen_attn)
    if "fa2" in there:
        import flash_attn

        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
            check(getattr(flash_libraries, name), getattr(flash_attn, name))
            assert len(arguments(getattr(flash_attn, name))) == len(arguments(getattr(flash_libraries, name)))
    if "fa4" in there:
        from flash_attn.cute.interface import _flash_attn_fwd

        check(flash_libraries.flash_attn_4_fwd, _flash_attn_fwd)
        assert arguments(flash_libraries.flash_attn_4_fwd).keys() >= fa4.NAMES
    if "fa3" in there:
        import flash_attn_3._C  # noqa: F401

        library = torch.ops.flash_attn_3
        for text, operator in (
            (flash_libraries.FA3_SCHEMA, library.fwd),
            (flash_libraries.FA3_METADATA_SCHEMA, library.get_scheduler_metadata),
        ):
            double, real = (
                [(argument.name, str(argument.type)) for argument in schema.arguments if argument.name != "sinks"]
                for schema in (torch._C.parse_schema(text), operator.default._schema)
            )
            loosened = {("softmax_scale", "Optional[float]"): ("softmax_scale", "float")}
            assert double == [loosened.get(argument, argument) for argument in real]


def test_an_operator_with_other_arguments_is_refused() -> None:
    pytest.importorskip("triton")
    import flash_libraries
    import torch

    from engine_flashattn.implementations import fa3, fa4

    schema = torch._C.parse_schema(flash_libraries.FA3_SCHEMA.replace("Tensor? page_table", "Tensor? pages"))
    with pytest.raises(ConfigError, match="takes no page_table"):
        fa3.bind(flash_libraries.flash_attn_3_fwd, schema, None, 132)
    with pytest.raises(ConfigError, match="takes no .*seqused_k"):
        fa4.bind(lambda q, k, v: None, divides=True)


# -- the body refuses what is named and cannot be --
def body_of(implementation: str, facts: Facts) -> Any:
    pytest.importorskip("triton")
    from engine.interfaces.context import WorkerContext
    from engine_flashattn.body import FlashAttentionBody

    class Body(FlashAttentionBody):
        def facts(self) -> Facts:
            return facts

    options = FlashAttentionOptions(implementation=implementation)  # type: ignore[arg-type]
    return Body(WorkerContext(start=None, options=options))  # type: ignore[arg-type]


def group_of(tokens: int) -> Any:
    from engine.types.kv import KVGroup

    return KVGroup(
        index=0, kind="full", sites=(0,), num_kv_heads=2, head_size=128, sliding_window=None, tokens_per_block=tokens,
        layer_bytes=tokens * 1024,
    )  # fmt: skip


def test_a_named_one_never_falls_back() -> None:
    import torch

    hopper = Facts(((9, 0),), {"fa2": "2.8.3", "torch": "2.13.0"})
    with pytest.raises(ConfigError, match=r"the GPU that is computed on \(compute capability 7.5\)"):
        body_of("auto", hopper._replace(capabilities=((7, 5),))).cache(need(), group_of(256), torch.zeros(1, 1))
    with pytest.raises(ConfigError, match="FlashAttention 3 is not installed; pip install flash-attn-3"):
        body_of("fa3", hopper)
    with pytest.raises(ConfigError, match=r"FlashAttention 3 cannot serve this GPU: .* capability 9.x, not 8.0; leave"):
        body_of("fa3", Facts(((8, 0),), {"fa3": "3.0.0"}))
    pages = torch.zeros(3, 16 * 1024, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="installed and cannot be imported"):
        body_of("fa2", hopper)
    with pytest.raises(ConfigError, match="it has no soft cap"):
        body_of("torch", hopper).cache(need(soft_cap=1.0), group_of(256), pages)
    body = body_of("torch", hopper)
    with pytest.raises(ConfigError, match="use --block-size 256"):
        body.cache(need(), group_of(16), pages)
    with pytest.raises(ConfigError, match="not a multiple of 16"):
        body.cache(need(), group_of(256), torch.zeros(3, 256 * 1024 + 8, dtype=torch.uint8)[:, : 256 * 1024])


def test_options() -> None:
    with pytest.raises(ValueError, match="implementation"):
        FlashAttentionOptions(implementation="fa9")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_splits"):
        FlashAttentionOptions(num_splits=-1)
    assert {FA2.page_multiple, TORCH.page_multiple, FA3.page_multiple} == {256, 1}

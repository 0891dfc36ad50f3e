"""The banner: what it says of a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.embedding import capacity, longest
from engine.interfaces.ops import OpsNeed
from engine.kv.layout import make_layout
from engine.plugin import Candidate, Card, Registry
from engine.plugin.card import VARIES
from engine.plugin.selection import Selection, Verdict
from engine.types.errors import ContractError
from engine.types.hooks import ChosenDriver
from engine.types.model import KVSpec
from engine.types.parallel import Parallel
from engine.types.params import SamplingDefaults
from engine.types.start import WorkerReady
from engine_kit.banner import amount, greeting, render, wrapped
from engine_kit.chosen_drivers import chosen_drivers

FULL = KVSpec(kind="full", num_kv_heads=2, head_size=8)
SLIDING = KVSpec(kind="sliding", num_kv_heads=2, head_size=8, sliding_window=32)


def candidate(name, point="ops"):
    return Candidate(point, name, 0, "engine-x", "1", "x:X")


def selection(point, name, kind="", asked=False, priority=0, unfit=()):
    verdicts = (
        *(Verdict(candidate(other, point), False, (reason,)) for other, reason in unfit),
        Verdict(candidate(name, point), True),
    )
    return Selection(point, kind, candidate(name, point), SimpleNamespace(priority=priority), None, asked, verdicts)


def launch(specs=(FULL, FULL), selections=(), max_model_len=128, **changes):
    layout = make_layout(specs, block_size=16, kv_itemsize=4, tokens_per_page={"full": 16, "sliding": 16})
    worker = SimpleNamespace(
        layout=layout, max_model_len=max_model_len, max_num_seqs=4, max_num_batched_tokens=16, dtype="float32",
        device="cpu", parallel=Parallel(), kv_cache_dtype=None,
    )  # fmt: skip
    facts = {
        "config": SimpleNamespace(data_parallel_size=1, batch_invariant=False),
        "start": SimpleNamespace(worker=worker, enable_prefix_caching=True),
        "model": SimpleNamespace(architecture="XForCausalLM", dtype="bfloat16", sampling=SamplingDefaults()),
        "files": SimpleNamespace(folder="/models/x"),
        "model_name": "x",
        "model_names": ("x", "alias"),
        "selections": selections,
        "has_chat_template": False,
        "chat_template": None,
        "registry": Registry([]),
    }
    return SimpleNamespace(**(facts | changes))


def ready(pages, **changes):
    facts = {"weight_bytes": 3 * 2**20, "cache_bytes": 2**30, "num_parameters": 7_620_000_000, "load_seconds": 1.234}
    return WorkerReady(num_pages=pages, **(facts | changes))


def test_the_facts_of_the_start():
    shown = render(launch(), ready(17), "http://127.0.0.1:8000/v1")
    assert shown.startswith("Engine ")
    for fact in (
        "x (XForCausalLM, 7.62 B parameters)",
        "/models/x",
        "float32 on cpu (stored as bfloat16)",
        "3.0 MiB, loaded in 1.23 s",
        "1.0 GiB, 256 tokens in blocks of 16",
        "up to 128 tokens each; 2.0 at once at full length, 4 at most",
        "serves x, alias on http://127.0.0.1:8000/v1",
    ):
        assert fact in shown
    assert "serves" not in render(launch(), ready(17), None)


def test_three_lines_are_enough():
    at = "http://127.0.0.1:8000/v1"
    model, device, address = greeting(launch(has_chat_template=True), ready(17), at).split("\n")
    assert model == "x: XForCausalLM, 7.62 B parameters, with a chat template"
    assert device == "float32 on cpu, KV cache of 1.0 GiB for 256 tokens, 128 tokens a request"
    assert address == f"serves x, alias on {at}"
    assert greeting(launch(), ready(17), at, 3).endswith(f"{at}, by 3 API processes")
    assert greeting(launch(), ready(17), None).split("\n") == ["x: XForCausalLM, 7.62 B parameters", device]
    assert "start with --max-model-len 80" in greeting(launch(), ready(6), None)
    assert greeting(launch(), ready(17), at, 3, verbose=True) == render(launch(), ready(17), at, 3)


@pytest.mark.parametrize(
    ("given", "says"), [(None, "by its chat template"), ("{{ x }}", "template of --chat-template")]
)
def test_a_model_that_can_chat(given, says):
    assert says in render(launch(has_chat_template=True, chat_template=given), ready(17), None)
    assert "chat" not in render(launch(), ready(17), None)


@pytest.mark.parametrize("width", [1, 30, 60, 80, 200])
def test_on_narrow_terminals_no_word_is_broken_and_columns_stay(width):
    reason = "it needs an NVIDIA GPU with at least so much memory as nobody has"
    chosen = (selection("attention", "torch", unfit=[("x", reason)]), selection("logits_processor", "y"))
    plan = launch(selections=chosen)
    text = render(plan, ready(6), "http://127.0.0.1:8000/v1")
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    longest_word = max(map(len, text.split()))
    assert all(len(line) <= max(width, 28 + longest_word) for line in shown.split("\n"))
    if width == 200:
        assert shown == text
    if width == 60:
        assert "attention         torch: auto, priority 0; unfit: x: it\n" + " " * 22 + "needs" in shown


def test_a_cache_that_is_too_small_for_the_longest_request():
    """How much it needs, and the largest --max-model-len that fits; nothing of the sort where it fits."""
    page = launch().start.worker.layout.page_bytes
    assert "has room for one of" not in render(launch(), ready(9), None)  # 8 pages of 16 tokens are 128
    text = render(launch(), ready(6), None)
    assert f"one of 80 tokens alone: start with --max-model-len 80, or with a cache of {amount(9 * page)}" in text
    one_left = launch((FULL, SLIDING), max_model_len=4000)
    need = longest(one_left, ready(6))
    assert longest(one_left, ready(need[1] + 1))[0] == 4000 > longest(one_left, ready(need[1]))[0] > need[0]
    fits = launch((FULL, SLIDING), max_model_len=need[0])
    assert longest(fits, ready(6))[0] == need[0]
    fits.start.worker.layout = SimpleNamespace(groups=(), tables=())
    assert longest(fits, ready(2)) == (need[0], 0)


def test_what_is_broken_is_told():
    assert "broken" not in render(launch(), ready(9), None)
    moon = Candidate("evictor", "moon", 0, "engine-moon", "1", "a:A")
    broken = Registry([], quarantine={moon: SimpleNamespace(found="no", remedy="")})
    text = render(launch(registry=broken), ready(9), None)
    assert text.splitlines()[-1].split() == ["evictor", "'moon'", "engine-moon", "1:", "no"]
    assert "engine plugins doctor" in text
    assert "1 broken plugins are left out" in greeting(launch(registry=broken), ready(9), None)


def test_several_cores_are_told():
    plan = launch(config=SimpleNamespace(data_parallel_size=3, batch_invariant=False))
    plan.start.worker.parallel = Parallel(tp=2)
    shown = " ".join(render(plan, ready(17), None).split())
    assert "ranks 3 engine cores, each with the whole model, divided over 2 processes each: each layer over" in shown
    assert "256 tokens in blocks of 16 on each of 3 ranks" in shown and "4 at most on each of 3 ranks" in shown
    assert "rank" not in render(launch(), ready(17), None)


def test_stages_are_told():
    plan = launch()
    plan.model.num_layers = 7
    plan.start.worker.parallel = Parallel(pp=3)
    shown = " ".join(render(plan, ready(17), None).split())
    assert "workers the model is divided over 3 processes: 3 pipeline stages of 2, 3, 2 layers" in shown
    assert "each layer" not in shown
    plan.start.worker.parallel = Parallel(pp=2, tp=2, split=(3, 4))
    shown = " ".join(render(plan, ready(17), None).split())
    assert "over 4 processes: 2 pipeline stages of 3, 4 layers; each layer over 2 ranks" in shown


def test_who_serves_each_point_and_why():
    plan = launch(selections=(
        selection("ops", "triton", "linear", priority=20),
        selection("ops", "torch", "embed", unfit=[("triton", "has no embed")]),
        selection("ops", "torch", "norm", unfit=[("triton", "has no norm")]),
        selection("attention", "torch", "full", asked=True),
        selection("attention", "torch", "sliding", asked=True),
        selection("model", "XForCausalLM"),
        selection("checkpoint", "tiny", unfit=[("safetensors", "does not claim it")]),
        selection("evictor", "lru", priority=3, unfit=[("a", "r" * 99), ("b", "no"), ("c", "no"), ("d", "no")]),
    ))  # fmt: skip
    text = render(plan, ready(17), None)
    rows = {" ".join(line.split()) for line in text.split("\n")}
    assert "ops (linear) triton: auto, priority 20" in rows
    assert "ops (embed, norm) torch: auto, priority 0; unfit: triton: has no norm" in rows
    assert "attention torch: asked for" in rows
    assert "model XForCausalLM: it has the model's architecture" in rows
    assert "checkpoint tiny: it claims the model" in rows
    assert f"evictor lru: auto, priority 3; unfit: a: {'r' * 59}…, b: no and 2 more" in rows
    assert len(text.split("\n")) < 24


def test_prefix_caching_off_is_said():
    plan = launch()
    plan.start.enable_prefix_caching = False
    assert "prefix caching off" in render(plan, ready(17), None)


@pytest.mark.parametrize("specs", [(FULL,), (FULL, FULL), (FULL, SLIDING), (SLIDING,)])
@pytest.mark.parametrize("length", [1, 120, 128, 1000])
def test_what_the_cache_holds(specs, length):
    plan = launch(specs, max_model_len=length)
    pages = sum(_pages(group, length, 16) for group in plan.start.worker.layout.groups)
    tokens, at_once = capacity(plan, ready(17))
    assert at_once == pytest.approx(16 / pages)
    assert tokens == (256 if set(specs) == {FULL} else 16 * length // pages)


def _pages(group, length, chunk):
    """The most pages that one request holds at once, wherever its chunks begin."""
    most = 0
    for start in range(length):
        first = 0 if group.sliding_window is None else max(0, start - group.sliding_window + 1)
        end = min(start + chunk, length)
        most = max(most, (end - 1) // group.tokens_per_block - first // group.tokens_per_block + 1)
    return most


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (643 * 1024, "643 KiB"), (2**40, "1.0 TiB")]
)
def test_amounts(size, text):
    assert amount(size) == text


def test_hook_plugins():
    assert "hooks" not in render(launch(), ready(17), None)
    one, two = (Candidate("hooks.frontend", name, 0, f"dist-{name}", "1.0", "x") for name in ("trace", "bad"))
    registry = Registry([one, two, Candidate("hooks.core", "count", 0, "dist", "2", "x")])
    registry.quarantine[two] = ContractError("use it", "it is misspelt", "mend it")
    shown = render(launch(registry=registry), ready(17), None)
    assert "  hooks\n    frontend  trace (dist-trace 1.0)\n    core      count (dist 2)" in shown
    assert "hooks.frontend 'bad'  dist-bad 1.0: it is misspelt" in shown


def test_the_drivers_as_data():
    selections = [
        selection("ops", "fast", "norm", priority=10, unfit=[("gpu", "there is no GPU")]),
        selection("ops", "plain", "rope"),
        selection("ops", "fast", "linear", priority=10),
        selection("evictor", "lru", asked=True),
    ]
    facts = {"distribution": "engine-x", "version": "1"}
    assert chosen_drivers(selections) == [
        ChosenDriver(
            point="ops",
            driver="fast",
            kinds=("norm", "linear"),
            why="auto, priority 10; unfit: gpu: there is no GPU",
            **facts,
        ),
        ChosenDriver(point="ops", driver="plain", kinds=("rope",), why="auto, priority 0", **facts),
        ChosenDriver(point="evictor", driver="lru", why="asked for", **facts),
    ]


def test_it_says_what_invariance_costs() -> None:
    class Careful(Card):
        batch_invariant = True

        @classmethod
        def remarks(cls, need):
            return ["made for processors", *(["slower"] if need.batch_invariant else [])]

    need = OpsNeed(operation="linear", dtype="float32", device="cpu", batch_invariant=True)
    hasty, unfit = candidate("hasty", "ops"), candidate("unfit", "ops")
    verdicts = (Verdict(hasty, False, (VARIES,)), Verdict(unfit, False, (VARIES, "no such device")))
    chosen = Selection("ops", "linear", candidate("careful", "ops"), Careful, None, False, verdicts, need)
    plan = launch(config=SimpleNamespace(data_parallel_size=1, batch_invariant=True), selections=(chosen,))
    text = render(plan, ready(10), None)
    assert "a row has the same bits in any batch; left out for it: ops 'hasty'; slower\n" in text

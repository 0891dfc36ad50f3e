"""The list of plugins: what it allows and denies, what it is wrong about, and that nothing denied is imported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.plugin import HookRelay, PluginList, Registry, choose, choose_one
from engine.plugin.candidate import Candidate, Problem
from engine.plugin.choosing import default_model
from engine.plugin.options import check_hook_options
from engine.plugin.points import CHECKPOINT, EVICTOR, MODEL
from engine.types.errors import ConfigError, DriverDeniedError, DuplicateDriverError, PluginError, UnsupportedModelError
from engine_inspect.why import explain

LRU = Candidate("evictor", "lru", 0, "engine", "1.0", "engine_reference.evictor_lru:LRUEvictor")
MOON = Candidate("evictor", "moon", 0, "engine_Moon", "2.0", "module_that_is_not_there:Moon")
FLASH = Candidate("attention", "flash", 0, "engine-flash", "3.0", "module_that_is_not_there:Flash")
HEARD = Candidate("hooks.core", "heard", 0, "engine-Moon", "2.0", "module_that_is_not_there:Hooks")
SAID = replace(HEARD, point="hooks.worker")
HELLO = Candidate("commands", "hello", 0, "engine-flash", "3.0", "module_that_is_not_there:Hello")
ALL = (LRU, MOON, FLASH, HEARD, SAID, HELLO)


def left(text: str, found=ALL) -> set[Candidate]:
    registry = Registry(found, plugins=PluginList(text))
    points = {candidate.point for candidate in found}
    offered = {c for point in points for c in (*registry.candidates(point), *registry.outdated(point))}
    assert offered | set(registry.denied) == set(found) and not offered & set(registry.denied)
    return offered


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ALL),
        (" , ", ALL),
        ("engine", [LRU]),
        ("engine-moon", [LRU, MOON, HEARD, SAID]),
        ("ENGINE.moon, engine_flash", ALL),
        ("-engine-moon", [LRU, FLASH, HELLO]),
        ("evictor:moon", [LRU, MOON]),
        ("-evictor:moon", [LRU, FLASH, HEARD, SAID, HELLO]),
        ("engine-moon,-hooks:heard", [LRU, MOON]),
        ("-hooks.worker:heard", [LRU, MOON, FLASH, HEARD, HELLO]),
        ("-commands:hello,-evictor:lru", [MOON, FLASH, HEARD, SAID]),
        ("-engine", [MOON, FLASH, HEARD, SAID, HELLO]),
    ],
)
def test_what_is_left(text, expected):
    assert left(text) == set(expected)


def test_a_point_goes_by_its_flag_too():
    tiny = Candidate("checkpoint", "tiny", 0, "engine-tiny", "1", "a:B")
    assert left("-load-format:tiny", (LRU, tiny)) == {LRU}


def test_majors_that_are_not_served_can_be_named():
    old = replace(MOON, major=7)
    assert left("-engine-moon", (LRU, old)) == {LRU} and left("engine-moon", (LRU, old)) == {LRU, old}


@given(
    st.lists(st.sampled_from(["engine-moon", "engine-flash", "evictor:moon", "hooks:heard"]), unique=True),
    st.lists(st.sampled_from(["engine", "engine-moon", "attention:flash", "hooks.core:heard"]), unique=True),
)
def test_a_list_leaves_what_is_allowed_without_what_is_denied(allowed, denied):
    def names(entries, candidate):
        own = candidate.distribution.lower().replace("_", "-")
        points = {candidate.point, candidate.point.partition(".")[0]}
        return own in entries or any(f"{point}:{candidate.name}" in entries for point in points)

    expected = {
        c for c in ALL if (not allowed or c.distribution == "engine" or names(allowed, c)) and not names(denied, c)
    }
    try:
        found = left(",".join([*allowed, *(f"-{entry}" for entry in denied)]))
    except ConfigError as error:
        assert "other entries of the list deny it" in error.found
        assert any(not [c for c in expected if names([entry], c)] for entry in allowed)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("text", "asked", "found", "remedy"),
    [
        ("engine-mon", "allow 'engine-mon' with --plugins engine-mon", "that do: engine, engine-Moon", "engine-Moon"),
        ("-engine-mon", "deny 'engine-mon' with --plugins -engine-mon", "no installed distribution", "engine-Moon"),
        ("flash", "allow 'flash'", "no installed distribution of this name", "write attention:flash"),
        ("-heard", "deny 'heard'", "no installed distribution of this name", "write hooks:heard"),
        ("engine-xgrammar", "allow 'engine-xgrammar'", "those that do:", "pip install engine-xgrammar"),
        ("numpy", "allow 'numpy'", "those that do:", "take it out"),
        ("evictor:mon", "allow 'evictor:mon'", "evictor has: lru, moon", "did you mean 'evictor:moon'?"),
        ("attention:triton", "allow 'attention:triton'", "attention has: flash", "pip install engine-cuda"),
        ("-atention:flash", "deny 'atention:flash'", "there is no point 'atention'", "did you mean 'attention'"),
        ("hooks:herd", "allow 'hooks:herd'", "hooks has: heard", "did you mean 'hooks:heard'?"),
        ("engine,-", "use --plugins engine,-", "'-' names no plugin", "write distributions or POINT:DRIVER"),
        ("evictor:", "use --plugins evictor:", "'evictor:' names no plugin", "write"),
        (":moon", "use --plugins :moon", "':moon' names no plugin", "write"),
        ("engine-moon,-engine-moon", "allow 'engine-moon'", "deny it: '-engine-moon'", "take one of them out"),
        ("evictor:moon,-engine-moon", "allow 'evictor:moon'", "deny it: '-engine-moon'", "take one of them out"),
    ],
)  # fmt: skip
def test_what_a_list_can_be_wrong_about(text, asked, found, remedy):
    with pytest.raises(ConfigError) as caught:
        Registry(ALL, plugins=PluginList(text))
    error = caught.value
    assert asked in error.asked and found in error.found and remedy in error.remedy


def test_an_error_says_where_the_list_was_set():
    with pytest.raises(ConfigError, match=r"--plugins engine-mon \(environment ENGINE_PLUGINS\)"):
        Registry(ALL, plugins=PluginList("engine-mon", "environment ENGINE_PLUGINS"))


def test_a_distribution_whose_plugins_cannot_be_read_may_be_named():
    problem = Problem("engine_broken 1.0", "its metadata cannot be read", "reinstall")
    assert Registry(ALL, (problem,)).problems == (problem,)
    assert Registry(ALL, (problem,), plugins=PluginList("-engine-broken")).problems == ()
    assert Registry(ALL, (problem,), plugins=PluginList("engine-moon")).problems == ()
    assert Registry(ALL, (problem,), plugins=PluginList("engine-broken")).problems == (problem,)


# -- what follows the list ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ("-engine-moon", "'-engine-moon' denies it", "take that entry out of the list, or name another"),
        ("-evictor:moon", "'-evictor:moon' denies it", "take that entry out of the list, or name another"),
        ("engine", "no entry allows it", "add engine_Moon to the list, or name another"),
    ],
)
def test_asking_for_what_is_denied_says_which_list_denies_it(text, found, remedy):
    registry = Registry(ALL, plugins=PluginList(text, "file engine.yaml:3"))
    with pytest.raises(DriverDeniedError) as caught:
        choose_one(registry, EVICTOR, None, "moon")
    error = caught.value
    assert error.asked == "use driver 'moon' for evictor"
    assert error.found == f"engine_Moon 2.0 offers it, but {found}: --plugins {text} (file engine.yaml:3)"
    assert error.remedy == remedy
    assert (error.point, error.driver, error.distribution) == ("evictor", "moon", "engine_Moon 2.0")


def test_auto_passes_over_what_is_denied_and_tells(playground):
    playground.module("pg_best", "raise RuntimeError('denied drivers are never imported')")
    best = Candidate("evictor", "best", 0, "pg-best", "1.0", "pg_best:Best")
    registry = Registry([LRU, best], plugins=PluginList("-pg-best"))
    chosen = choose_one(registry, EVICTOR, None)
    assert chosen.candidate == LRU and not registry.quarantine and playground.imported() == set()
    told = {outcome.candidate: outcome for outcome in explain(registry, "evictor", [chosen])}
    assert told[best].verdict == "denied" and told[best].reasons == ("'-pg-best' denies it: --plugins -pg-best",)
    assert [str(v) for v in chosen.verdicts if v.candidate == best] == [
        "best (pg-best 1.0): denied: '-pg-best' denies it: --plugins -pg-best"
    ]


def test_where_nothing_is_left_the_error_says_what_was_denied():
    registry = Registry([LRU], plugins=PluginList("-evictor:lru"))
    with pytest.raises(PluginError, match=r"none of the installed drivers fits: lru .*: denied: '-evictor:lru'"):
        choose_one(registry, EVICTOR, None)
    with pytest.raises(ConfigError, match="tiny .*: denied: no entry allows it: --plugins engine"):
        default_model(
            Registry(
                [LRU, Candidate("checkpoint", "tiny", 0, "engine-tiny", "1", "a:B")], plugins=PluginList("engine")
            ),
            CHECKPOINT,
        )


def test_a_denied_architecture_is_told_of():
    llama = Candidate("model", "LlamaForCausalLM", 0, "engine", "1.0", "a:B")
    registry = Registry([llama], plugins=PluginList("-model:LlamaForCausalLM"))
    with pytest.raises(DriverDeniedError, match="'-model:LlamaForCausalLM' denies it"):
        choose(registry, MODEL, {"LlamaForCausalLM": None})
    with pytest.raises(UnsupportedModelError):
        choose(registry, MODEL, {"OtherForCausalLM": None})


def test_denying_one_of_two_of_a_name_leaves_the_other():
    twice = [MOON, replace(MOON, distribution="fork")]
    with pytest.raises(DuplicateDriverError, match="or deny one: --plugins -fork"):
        Registry(twice).find("evictor", "moon")
    assert Registry(twice, plugins=PluginList("-fork")).find("evictor", "moon") == MOON


def test_hook_plugins_follow_it_and_options_for_them_say_so(playground):
    playground.module("pg_hooks", "raise RuntimeError('denied plugins are never imported')")
    hook = Candidate("hooks.core", "a-hook", 0, "pg-hooks", "1.0", "pg_hooks:Hooks")
    registry = Registry([hook], plugins=PluginList("-hooks:a-hook"))
    assert HookRelay("core", registry).plugins == () and not registry.quarantine and playground.imported() == set()
    with pytest.raises(DriverDeniedError) as caught:
        check_hook_options(registry, {"a_hook": {"most": 3}})
    assert caught.value.asked == "use plugin 'a-hook' for hooks.core" and "'-hooks:a-hook'" in caught.value.found


def test_following_a_list_again_keeps_the_registry():
    registry = Registry(ALL)
    assert registry.following(PluginList()) is registry
    followed = registry.following(PluginList("engine", "flag --plugins"))
    assert set(followed.denied) == {*ALL} - {LRU} and followed.following(PluginList("engine", "elsewhere")) is followed
    assert followed.following(PluginList()) is followed

"""The errors about plugins, each message read whole: point, driver, distribution, version, cause, remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import BaseModel

from engine.interfaces.evictor import EvictorCard
from engine.plugin import HookRelay, PluginList, Registry, choose_one, hookimpl
from engine.plugin.candidate import Candidate
from engine.plugin.options import check_hook_options
from engine.plugin.points import ATTENTION, EVICTOR, POINTS
from engine.types.errors import (
    ContractError,
    DriverDeniedError,
    DriverImportError,
    DriverNotFoundError,
    DuplicateDriverError,
    IncompatibleDriverError,
    OptionsError,
    PluginError,
    UnfitDriverError,
    rebuild_error,
)

LRU = Candidate("evictor", "lru", 0, "engine", "0.1.0", f"{__name__}:Sound")
HOOK = Candidate("hooks.core", "ears", 0, "engine-ears", "2.0", f"{__name__}:Ears")


class Sound(EvictorCard):
    body = f"{__name__}:Body"

    class Options(BaseModel):
        depth: int = 3


class NoBody(EvictorCard):
    body = ""


class NoModule(EvictorCard):
    body = "a_body_that_is_not_there:Body"


class NoClass(EvictorCard):
    body = f"{__name__}:LRU"


class Choosy(EvictorCard):
    @classmethod
    def unsupported(cls, need):
        return ["the moon is not full", "it rains"]


class Raises(EvictorCard):
    @classmethod
    def unsupported(cls, need):
        raise LookupError("no moon")


RAISED_AT = Raises.unsupported.__code__.co_firstlineno + 2


class Answers(EvictorCard):
    @classmethod
    def unsupported(cls, need):
        return "no"


class Later(EvictorCard):
    requires_minor = 9


class Body:
    def __init__(self, context):
        raise ZeroDivisionError("no room")


class Ears:
    class Options(BaseModel):
        most: int = 1

    def __init__(self, options): ...

    @hookimpl
    def step_dome(self, stats): ...


def moon(value: str, **changes) -> Registry:
    return Registry([LRU, replace(Candidate("evictor", "moon", 0, "engine-moon", "1.2", value), **changes)])


def here(name: str) -> str:
    return f"{__name__}:{name}"


ASKED = "use driver 'moon' for evictor"
BY_AUTHOR = "its author has to return a list of reasons, empty where it fits"
FAMILY = {
    "not found": (
        lambda: choose_one(Registry([LRU]), EVICTOR, None, "lrru"),
        DriverNotFoundError,
        "use driver 'lrru' for evictor",
        "no installed distribution offers it; installed: lru (engine 0.1.0)",
        "did you mean 'lru'?",
    ),
    "not installed": (
        lambda: choose_one(Registry([]), ATTENTION, None, "flash"),
        DriverNotFoundError,
        "use driver 'flash' for attention",
        "no installed distribution offers it; installed: none",
        "pip install engine-flashattn",
    ),
    "denied": (
        lambda: choose_one(moon("a:B").following(PluginList("-engine-moon", "flag --plugins")), EVICTOR, None, "moon"),
        DriverDeniedError,
        ASKED,
        "engine-moon 1.2 offers it, but '-engine-moon' denies it: --plugins -engine-moon (flag --plugins)",
        "take that entry out of the list, or name another",
    ),
    "duplicate": (
        lambda: choose_one(moon("a:B", name="lru"), EVICTOR, None, "lru"),
        DuplicateDriverError,
        "use driver 'lru' for evictor",
        f"it is offered more than once: {here('Sound')} by engine 0.1.0 and a:B by engine-moon 1.2",
        "uninstall one of them: pip uninstall engine or pip uninstall engine-moon; or deny one: --plugins -engine-moon",
    ),
    "import failed": (
        lambda: choose_one(moon("a_module_that_is_not_there:Card"), EVICTOR, None, "moon"),
        DriverImportError,
        "load driver 'moon' for evictor",
        "importing a_module_that_is_not_there:Card of engine-moon 1.2 raised ModuleNotFoundError: No module named "
        "'a_module_that_is_not_there'",
        "reinstall or upgrade it: pip install --force-reinstall engine-moon",
    ),
    "body import failed": (
        lambda: choose_one(moon(here("NoModule")), EVICTOR, None, "moon").load_body(),
        DriverImportError,
        "load driver 'moon' for evictor",
        "importing its body a_body_that_is_not_there:Body of engine-moon 1.2 raised ModuleNotFoundError: No module "
        "named 'a_body_that_is_not_there'",
        "reinstall or upgrade it: pip install --force-reinstall engine-moon",
    ),
    "older major": (
        lambda: choose_one(replace(moon("a:B"), points={**POINTS, "evictor": replace(EVICTOR, majors=(1, 2))}),
                       EVICTOR, None, "moon"),
        IncompatibleDriverError,
        ASKED,
        "engine-moon 1.2 speaks v0, this core serves v1, v2",
        "pip install --upgrade engine-moon",
    ),
    "newer major": (
        lambda: choose_one(moon("a:B", major=7), EVICTOR, None, "moon"),
        IncompatibleDriverError,
        ASKED,
        "engine-moon 1.2 speaks v7, this core serves v0",
        "pip install --upgrade engine",
    ),
    "newer minor": (
        lambda: choose_one(moon(here("Later")), EVICTOR, None, "moon"),
        IncompatibleDriverError,
        ASKED,
        f"engine-moon 1.2 needs interface 0.9, this core has 0.{EVICTOR.minor}",
        "pip install --upgrade engine",
    ),
    "no card": (
        lambda: choose_one(moon(here("Body")), EVICTOR, None, "moon"),
        ContractError,
        ASKED,
        f"{here('Body')} of engine-moon 1.2 is {Body!r}, not a subclass of engine.interfaces.evictor:EvictorCard",
        "its author has to name the card class in the entry point",
    ),
    "unsupported raises": (
        lambda: choose_one(moon(here('Raises')), EVICTOR, None, "moon"),
        ContractError,
        ASKED,
        f"its unsupported() raised LookupError: no moon at {__file__}:{RAISED_AT} "
        f"({here('Raises')} of engine-moon 1.2)",
        BY_AUTHOR,
    ),
    "unsupported answers": (
        lambda: choose_one(moon(here("Answers")), EVICTOR, None, "moon"),
        ContractError,
        ASKED,
        f"its unsupported() answered 'no', not a list of strings ({here('Answers')} of engine-moon 1.2)",
        BY_AUTHOR,
    ),
    "no body": (
        lambda: choose_one(moon(here("NoBody")), EVICTOR, None, "moon").load_body(),
        ContractError,
        "load driver 'moon' for evictor",
        f"its card {here('NoBody')} of engine-moon 1.2 names no body: ''",
        'its author has to set body = "package.module:Class" (or bodies) on the card',
    ),
    "body is no class": (
        lambda: choose_one(moon(here("NoClass")), EVICTOR, None, "moon").load_body(),
        ContractError,
        "load driver 'moon' for evictor",
        f"its body {here('LRU')} of engine-moon 1.2 is {LRU!r}, not a class",
        "its author has to name a class",
    ),
    "body raises": (
        lambda: choose_one(moon(here("Sound")), EVICTOR, None, "moon").build(None),
        ContractError,
        "build driver 'moon' for evictor",
        f"its body {here('Body')} of engine-moon 1.2 raised ZeroDivisionError: no room",
        "the log has the traceback; mend what it names, name another driver, or report it to its author",
    ),
    "unfit": (
        lambda: choose_one(moon(here("Choosy")), EVICTOR, None, "moon"),
        UnfitDriverError,
        ASKED,
        "engine-moon 1.2 says: the moon is not full; it rains",
        "name another driver, or leave --evictor out to have one chosen",
    ),
    "unknown option": (
        lambda: choose_one(moon(here("Sound")), EVICTOR, None, "moon", {"dept": 4}),
        OptionsError,
        "set evictor.dept to 4",
        "the chosen driver 'moon' (engine-moon 1.2) has no such option",
        "did you mean 'depth'?",
    ),
    "bad option": (
        lambda: choose_one(moon(here("Sound")), EVICTOR, None, "moon", {"depth": "deep"}),
        OptionsError,
        "set options of driver 'moon' for evictor",
        "engine-moon 1.2 says: depth: Input should be a valid integer, unable to parse string as an integer "
        "(given: 'deep')",
        "its options: depth (int, default 3)",
    ),
    "hook misspelt": (
        lambda: HookRelay("core", Registry([HOOK]), options={"ears": {"most": 2}}),
        ContractError,
        "use plugin 'ears' for hooks.core",
        f"it implements 'step_dome', which is no hook of core ({here('Ears')} of engine-ears 2.0)",
        "did you mean 'step_done'?",
    ),
    "hook import failed": (
        lambda: check_hook_options(Registry([replace(HOOK, value="no_ears:Ears")]), {"ears": {"most": 2}}),
        DriverImportError,
        "load plugin 'ears' for hooks.core",
        "importing no_ears:Ears of engine-ears 2.0 raised ModuleNotFoundError: No module named 'no_ears'",
        "reinstall or upgrade it: pip install --force-reinstall engine-ears",
    ),
    "hook not found": (
        lambda: check_hook_options(Registry([HOOK]), {"eers": {"most": 2}}),
        DriverNotFoundError,
        "set hooks.eers.most",
        "no installed distribution has a hook plugin of this name; installed: ears (engine-ears 2.0)",
        "did you mean 'ears'?",
    ),
    "hook's bad option": (
        lambda: check_hook_options(Registry([HOOK]), {"ears": {"most": "x"}}),
        OptionsError,
        "set options of plugin 'ears' for hooks.core",
        "engine-ears 2.0 says: most: Input should be a valid integer, unable to parse string as an integer "
        "(given: 'x')",
        "its options: most (int, default 1)",
    ),
}  # fmt: skip
"""What is done, the error's class, and its three parts."""


@pytest.mark.parametrize("case", FAMILY)
def test_the_whole_message(case):
    do, kind, asked, found, remedy = FAMILY[case]
    with pytest.raises(PluginError) as caught:
        do()
    error = caught.value
    assert (type(error), error.asked, error.found, error.remedy) == (kind, asked, found, remedy)
    assert str(error) == f"{asked}; {found}; {remedy}"
    assert error.point and error.driver
    assert error.point in str(error) or error.point.partition(".")[0] in str(error)
    assert error.driver in str(error)
    if kind is not DriverNotFoundError:  # where nobody has it, there is no distribution to name
        assert error.distribution and all(part in str(error) for part in error.distribution.split(", "))
    again = rebuild_error(error.parts)
    assert (type(again), str(again)) == (kind, str(error))

"""Options of hook plugins: from every source to the plugin, and what is wrong with them before anything starts."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, model_validator

from engine.config.settings import EngineConfig
from engine.config.sources import Key, gather
from engine.plugin import HookRelay, Registry, hookimpl
from engine.plugin.options import check_hook_options
from engine.types.errors import ConfigError, DriverImportError, DriverNotFoundError, OptionsError


class Limits(BaseModel):
    most: int = 3
    names: list[str] = []


class Required(BaseModel):
    key: str


class WithOptions:
    Options = Limits

    def __init__(self, options):
        self.options = options

    @hookimpl
    def admit(self, request):
        raise ValueError(self.options.most)


class InCore(WithOptions):
    class Options(BaseModel):
        depth: int = 0

    admit = None

    @hookimpl
    def step_done(self, stats):
        pass


class Needs(WithOptions):
    Options = Required


class Raises(WithOptions):
    class Options(BaseModel):
        @model_validator(mode="after")
        def check(self):
            raise RuntimeError("no sky")


class Plain:
    @hookimpl
    def admit(self, request):
        pass


def registry(candidate, **classes):
    return Registry([candidate("hooks.frontend", n.replace("_", "-"), f"{__name__}:{c}") for n, c in classes.items()])


def limit(relay) -> int:
    (one,) = relay.admit.deciding
    return one.function.__self__.options.most


def test_defaults_and_values(candidate):
    installed = registry(candidate, rate_limit="WithOptions")
    assert limit(HookRelay("frontend", installed)) == 3
    given = check_hook_options(installed, {"rate_limit": {"most": "7"}})
    assert limit(HookRelay("frontend", installed, options=given)) == 7


def test_a_name_in_two_processes_shares_its_options(candidate):
    both = [
        candidate("hooks.frontend", "both", f"{__name__}:WithOptions"),
        candidate("hooks.core", "both", f"{__name__}:InCore"),
    ]
    given = check_hook_options(Registry(both), {"both": {"most": "7", "depth": "2"}})
    assert limit(HookRelay("frontend", Registry(both), options=given)) == 7
    with pytest.raises(OptionsError, match="did you mean 'depth'"):
        check_hook_options(Registry(both), {"both": {"dept": 1}})


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"rate_limit": {"mosst": 1}}, OptionsError, r"hooks\.rate_limit\.mosst.*did you mean 'most'"),
        ({"rate_limit": {"most": "many"}}, OptionsError, "most: .*given: 'many'"),
        ({"rate_limits": {"most": 1}}, DriverNotFoundError, "did you mean 'rate_limit'"),
        ({"plain": {"most": 1}}, OptionsError, "takes no options"),
        ({"gone": {"most": 1}}, DriverImportError, "Gone"),
    ],
)
def test_what_is_wrong_stops_the_start(candidate, given, error, says):
    installed = registry(candidate, rate_limit="WithOptions", plain="Plain", gone="Gone")
    with pytest.raises(error, match=says):
        check_hook_options(installed, given)


def test_who_gives_options_asks_for_the_plugin(candidate):
    installed = registry(candidate, needs="Needs")
    assert HookRelay("frontend", installed).admit is None  # nobody asked for it
    [error] = installed.quarantine.values()
    assert "key: Field required" in str(error) and "'needs'" in str(error)
    with pytest.raises(OptionsError, match="key"):
        HookRelay("frontend", installed, options={"needs": {}})


def test_options_that_raise_what_they_must_not_leave_the_plugin_out(candidate):
    installed = registry(candidate, raises="Raises")
    assert HookRelay("frontend", installed).admit is None
    [error] = installed.quarantine.values()
    assert "RuntimeError: no sky" in str(error)


def test_every_source_names_them(tmp_path):
    expected = {Key("options", "hooks.rate_limit", "most"): "5"}
    assert gather({"hooks.rate-limit.most": "5"}, environ={}).values == expected
    merged = gather({}, environ={"ENGINE_HOOKS__RATE_LIMIT__MOST": "5"})
    assert merged.values == expected
    assert merged.origins == {next(iter(expected)): "environment ENGINE_HOOKS__RATE_LIMIT__MOST"}
    for text in (
        "hooks.rate-limit.most: '5'",
        "hooks:\n  rate-limit:\n    most: '5'",
        "options:\n  hooks:\n    rate-limit:\n      most: '5'",
        "options:\n  hooks.rate-limit:\n    most: '5'",
    ):
        (tmp_path / "engine.yaml").write_text(text + "\n")
        merged = gather({}, str(tmp_path / "engine.yaml"), environ={})
        assert merged.values == expected, text
        assert merged.origins == {next(iter(expected)): f"file {tmp_path}/engine.yaml:{len(text.splitlines())}"}
    flags = gather({"hooks.rate_limit.most": "5"}, environ={})
    assert list(flags.origins.values()) == ["flag --hooks.rate-limit.most"]
    assert EngineConfig(**{"hooks.rate_limit.most": 5}).hook_options == {"rate_limit": {"most": 5}}
    assert EngineConfig(options={"hooks": {"rate_limit": {"most": 5}}}).hook_options == {"rate_limit": {"most": 5}}


@pytest.mark.parametrize("name", ["hooks.", "hooks.rate_limit", "hooks.rate_limit.", "hooks"])
def test_half_a_name(name):
    with pytest.raises(ConfigError):
        EngineConfig(**{name: 1})

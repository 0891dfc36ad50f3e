"""Hooks: plain callables, None where nobody listens, and no plugin that can take the start down."""

from __future__ import annotations

import inspect
import logging
from typing import get_args

import pytest

from engine.plugin import HookRelay, Registry, hookimpl
from engine.plugin.hookspecs import HOOKSPECS, Kind, facts_of
from engine.plugin.points import HOOK_PROCESSES
from engine.types.errors import ContractError, DriverImportError, DuplicateDriverError

calls: list[object] = []


class Listener:
    @hookimpl
    def step_done(self, stats):
        calls.append(("listener", stats))


class Fewer:
    @hookimpl
    def step_done(self):
        calls.append("fewer")


class First:
    @hookimpl(tryfirst=True)
    def step_done(self, stats):
        calls.append("first")


class Misspelt:
    @hookimpl
    def step_don(self, stats):
        calls.append("never")


class OtherProcess:
    @hookimpl
    def request_received(self, request):
        calls.append("never")


class WrongArguments:
    @hookimpl
    def step_done(self, statistics):
        calls.append("never")


class Wrapper:
    @hookimpl(wrapper=True)
    def step_done(self, stats):
        return (yield)


class Fails:
    @hookimpl
    def step_done(self, stats):
        calls.append("fails")
        raise ValueError("hook is broken")


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@pytest.fixture
def registry_of(candidate):
    def build(*names):
        return Registry([candidate("hooks.core", n.lower(), f"{__name__}:{n}", f"dist-{n}") for n in names])

    return build


def test_none_when_nobody_listens():
    relay = HookRelay("core", Registry([]))
    assert relay.step_done is None
    assert HookRelay("worker", Registry([])).worker_started is None
    assert HookRelay("frontend", Registry([])).request_received is None


def test_a_hook_of_another_process_is_no_attribute():
    with pytest.raises(AttributeError):
        _ = HookRelay("core", Registry([])).request_received


def test_listeners_are_called_with_the_arguments_they_take_last_registered_first(registry_of):
    relay = HookRelay("core", registry_of("First", "Listener", "Fewer"))
    relay.step_done(stats=7)
    # registered by name: fewer, first, listener
    assert calls == ["first", ("listener", 7), "fewer"]


def test_modules_register_too(playground, candidate):
    playground.module(
        "pg_hooks",
        """
        from engine.plugin import hookimpl
        seen = []

        @hookimpl
        def worker_started(info):
            seen.append(info)
        """,
    )
    relay = HookRelay("worker", Registry([candidate("hooks.worker", "m", "pg_hooks")]))
    relay.worker_started(info="ready")
    import pg_hooks

    assert pg_hooks.seen == ["ready"]


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("Misspelt", ContractError, "did you mean 'step_done'?"),
        ("OtherProcess", ContractError, r"engine\.hooks\.frontend\.v0"),
        ("WrongArguments", ContractError, "statistics"),
        ("Wrapper", ContractError, "cannot be wrapped"),
        ("NotThere", DriverImportError, "NotThere"),
    ],
)
def test_a_broken_hook_plugin_is_quarantined_and_the_others_work(registry_of, caplog, name, error, says):
    registry = registry_of(name, "Listener")
    relay = HookRelay("core", registry)
    [(candidate, reason)] = registry.quarantine.items()
    assert candidate.name == name.lower() and isinstance(reason, error)
    with pytest.raises(error, match=says):
        raise reason
    assert name.lower() in caplog.text
    relay.step_done(stats=1)
    assert calls == [("listener", 1)]
    assert [c.name for c in relay.plugins] == ["listener"]


def test_two_misspelt_plugins(registry_of):
    registry = registry_of("Misspelt", "OtherProcess")
    assert HookRelay("core", registry).step_done is None
    assert len(registry.quarantine) == 2


def test_a_failing_listener_is_disabled_after_ten_failures_and_the_rest_goes_on(registry_of, caplog):
    relay = HookRelay("core", registry_of("Fails", "Listener"))
    with caplog.at_level(logging.WARNING):
        for step in range(15):
            relay.step_done(stats=step)
    assert calls.count("fails") == 10
    assert [call for call in calls if call != "fails"] == [("listener", step) for step in range(15)]
    [disabled] = [record.getMessage() for record in caplog.records if "disabled" in record.getMessage()]
    assert "step_done" in disabled and "dist-Fails 1.0" in disabled


def test_the_hook_becomes_none_once_its_last_listener_is_disabled(registry_of):
    relay = HookRelay("core", registry_of("Fails"), max_failures=2)
    relay.step_done(stats=1)
    assert relay.step_done is not None
    relay.step_done(stats=2)
    assert relay.step_done is None


def test_duplicates_name_both_distributions(candidate):
    twice = [candidate("hooks.core", "x", f"{__name__}:Listener", d) for d in ("dist-a", "dist-b")]
    with pytest.raises(DuplicateDriverError, match="dist-a 1.0 and .*dist-b 1.0"):
        HookRelay("core", Registry(twice))


def test_every_hook_states_what_it_does_and_its_thread_and_cost():
    assert tuple(HOOKSPECS) == HOOK_PROCESSES
    for spec in HOOKSPECS.values():
        for name, function in vars(spec).items():
            if not name.startswith("_"):
                facts = facts_of(function)
                assert inspect.getdoc(function) and facts.thread and facts.cost and facts.kind in get_args(Kind), name

"""What every suite has: who is tested, when a test is skipped, and the tests of the card."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from pydantic import BaseModel

from engine.plugin import POINTS, Card
from engine.types.errors import ConfigError
from engine_sdk.conformance.subject import Subject

CARD_SECONDS = 0.02
"""Most processor time that importing a card may take, beyond pydantic, msgspec, numpy and the interface."""
IMPORT_SECONDS = 200.0
"""How long the answer of the process that imports cards is waited for."""
CARD_TRIES = 10
"""Fresh processes in which one that is quick enough is looked for: a busy machine makes no card slow."""


IMPORTER = pytest.StashKey["Importer"]()


class NotServed(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """Skips a test because the driver itself says that it does not do what the test asks for."""

    __module__ = "builtins"  # as pytest's own: reports then begin with the name alone


def not_served(reason: str) -> NoReturn:
    """Skip a test for what the driver's card, or the driver where it refuses by name, says of itself.

    What a test lacks otherwise (a device, a library, an example) is a plain `pytest.skip`: it says nothing of the
    driver, and reports count the two apart.
    """
    raise NotServed(reason)


class Conformance:
    """The base of all suites. Subclasses are collected by pytest when their name begins with Test.

    Attributes:
        driver: the installed driver to test, by name.
        card: or a card, whether it is installed or not.
        options: the driver's options, as a user would set them.
        places: of these, the ones that say where something lies: tables of results leave them out, because they differ
            from run to run.
        device: torch's device string, for points that compute.
        stand_in: what does the device's work where `device` is not the one that the driver is made for, e.g.
            "interpreted": tables of results name it beside the driver.
        shrink: search for the smallest example when a property fails; takes a while.
    """

    point: ClassVar[str]
    protocol: ClassVar[str]
    """The body's Protocol: its name in the module of the point's interface."""
    driver: ClassVar[str] = ""
    card: ClassVar[type[Card] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    places: ClassVar[frozenset[str]] = frozenset()
    device: ClassVar[str] = "cpu"
    stand_in: ClassVar[str] = ""
    shrink: ClassVar[bool] = True

    # -- who is tested -----------------------------------------------------------------------------------------------
    @classmethod
    def subject(cls) -> Subject:
        """The driver under test; looked up once for each class."""
        found: Subject | None = cls.__dict__.get("_subject")
        if found is None:
            if bool(cls.driver) == (cls.card is not None):
                pytest.fail(f'{cls.__name__} has to name a driver, or a card: driver = "my-{cls.point}"', pytrace=False)
            if cls.card is not None:
                found = Subject.of_card(cls.point, cls.card, cls.options)
            else:
                found = Subject.installed(cls.point, cls.driver, cls.options)
            setattr(cls, "_subject", found)  # noqa: B010
        return found

    @classmethod
    def suite_for(cls, subject: Subject) -> str:
        """The name of the suite for this driver, of a point that has several."""
        return cls.__name__

    @classmethod
    def once(cls, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for each class."""
        kept: dict[str, Any] = cls.__dict__.get("_kept") or {}
        if not kept:
            setattr(cls, "_kept", kept)  # noqa: B010
        if key not in kept:
            kept[key] = make()
        return kept[key]

    @classmethod
    def teardown_class(cls) -> None:
        """Let go of what was kept: bodies may hold memory of a device."""
        kept = cls.__dict__.get("_kept") or {}
        for value in kept.values():
            close = getattr(value, "close", None)
            if callable(close):
                close()
        kept.clear()

    @classmethod
    def require(cls, need: Any) -> None:
        """Skip the test, with the card's own reasons, where the driver does not serve this need."""
        reasons = cls.subject().reasons(need)
        if reasons:
            not_served("; ".join(reasons))

    @classmethod
    def needs(cls) -> Sequence[Any]:
        """Some needs for the tests of the card, some of which nobody can serve."""
        raise NotImplementedError

    @classmethod
    def impossible(cls) -> Sequence[Any]:
        """Needs that no driver can serve: a card that serves one of them does not read what it is asked."""
        return ()

    @classmethod
    def figure(cls) -> str | None:
        """A small figure of how fast the driver is, as a line of a report. Never asserted. None where there is none."""
        return None

    @classmethod
    def hypothesis_settings(cls, max_examples: int, **further: Any) -> settings:
        """The same examples each time, so that a driver's verdict does not change from run to run."""
        phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if cls.shrink else [])]
        return settings(
            max_examples=max_examples, deadline=None, database=None, derandomize=True, phases=phases,
            suppress_health_check=list(HealthCheck), **further,
        )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _device_is_there(self, request: pytest.FixtureRequest) -> None:
        """What computes is skipped where this machine has no such device: nothing is known of the driver then."""
        kind = self.device.partition(":")[0]
        if kind == "cpu" or request.node.originalname.startswith(("test_card_", "test_body_")):
            return
        import torch

        if not torch.get_device_module(kind).is_available():
            pytest.skip(f"this machine has no device '{kind}'")

    # -- the card ----------------------------------------------------------------------------------------------------
    @pytest.fixture
    def fresh_import(self, pytestconfig: pytest.Config) -> Importer:
        """One for all classes of a session."""
        if IMPORTER not in pytestconfig.stash:
            pytestconfig.stash[IMPORTER] = importer = Importer()
            pytestconfig.add_cleanup(importer.close)
        return pytestconfig.stash[IMPORTER]

    def test_card_is_light(self, fresh_import: Importer) -> None:
        """It imports in a fresh process without torch, in under 20 ms beyond what a card may bring; asking it brings
        nothing either, and gives the answers that it gives here."""
        subject, interface = self.subject(), POINTS[self.point].interface.partition(":")[0]
        quickest = float("inf")
        for _ in range(CARD_TRIES):
            found = fresh_import(subject.candidate.value, interface, self.needs())
            assert not found["heavy"], f"importing and asking the card brings {', '.join(found['heavy'])}"
            assert found["answers"] == [subject.card.unsupported(need) for need in self.needs()]
            quickest = min(quickest, found["seconds"])
            if quickest < CARD_SECONDS:
                return
        pytest.fail(f"importing the card takes {quickest * 1000:.0f} ms, of {CARD_SECONDS * 1000:.0f} ms that it may")

    def test_card_is_sound(self) -> None:
        """A subclass of the point's card, documented, whose options have defaults and survive the way to a worker."""
        card, point = self.subject().card, POINTS[self.point]
        module, _, name = point.interface.partition(":")
        assert issubclass(card, getattr(importlib.import_module(module), name))
        assert (card.__doc__ or "").strip(), "the card has no docstring: it is what people read about the driver"
        assert isinstance(card.priority, int)
        assert card.framework in (None, "torch", "jax")
        assert 0 <= card.requires_minor <= point.minor
        assert card.body or card.bodies, "the card names no body"
        for half in card.bodies or [None]:
            assert isinstance(self.subject().body(half), type)
        if card.Options is not None:
            assert issubclass(card.Options, BaseModel)
            options = card.Options()
            again = card.Options.model_validate_json(json.dumps(options.model_dump(mode="json")))
            assert again == options, "options travel to the workers as JSON, and come back as others"

    def test_card_answers_in_sentences(self) -> None:
        """`unsupported` is pure: a list of sentences, twice the same. What nobody can serve has a reason."""
        card = self.subject().card
        for need in [*self.needs(), *self.impossible()]:
            reasons = card.unsupported(need)
            assert isinstance(reasons, list) and all(isinstance(r, str) and r.strip() for r in reasons), reasons
            assert card.unsupported(need) == reasons, "asked twice it gives two answers"
        for need in self.impossible():
            assert self.subject().reasons(need), f"the card claims to serve {need}"

    # -- the body ----------------------------------------------------------------------------------------------------
    @classmethod
    def methods(cls) -> Sequence[str]:
        """The names of the body's methods: all of the Protocol's."""
        return methods_of(cls.interface())

    @classmethod
    def interface(cls) -> type:
        """The body's Protocol."""
        module = importlib.import_module(POINTS[cls.point].interface.partition(":")[0])
        found: type = getattr(module, cls.protocol)
        return found

    @classmethod
    def body(cls) -> type:
        """The class that does the work."""
        return cls.subject().body()

    @classmethod
    def built(cls, context: Callable[[], Any], key: str) -> Any:
        """A body with this context, made once for each key; the test is skipped where the body refuses options that
        the suite names, because this machine has not got what they ask for."""

        def build() -> Any:
            try:
                return cls.body()(context())
            except ConfigError as error:
                if not cls.options:
                    raise
                return error

        found = cls.once(f"body {key}", build)
        if isinstance(found, ConfigError):
            pytest.skip(str(found))
        return found

    def test_body_has_the_interface(self) -> None:
        """Each method is there and takes the interface's arguments, by place and by name."""
        check_methods(self.body(), self.interface(), self.methods())

    def test_figure(self, record_property: Callable[[str, object], None]) -> None:
        """How fast it is on this machine: printed (`pytest -s`, `engine plugins test`), never asserted."""
        if self.stand_in:
            pytest.skip(f"{self.stand_in}: how fast that is says nothing of the device")
        line = self.figure()
        if line is None:
            pytest.skip("this suite measures nothing")
        record_property("figure", line)
        print(f"\n{self.point} {self.subject().candidate.name}: {line}")


def methods_of(protocol: type) -> list[str]:
    """The names of a Protocol's methods."""
    inherited = {name for base in protocol.__mro__[:-1] if base.__module__ != "typing" for name in vars(base)}
    wanted = {name for name in inherited if not name.startswith("_") or name in ("__len__", "__iter__")}
    return sorted(name for name in wanted if callable(getattr(protocol, name, None)))


def check_methods(body: type, interface: type, names: Sequence[str]) -> None:
    """Fail the test where a body lacks one of these methods of a Protocol, or does not take its arguments."""
    for name in names:
        method = getattr(body, name, None)
        assert callable(method), f"{body.__qualname__} has no method {name}"
        declared = inspect.signature(getattr(interface, name)).parameters.values()
        parameters = [p.name for p in declared if p.kind is p.POSITIONAL_OR_KEYWORD]
        try:
            signature = inspect.signature(method)
        except ValueError:
            continue  # native code that does not say
        _check_binds(name, signature, parameters)


def _check_binds(name: str, signature: inspect.Signature, parameters: Sequence[str]) -> None:
    try:
        signature.bind(*parameters)
        signature.bind(*parameters[:1], **dict.fromkeys(parameters[1:]))
    except TypeError as error:
        pytest.fail(f"{name}{signature} does not take ({', '.join(parameters)}): {error}", pytrace=False)


class Importer:
    """A process that imports cards, each in a fork that has imported next to nothing: see probe.py. No
    `engine.process.Child`, whose other side has imported the engine, and has threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", str(Path(__file__).with_name("probe.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, value: str, interface: str, needs: Sequence[Any] = ()) -> dict[str, Any]:
        """What importing `value` ("module:name") and asking it about these needs brings and costs."""
        module, _, name = value.partition(":")
        request = {
            "module": module, "name": name, "interface": interface, "path": sys.path, "environment": dict(os.environ),
            "needs": [n and {"kind": type(n).__name__, "fields": msgspec.to_builtins(n)} for n in needs],
        }  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], IMPORT_SECONDS)[0]:
            self._process.kill()
            raise AssertionError(f"importing {value} in another process has not ended within {IMPORT_SECONDS:g} s")
        line = self._process.stdout.readline()
        assert line, "the process that imports cards has ended"
        found: dict[str, Any] = json.loads(line)
        assert "error" not in found, f"importing the card in a fresh process raises:\n{found['error']}"
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

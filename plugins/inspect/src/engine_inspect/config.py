"""`engine config`: every setting with its value and where it came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.embedding import EngineSettings, Key, Setting, Settings, of_commands, settings_of_commands
from engine.plugin import Command
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import EngineError
from engine_kit.chosen_drivers import why
from engine_kit.flags import (
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)

if TYPE_CHECKING:
    from engine.embedding import EngineConfig, Launch, Merged
    from engine.plugin import Selection

DEFAULT = "default"


class ConfigCommand(Command):
    """Print what an engine and a server would be started with. Drivers are chosen, nothing is loaded."""

    help = "Print every setting, the driver of every point and its options, and where each was set."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_settings(parser.add_argument_group("commands"), settings_of_commands())
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "show the settings for")
        merged = command_settings(arguments)

        from engine.embedding import EngineConfig, launch, validated

        config = EngineConfig.from_merged(merged)
        commands = {name: validated(declared, merged) for name, declared in of_commands().items()}
        plan: Launch | None = None
        stopped: EngineError | None = None
        try:
            plan = launch(config)
        except EngineError as error:
            # Whoever looks for the reason why an engine does not start wants to see its settings all the more.
            stopped = error
        lines = [*resolve(merged, config, commands, plan)]
        wants_json = getattr(arguments, "json", False)
        print(json.dumps(as_json(lines), indent=2, default=str) if wants_json else as_yaml(lines))
        if stopped is not None:
            raise stopped
        return 0


class Line(NamedTuple):
    """One setting.

    Attributes:
        section: below which it stands in a config file, e.g. ("options", "attention"); () for the engine's own.
        name: there.
        value: as it is used; None where it is found out when an engine starts.
        origin: where it was set: a flag, a place in a file, a variable, or "default" with what that means.
        secret: the value is not to be shown.
        owner: of an option: the driver that has it, with its distribution.
    """

    section: tuple[str, ...]
    name: str
    value: Any
    origin: str
    secret: bool = False
    owner: str = ""


def resolve(
    merged: Merged, config: EngineConfig, commands: Mapping[str, Settings], plan: Launch | None
) -> Iterator[Line]:
    """All settings; those of commands each at the first that declares it; several drivers of one point may have an
    option each. `plan` is what the launcher decided; None where it could not, and then less is known."""
    found = {} if plan is None else _found_out(plan)
    for name, setting in EngineSettings.declared.items():
        yield _setting((), setting, found.get(name, getattr(config, name)), merged)
    told: set[str] = set()
    for title, command in commands.items():
        for setting in command.declared.values():
            if setting.name not in told:
                yield _setting((title,), setting, getattr(command, setting.name), merged)
        told.update(command.declared)
    options: list[Line] = []
    for name, point in POINTS.items():
        asked, origin = merged.choice(name)
        selections = [] if plan is None else [selection for selection in plan.selections if selection.point == name]
        if selections:
            reasons = dict.fromkeys(why([s]) for s in selections if not s.asked)
            asked, origin = _drivers(selections), "; ".join([*filter(None, [origin]), *reasons])
        yield Line(("points",), point.keyword, asked, origin or DEFAULT)
        options += _options(name, selections, merged)
    yield from options
    for name in merged.options():
        if name.startswith(f"{HOOKS}."):
            yield from _options(name, (), merged, owner="the hook plugin")


def as_yaml(lines: Iterable[Line]) -> str:
    """A config file that sets what the lines say, with comments that say where each value came from."""
    rows: list[tuple[str, str]] = []
    told: set[tuple[str, ...]] = set()
    for line in lines:
        for depth in range(len(line.section)):
            if (heading := line.section[: depth + 1]) not in told:
                rows.append((f"{'  ' * depth}{heading[-1]}:", ""))
                told.add(heading)
        hidden = line.secret and line.value is not None
        text = f"{line.name}: {'(hidden)' if hidden else _yaml(line.value)}"
        if hidden or (*line.section, line.name) in told:  # a second driver's option of that name
            text = f"# {text}"
        told.add((*line.section, line.name))
        rows.append(("  " * len(line.section) + text, line.origin + (f", of {line.owner}" if line.owner else "")))
    width = max(len(text) for text, _ in rows if len(text) <= 48)
    return "\n".join(f"{text.ljust(width)}  # {comment}" if comment else text for text, comment in rows)


def as_json(lines: Iterable[Line]) -> dict[str, Any]:
    """The same as plain data: every leaf is {"value", "origin"}; options, which are lists, have their driver too."""
    tree: dict[str, Any] = {}
    options: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        value = "(hidden)" if line.secret and line.value is not None else line.value
        leaf = {"value": value, "origin": line.origin}
        if line.section[:1] == ("options",):
            options.setdefault(line.section[1], []).append({"name": line.name, **leaf, "driver": line.owner})
        else:
            tree.setdefault(line.section[0] if line.section else "settings", {})[line.name] = leaf
    return {**tree, "options": options}


def _setting(section: tuple[str, ...], setting: Setting, value: Any, merged: Merged) -> Line:
    origin = merged.origins.get(Key("settings", setting.name), "")
    if not origin:
        origin = DEFAULT
        if setting.default in (None, "auto") and "(default: " in setting.help:
            origin += f": {setting.help.rpartition('(default: ')[2].partition(')')[0]}"
        elif value != setting.default:
            origin += f": {setting.default}"
    return Line(section, setting.name, value, origin, setting.secret)


def _found_out(plan: Launch) -> dict[str, Any]:
    """Values of settings that the launcher found out, or may have changed from "auto"."""
    return {
        "model": plan.files.name,
        "tokenizer": plan.start.tokenizer_folder,
        "served_model_name": ",".join(plan.model_names),
        "dtype": plan.start.worker.dtype,
        "max_model_len": plan.max_model_len,
        "in_flight": plan.start.in_flight,
        "step_timeout": plan.start.step_timeout,
    }


def _drivers(selections: Sequence[Selection[Any]]) -> str:
    """The drivers at work, as the point's setting takes them: "a", "a,b" or "full=a,sliding=b"."""
    names = list(dict.fromkeys(selection.candidate.name for selection in selections))
    if len(names) > 1 and POINTS[selections[0].point].pick == "per_kind":
        return ",".join(f"{selection.kind}={selection.candidate.name}" for selection in selections)
    return ",".join(names)


def _options(
    point: str, selections: Iterable[Selection[Any]], merged: Merged, owner: str = "no driver yet"
) -> Iterator[Line]:
    """The options of the point's drivers; those that were given, where no driver is chosen."""
    drivers = {selection.candidate: selection.options for selection in selections}
    owned = [(f"{c.name} ({c.provenance})", o.model_dump(mode="json")) for c, o in drivers.items() if o is not None]
    for who, values in owned if drivers else [(owner, merged.options().get(point, {}))]:
        for name, value in values.items():
            origin = merged.origins.get(Key("options", point, name), DEFAULT)
            yield Line(("options", point), name, value, origin, owner=who)


def _yaml(value: Any) -> str:
    """A value on one line."""
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**9)
    return str(text).removesuffix("...\n").strip()

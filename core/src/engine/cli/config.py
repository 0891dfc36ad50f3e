"""`engine config`: every setting with its value and where it came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.cli.flags import (
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)
from engine.config.declaration import EngineSettings, Setting, Settings, of_commands
from engine.config.declaration import command_settings as declared_by_commands
from engine.config.names import Key
from engine.plugin.card import Command
from engine.plugin.explain import why
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import EngineError

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.config.sources import Merged
    from engine.frontend.launch import Launch
    from engine.plugin import Selection

DEFAULT = "default"


class Config(Command):
    """Print what an engine and a server would be started with. Drivers are chosen, nothing is loaded."""

    help = "Print every setting, the driver of every point and its options, and where each was set."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        parser.add_argument("--json", action="store_true", help="print JSON")
        add_settings(parser.add_argument_group("commands"), declared_by_commands())
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "show the settings for")
        merged = command_settings(arguments)

        from engine.config.settings import EngineConfig, validated
        from engine.frontend.launch import launch

        config = EngineConfig.from_merged(merged)
        commands = {name: validated(declared, merged) for name, declared in of_commands().items()}
        plan: Launch | None = None
        stopped: EngineError | None = None
        try:
            plan = launch(config)
        except EngineError as error:
            # Whoever looks for the reason why an engine does not start wants to see its settings all the more.
            stopped = error
        tree = resolve(merged, config, commands, plan)
        print(json.dumps(as_json(tree), indent=2, default=str) if getattr(arguments, "json", False) else as_yaml(tree))
        if stopped is not None:
            raise stopped
        return 0


@dataclass(frozen=True)
class Entry:
    """One setting.

    Attributes:
        value: as it is used; None where it is found out when an engine starts.
        origin: where it was set: a flag, a place in a file, a variable, or "default" with what that means.
        secret: the value is not to be shown.
        owner: of an option: the driver that has it, with its distribution.
    """

    value: Any
    origin: str
    secret: bool = False
    owner: str = ""


@dataclass(frozen=True)
class Tree:
    """All settings, by name; those of commands by command too, each at the first that declares it; options by point and
    name (several drivers of one point may have an option each)."""

    settings: dict[str, Entry] = field(default_factory=dict)
    commands: dict[str, dict[str, Entry]] = field(default_factory=dict)
    points: dict[str, Entry] = field(default_factory=dict)
    options: dict[str, list[tuple[str, Entry]]] = field(default_factory=dict)


def resolve(merged: Merged, config: EngineConfig, commands: Mapping[str, Settings], plan: Launch | None) -> Tree:
    """The tree. `plan` is what the launcher decided; None where it could not, and then less is known."""
    tree = Tree()
    found = {} if plan is None else _found_out(plan)
    for name, setting in EngineSettings.declared.items():
        tree.settings[name] = _entry(setting, Key("settings", name), found.get(name, getattr(config, name)), merged)
    told: set[str] = set()
    for title, command in commands.items():
        for name in (name for name in command.declared if name not in told):
            entry = _entry(command.declared[name], Key("settings", name), getattr(command, name), merged)
            tree.commands.setdefault(title, {})[name] = entry
        told.update(command.declared)
    chosen: dict[str, list[Selection[Any]]] = {point: [] for point in POINTS}
    for selection in () if plan is None else plan.selections:
        chosen[selection.point].append(selection)
    for name, point in POINTS.items():
        asked, origin = merged.choice(name)
        if selections := chosen[name]:
            reasons = dict.fromkeys(why([s]) for s in selections if not s.asked)
            asked, origin = _drivers(selections), "; ".join([*filter(None, [origin]), *reasons])
        tree.points[point.keyword] = Entry(asked, origin or DEFAULT)
        if entries := list(_options(name, selections, merged)):
            tree.options[name] = entries
    for name in merged.options():
        if name.startswith(f"{HOOKS}."):
            tree.options[name] = list(_options(name, (), merged, owner="the hook plugin"))
    return tree


def as_yaml(tree: Tree) -> str:
    """A config file that sets what the tree says, with comments that say where each value came from."""
    lines = [(_pair(name, entry), entry.origin) for name, entry in tree.settings.items()]
    for title, entries in (*tree.commands.items(), ("points", tree.points)):
        lines += [(f"{title}:", ""), *((_pair(name, entry, 1), entry.origin) for name, entry in entries.items())]
    lines += [("options:", "")] if tree.options else []
    for point, options in tree.options.items():
        lines.append((f"  {point}:", ""))
        seen: set[str] = set()
        for name, entry in options:
            text = _pair(name, entry, 2)
            if name in seen:  # a second driver's option of that name, which one key sets for both
                text = f"    # {text.lstrip()}"
            seen.add(name)
            lines.append((text, f"{entry.origin}, of {entry.owner}"))
    width = max(len(text) for text, _ in lines if len(text) <= 48)
    return "\n".join(f"{text.ljust(width)}  # {comment}" if comment else text for text, comment in lines)


def as_json(tree: Tree) -> dict[str, Any]:
    """The same as plain data: every leaf is {"value", "origin"}; options have their driver too."""

    def leaf(entry: Entry) -> dict[str, Any]:
        content = {"value": "(hidden)" if entry.secret and entry.value is not None else entry.value}
        return {**content, "origin": entry.origin, **({"driver": entry.owner} if entry.owner else {})}

    return {
        **{
            section: {name: leaf(entry) for name, entry in entries.items()}
            for section, entries in {"settings": tree.settings, **tree.commands, "points": tree.points}.items()
        },
        "options": {
            point: [{"name": name, **leaf(entry)} for name, entry in entries] for point, entries in tree.options.items()
        },
    }


def _entry(setting: Setting, key: Key, value: Any, merged: Merged) -> Entry:
    origin = merged.origins.get(key, "")
    if not origin:
        origin = DEFAULT
        if setting.default in (None, "auto") and "(default: " in setting.help:
            origin += f": {setting.help.rpartition('(default: ')[2].removesuffix(')')}"
        elif value != setting.default:
            origin += f": {setting.default}"
    return Entry(value, origin, setting.secret)


def _found_out(plan: Launch) -> dict[str, Any]:
    """Values of settings that the launcher found out, or may have changed from "auto"."""
    return {
        "model": plan.files.name,
        "tokenizer": plan.tokenizer_folder,
        "served_model_name": ",".join(plan.model_names),
        "dtype": plan.start.worker.dtype,
        "max_model_len": plan.max_model_len,
        "in_flight": plan.start.in_flight,
        "step_timeout": plan.start.step_timeout,
    }


def _drivers(selections: Iterable[Selection[Any]]) -> str:
    """The drivers at work, as the point's setting takes them: "a", "a,b" or "full=a,sliding=b"."""
    many = list(selections)
    names = list(dict.fromkeys(selection.candidate.name for selection in many))
    if len(names) > 1 and POINTS[many[0].point].pick == "per_kind":
        return ",".join(f"{selection.kind}={selection.candidate.name}" for selection in many)
    return ",".join(names)


def _options(
    point: str, selections: Iterable[Selection[Any]], merged: Merged, owner: str = "no driver yet"
) -> Iterable[tuple[str, Entry]]:
    """The options of the point's drivers; those that were given, where no driver is chosen."""
    drivers = {selection.candidate: selection for selection in selections}
    if not drivers:
        for name, value in merged.options().get(point, {}).items():
            yield name, Entry(value, merged.origins[Key("options", point, name)], owner=owner)
    for candidate, selection in drivers.items():
        if selection.options is None:
            continue
        owner = f"{candidate.name} ({candidate.provenance})"
        for name, value in selection.options.model_dump(mode="json").items():
            origin = merged.origins.get(Key("options", point, name), DEFAULT)
            yield name, Entry(value, origin, owner=owner)


def _pair(name: str, entry: Entry, depth: int = 0) -> str:
    if entry.secret and entry.value is not None:
        return f"{'  ' * depth}# {name}: (hidden)"
    return f"{'  ' * depth}{name}: {_yaml(entry.value)}"


def _yaml(value: Any) -> str:
    """A value on one line."""
    import yaml

    plain = list(value) if isinstance(value, tuple) else value
    return (
        str(yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**9))
        .removesuffix("...\n")
        .strip()
    )

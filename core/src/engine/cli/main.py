"""`engine <command> ...`: finds the command, runs it, and turns errors into one clear message."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.plugin.hints import did_you_mean
from engine.types.errors import ConfigError, ContractError, EngineError

if TYPE_CHECKING:
    import argparse

    from engine.plugin.candidate import Candidate
    from engine.plugin.card import Command
    from engine.plugin.plugin_list import PluginList

COMMANDS: dict[str, tuple[str, str]] = {
    "config": ("engine.cli.config:ConfigCommand", "print every setting, and where it was set"),
    "plugins": ("engine.cli.plugins:PluginsCommand", "list points and drivers, their origin, and what is configured"),
    "plugins why": ("engine.cli.why:WhyCommand", "explain who serves a point: candidate, verdict, reasons"),
}
"""The built-in commands: where each is, and its line in the help."""

ACTIONS: dict[str, dict[str, str]] = {"plugins": {"doctor": "engine-sdk", "new": "engine-sdk", "test": "engine-sdk"}}
"""Commands after which a word is part of the name (`engine plugins test` is the command "plugins test"), and which of
our distributions offer such ones."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the answer is its exit code: 0, 2 for an error that the user can mend, 130 for Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except EngineError as error:
        from engine.process.logs import tell

        fields = dict(zip(("code", "asked", "found", "remedy"), error.parts, strict=True))
        tell("engine", str(error), _message(error), logging.ERROR, **fields)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`engine ... | head`): there is nobody to write to, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if arguments[0] in ("-V", "--version"):
        import engine

        print(f"engine {engine.__version__}")
        return 0
    return _run_command(*split_name(arguments))


def split_name(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or of two, and what follows it."""
    words = 2 if arguments[0] in ACTIONS and len(arguments) > 1 and not arguments[1].startswith("-") else 1
    return " ".join(arguments[:words]), arguments[words:]


def _run_command(name: str, arguments: list[str]) -> int:
    import argparse

    from engine.cli.flags import canonical

    command = _find(name, canonical(arguments))
    parser = argparse.ArgumentParser(
        prog=f"engine {name}", description=command.help, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    command.add_arguments(parser)
    flags = _flags(parser)
    notes: list[str] = []
    if "--model" in flags and any(argument.startswith("-") for argument in arguments) and (others := _other_flags()):
        arguments, notes = others.translate(arguments, flags)
    namespace, unknown = parser.parse_known_args(canonical(arguments))
    if unknown:
        raise _surplus(name, unknown[0], namespace, flags)
    namespace.notes = notes
    return command.run(namespace)


def _surplus(name: str, argument: str, given: argparse.Namespace, flags: Sequence[str]) -> ConfigError:
    """What is said to an argument that the command does not take."""
    asked, see = f"engine {name} {argument}", f"see: engine {name} --help"
    if argument.startswith("-"):
        flag = argument.partition("=")[0]
        return ConfigError(asked, "there is no such flag", _instead_of(flag) or did_you_mean(flag, flags) or see)
    if (model := getattr(given, "positional_model", None)) is not None:
        return ConfigError(
            f"engine {name} {model} {argument}",
            f"{argument!r} is a second model, and an engine has one",
            "start another engine for it; further names of one model are --served-model-name NAME,NAME",
        )
    return ConfigError(asked, "nothing stands in this place", f"put words that belong together in quotes; {see}")


@cache
def _other_flags() -> Any:
    """What knows flags and commands by the names that another program has for them, where it is installed; None where
    not. `engine_kit.vllm_flags` is one."""
    for entry in entry_points(group="engine_flags"):
        return entry.load()
    return None


def _instead_of(name: str) -> str:
    """What to do in place of passing a flag, or of calling a command, of another program's; "" where none is known."""
    others = _other_flags()
    return str(others.instead_of(name)) if others else ""


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """The flags of a parser and of the parsers below it."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
        if isinstance(action.choices, dict):
            flags += [flag for inner in action.choices.values() for flag in _flags(inner)]
    return flags


def _plugin_list(arguments: Sequence[str]) -> PluginList:
    """The list of plugins by flag, file and environment, as far as it can be known before the command is."""
    from engine.config.sources import gather

    given: dict[str, list[str]] = {"plugins": [], "config": []}
    for argument in arguments:
        flag, equals, value = argument.removeprefix("--").partition("=")
        if argument == "--":
            break
        if argument.startswith("--") and flag in given and equals:
            given[flag].append(value)
    flags = {"plugins": given["plugins"]} if given["plugins"] else {}
    return gather(flags, given["config"][-1] if given["config"] else None).plugin_list


def _find(name: str, arguments: Sequence[str] = ()) -> Command:
    if name in COMMANDS:
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: type[Command] = getattr(importlib.import_module(module), attribute)
        return command()
    from engine.plugin.card import Command
    from engine.plugin.discovery import Registry
    from engine.plugin.hints import distribution_of
    from engine.plugin.loading import load_entry_point

    first, _, action = name.partition(" ")
    ours = ACTIONS.get(first, {}).get(action)
    # `engine plugins test` starts no engine: its `--config` is a model's config.json, not a file with settings.
    said = [argument for argument in arguments if not (ours and argument.startswith("--config="))]
    registry = Registry.discover(plugins=_plugin_list(said))
    names = [*COMMANDS, *(candidate.name for candidate in registry.candidates("commands"))]
    known = name in names or any(c.name == name for c in registry.outdated("commands"))
    if not known and not registry.denies("commands", name):
        offers = ours or distribution_of("commands", name)
        hint = f"pip install {offers}" if offers else did_you_mean(name, names)
        hint = _instead_of(name) or hint or f"the commands are: {', '.join(names)}"
        found = "no installed distribution offers this command" if offers else "there is no such command"
        raise ConfigError(f"engine {name}", found, hint)
    candidate = registry.find("commands", name)
    loaded = load_entry_point(candidate)
    if not isinstance(loaded, type) or not issubclass(loaded, Command):
        raise ContractError(
            f"engine {name}",
            f"{candidate.value} of {candidate.provenance} is {loaded!r}, not a subclass of engine.plugin.Command",
            "its author has to name the command class in the entry point",
            point="commands",
            driver=name,
            distribution=candidate.provenance,
        )
    return loaded()


def _help() -> str:
    lines = ["usage: engine COMMAND ...", "", "An LLM inference and serving engine whose every part is a plugin.", ""]
    lines += ["commands:", *(f"  {name:<16} {help_line}" for name, (_, help_line) in COMMANDS.items())]
    lines += _added_lines()
    lines += ["", "`engine COMMAND --help` shows a command's flags; `engine --version` the version."]
    return "\n".join(lines)


def _added_lines() -> list[str]:
    """The commands of plugins; none is imported. Where the list of plugins is wrong, help is wanted all the more."""
    from engine.plugin.discovery import Registry

    try:
        registry = Registry.discover(plugins=_plugin_list(()))
    except ConfigError as error:
        return [f"  (those of plugins cannot be listed: {error})"]
    added = (candidate for candidate in registry.candidates("commands") if candidate.name not in COMMANDS)
    return [f"  {c.name:<16} {' '.join(filter(None, (help_of(c), f'(from {c.provenance})')))}" for c in added]


def help_of(candidate: Candidate) -> str:
    """What a plugin's command says of itself, read from its source, for nothing is imported: its `help`, where its
    class sets it to a plain text, else the first line of its docstring; "" where neither can be read: its source is not
    there as a file, say."""
    import ast

    module, _, name = candidate.value.partition(":")
    try:
        tree = ast.parse(_source(module).read_bytes())
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name.strip())
    except Exception:  # whatever is wrong with it is said when it is called
        return ""
    for node in found.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            text = node.value.value
            if isinstance(text, str) and any(isinstance(t, ast.Name) and t.id == "help" for t in targets):
                return " ".join(text.split())
    return (ast.get_docstring(found) or "").partition("\n")[0]


def _source(module: str) -> Path:
    """The file of a module. Only the specification of its top package is asked for, which imports nothing.

    Raises FileNotFoundError.
    """
    import importlib.util

    top, *inner = module.strip().split(".")
    spec = importlib.util.find_spec(top)
    places = [Path(folder, *inner) for folder in (spec and spec.submodule_search_locations) or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    if spec is not None and spec.origin and not inner:
        files = [Path(spec.origin)]
    if not (there := [file for file in files if file.is_file()]):
        raise FileNotFoundError(module)
    return there[0]


def _message(error: EngineError) -> str:
    lines = [f"error: {error.asked}"]
    lines += [f"  found: {error.found}"] if error.found else []
    lines += [f"  to do: {error.remedy}"] if error.remedy else []
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

"""`engine <command> ...`: finds the command, which is a plugin's, runs it, and turns errors into one clear message."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.plugin.hints import did_you_mean
from engine.plugin.loading import brought
from engine.types.errors import ConfigError, ContractError, EngineError

if TYPE_CHECKING:
    import argparse

    from engine.plugin.card import Command
    from engine.plugin.plugin_list import PluginList

TWO_WORDS = ("plugins",)
"""Commands after which a word is part of the name: `engine plugins test` is the command "plugins test"."""

OPTION = "--option"
"""The flag that `canonical` makes of options of drivers."""
INTERRUPTED = 130
_JOINED = ("--plugins", "--config")
_OTHERS = "other_flags"
"""The part that knows flags and commands by the names that another program has for them: `engine_kit.vllm_flags`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the answer is its exit code: 0, 2 for an error that the user can mend, 130 for Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except EngineError as error:
        if (logs := brought("logs")) is None:
            print(_message(error), file=sys.stderr)
        else:
            fields = dict(zip(("code", "asked", "found", "remedy"), error.parts, strict=True))
            logs.tell("engine", str(error), _message(error), logging.ERROR, **fields)
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
    words = 2 if arguments[0] in TWO_WORDS and len(arguments) > 1 and not arguments[1].startswith("-") else 1
    return " ".join(arguments[:words]), arguments[words:]


def _run_command(name: str, arguments: list[str]) -> int:
    import argparse

    command = _find(name, canonical(arguments))
    parser = argparse.ArgumentParser(
        prog=f"engine {name}", description=command.help, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    command.add_arguments(parser)
    flags = _flags(parser)
    notes: list[str] = []
    if "--model" in flags and any(argument.startswith("-") for argument in arguments) and (others := brought(_OTHERS)):
        arguments, notes = others.translate(arguments, flags)
    namespace, unknown = parser.parse_known_args(canonical(arguments))
    if unknown:
        raise _surplus(name, unknown[0], namespace, flags)
    namespace.notes = notes
    return command.run(namespace)


def canonical(arguments: Sequence[str]) -> list[str]:
    """Bring flags into one spelling: `--max_num_seqs` is `--max-num-seqs`, and `--point.option value` (or with an
    equals sign) becomes the one flag `--option=point.option=value`. The values of `--plugins`, which may begin with a
    minus, and of `--config` are joined to their flags. What follows `--` is left alone.

    Raises ConfigError: one of these three has no value.
    """
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*result, argument, *rest]
        if not argument.startswith("--"):
            result.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        is_option = "." in flag
        if not equals and (is_option or flag in _JOINED):
            following = next(rest, None)
            if following is None:
                raise ConfigError(f"set {flag}", "no value follows it", f"write {flag} VALUE")
            equals, value = "=", following
        spelling = f"{OPTION}={flag.removeprefix('--')}" if is_option else flag.replace("_", "-")
        result.append(spelling + equals + value)
    return result


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


def _instead_of(name: str) -> str:
    """What to do in place of passing a flag, or of calling a command, of another program's; "" where none is known."""
    others = brought(_OTHERS)
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
    from engine.plugin.card import Command
    from engine.plugin.discovery import Registry
    from engine.plugin.hints import distribution_of
    from engine.plugin.loading import load_entry_point

    registry = Registry.discover(plugins=_plugin_list(arguments))
    names = [candidate.name for candidate in registry.candidates("commands")]
    known = name in names or any(c.name == name for c in registry.outdated("commands"))
    if not known and not registry.denies("commands", name):
        offers = distribution_of("commands", name)
        hint = f"pip install {offers}" if offers else did_you_mean(name, names)
        hint = _instead_of(name) or hint or f"the commands are: {', '.join(names) or 'none is installed'}"
        found = "no installed distribution offers this command" if offers else "there is no such command"
        raise ConfigError(f"engine {name}", found, hint)
    candidate = registry.find("commands", name)
    loaded = load_entry_point(candidate)
    if not isinstance(loaded, type) or not issubclass(loaded, Command):
        found = f"{candidate.value} of {candidate.provenance} is {loaded!r}, not a subclass of engine.plugin.Command"
        raise candidate.error(ContractError, found, "its author has to name the command class in the entry point")
    return loaded()


def _help() -> str:
    """What `engine --help` prints: all commands, where the list of plugins is wrong, for then help is wanted."""
    from engine.plugin.discovery import Registry

    wrong: list[str] = []
    try:
        registry = Registry.discover(plugins=_plugin_list(()))
    except ConfigError as error:
        registry, wrong = Registry.discover(), ["", f"No command will run: {error}"]
    commands = registry.candidates("commands")
    help_of = brought("command_help") or (lambda candidate: "")
    told = ((c.name, " ".join(filter(None, (help_of(c), f"(from {c.provenance})")))) for c in commands)
    lines = ["usage: engine COMMAND ...", "", "An LLM inference and serving engine whose every part is a plugin.", ""]
    lines += ["commands:", *(f"  {name:<16} {text}" for name, text in told), *wrong]
    lines += ["", "`engine COMMAND --help` shows a command's flags; `engine --version` the version."]
    return "\n".join(lines)


def _message(error: EngineError) -> str:
    lines = [f"error: {error.asked}"]
    lines += [f"  found: {error.found}"] if error.found else []
    lines += [f"  to do: {error.remedy}"] if error.remedy else []
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

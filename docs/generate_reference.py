"""Writes the reference pages of the documentation straight from the code: `python docs/generate_reference.py`.

Points, interfaces, hooks, settings, errors, drivers, commands and the bodies of requests are read from where they are
declared, so the pages cannot say anything else than the code does. The pages are not kept in the repository, but for
one that takes minutes to make: `docs/generate_matrix.py` writes it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import inspect
import logging
import re
import shutil
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reference_source import arguments, cell, class_docstrings, code, escape, prose, render_module, source_of

from engine.config.declaration import EngineSettings, Setting
from engine.plugin import POINTS, Card, HookRelay, Registry
from engine.plugin.candidate import Candidate
from engine.plugin.hookspecs import HOOKSPECS, facts_of
from engine.plugin.points import HOOK_MAJORS
from engine.types.errors import EngineError
from engine_server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[1]
COMMON_BODIES = ("Body", "GeneratingBody", "InputBody", "PoolingBody", "QueuedBody", "SamplingBody")
"""What several bodies have in common, which is told with each."""
KEPT = [ROOT / "docs" / "reference" / name for name in ("capabilities.md", "models.md", "drafters.md")]
"""Pages that other scripts write, and that are kept."""
EXTRA_MODULES = (
    "engine.plugin.card",
    "engine.types.params",
    "engine.types.outputs",
    "engine.types.plan",
    "engine.types.start",
    "engine.types.model",
    "engine.types.kv",
    "engine.types.hooks",
    "engine.types.request",
    "engine.frontend.input_processor",
    "engine.llm",
)
"""Modules beside the interfaces that plugin authors and users meet by name."""

REQUEST_MODULES = (
    "engine_server.openai.bodies",
    "engine_server.responses.input",
    "engine_server.anthropic.input",
    "engine_server.pooling.bodies",
    "engine_server.tokenization",
    "engine_server.bodies",
)
"""Where the bodies of requests are declared."""

_HELP_WIDTH = 110
_ANNOTATED = re.compile(r"Annotated\[(.*), Field\(.*\)\]")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages. The folder is emptied first, so nothing stays of what the code no longer has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reference", help="the folder to write to")
    out = parser.parse_args(argv).out
    made = pages()
    if out.exists():
        shutil.rmtree(out)
    for name, text in made.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"{len(made)} pages in {out}")
    return 0


def pages() -> dict[str, str]:
    """Every page of the reference, by its path below the reference's folder."""
    modules = [*interface_modules(), *EXTRA_MODULES]
    made = {
        "points.md": points_page(),
        "hooks.md": hooks_page(),
        "settings.md": settings_page(),
        "errors.md": errors_page(),
        "drivers.md": drivers_page(),
        "commands.md": commands_page(),
        "requests.md": requests_page(),
        "metrics.md": metrics_page(),
        **{kept.name: kept.read_text(encoding="utf-8") for kept in KEPT},
    }
    for module in modules:
        made[module_page(module)] = render_module(module)
    made["index.md"] = index_page(modules)
    return made


def module_page(module: str) -> str:
    """The page of a module, below the reference's folder."""
    return f"modules/{module}.md"


def interface_modules() -> list[str]:
    """Every module of `engine.interfaces`."""
    folder = source_of("engine.interfaces").parent
    return [f"engine.interfaces.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def index_page(modules: Iterable[str]) -> str:
    """The way in."""
    lines = ["# Reference", "", "Written from the code by `docs/generate_reference.py` each time `make docs` runs.", ""]
    lines += [
        "| page | holds |",
        "|---|---|",
        "| [Points](points.md) | every kind of part that can be replaced |",
        "| [Hooks](hooks.md) | every lifecycle call that plugins may listen to |",
        "| [Settings](settings.md) | every setting of the engine and of the server |",
        "| [Errors](errors.md) | every typed error, with its code and HTTP status |",
        "| [Drivers](drivers.md) | the drivers of this repository |",
        "| [Drivers by capability](capabilities.md) | what each of them does, from test results |",
        "| [Models](models.md) | the same of each model |",
        "| [Drafters](drafters.md) | what each of them goes with, and why not |",
        "| [Commands](commands.md) | every command with its flags |",
        "| [Requests](requests.md) | the bodies that the server takes |",
        "| [Metrics](metrics.md) | what `/metrics` shows |",
        "",
        "Modules that are public by name:",
        "",
    ]
    lines += [f"- [{module}]({module_page(module)})" for module in modules]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; cells are Markdown already."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


# -- points and drivers --------------------------------------------------------------------------------------------
def points_page() -> str:
    """Declared in `engine.plugin.points`."""
    lines = ["# Points", "", "Declared in `core/src/engine/plugin/points.py`.", ""]
    rows = [(f"[{p.name}](#{p.name})", code(p.option_flag), p.pick, cell(p.help)) for p in POINTS.values()]
    lines += table(("point", "flag", "pick", "help"), rows)
    ours = our_drivers()
    for name, point in POINTS.items():
        module, _, interface = point.interface.partition(":")
        drivers = [c for c in ours if c.point == name]
        lines += [f"## {name}", "", escape(point.help[0].upper() + point.help[1:].rstrip(".") + "."), ""]
        lines += [
            f"- flag `{point.option_flag}`, keyword and key of a config file `{point.keyword}`, "
            f"environment `ENGINE_{point.keyword.upper()}`",
            f"- entry-point groups served: {', '.join(f'`{point.group(major)}`' for major in point.majors)}, "
            f"minor version {point.minor}",
            f"- pick: `{point.pick}`",
        ]
        lines += [f"- kinds of layer: {', '.join(f'`{kind}`' for kind in point.kinds)}"] if point.kinds else []
        lines += [
            f"- card interface: [`{interface}`]({module_page(module)}) in `{module}`",
            "- drivers here: " + (", ".join(f"[{c.name}](drivers.md#{_anchor(c)})" for c in drivers) or "none"),
            "",
        ]
    lines += ["## How drivers are picked", "", prose(_attribute_docstring("engine.plugin.points", "Pick")), ""]
    return "\n".join(lines)


def our_drivers() -> list[Candidate]:
    """The candidates that this repository's own packages register, by their pyproject files."""
    projects = [ROOT / "core" / "pyproject.toml"]
    projects += [path for folder in ("plugins", "contrib") for path in sorted((ROOT / folder).glob("*/pyproject.toml"))]
    named: set[tuple[str, str, str]] = set()
    for path in projects:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for group, entries in project.get("entry-points", {}).items():
            named |= {(project["name"], group, name) for name in entries}
    return [c for c in Registry.discover().found if (c.distribution, c.group, c.name) in named]


def _anchor(candidate: Candidate) -> str:
    return re.sub(r"[^\w]+", "-", f"{candidate.point} {candidate.name}").strip("-").lower()


def drivers_page() -> str:
    """Cards of this repository's drivers; bodies are not imported."""
    registry = Registry.discover()
    lines = ["# Drivers", "", "What the packages of this repository register.", ""]
    for candidate in sorted((c for c in our_drivers() if c.point in POINTS), key=lambda c: list(POINTS).index(c.point)):
        card = registry.card(candidate)
        lines += [f"## {candidate.point} {candidate.name}", "", prose(inspect.getdoc(card)), ""]
        lines += [
            f"- distribution `{candidate.distribution}`, group `{candidate.group}`",
            f"- card `{candidate.value}`",
            *(f"- body `{body}`" + (f" ({half})" if half else "") for half, body in _bodies(card)),
            f"- priority {card.priority}",
        ]
        lines += [f"- framework `{card.framework}`"] if card.framework else []
        for attribute in ("kinds", "operations", "default_model"):
            value = getattr(card, attribute, None)
            if value:
                shown = ", ".join(f"`{v}`" for v in sorted(value)) if isinstance(value, frozenset) else f"`{value}`"
                lines += [f"- {attribute.replace('_', ' ')}: {shown}"]
        lines += ["", *_options(card)]
    return "\n".join(lines)


def _bodies(card: type[Card]) -> Iterator[tuple[str, str]]:
    if card.body:
        yield "", card.body
    yield from card.bodies.items()


def _options(card: type[Card]) -> list[str]:
    if card.Options is None:
        return ["It takes no options.", ""]
    rows = []
    for name, field in card.Options.model_fields.items():
        default = "required" if field.is_required() else code(repr(field.default))
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        rows.append((code(name), code(kind), default, cell(field.description or "")))
    return table(("option", "type", "default", "meaning"), rows)


# -- hooks, settings, errors ---------------------------------------------------------------------------------------
def hooks_page() -> str:
    """Specified in `engine.plugin.hookspecs`."""
    lines = ["# Hooks", "", prose(sys.modules["engine.plugin.hookspecs"].__doc__), ""]
    for process, spec in HOOKSPECS.items():
        groups = ", ".join(f"`engine.hooks.{process}.v{major}`" for major in HOOK_MAJORS)
        lines += [f"## Process {process}", "", prose(spec.__doc__), "", f"Entry-point group: {groups}", ""]
        for name, function in vars(spec).items():
            if name.startswith("_"):
                continue
            given = [str(p) for n, p in inspect.signature(function).parameters.items() if n != "self"]
            signature = f"def {name}({', '.join(given).replace(chr(39), '')})"
            kind, thread, cost = facts_of(function)
            decides = "Observes." if kind == "observing" else f"Decides: [`{kind}`](#kinds)."
            lines += [f"### {name}", "", "```python", signature, "```", "", decides, "", prose(function.__doc__), ""]
            lines += [f"- Thread: {thread}.", f"- Cost: {cost}.", ""]
    lines += ["## Kinds", "", prose(_attribute_docstring("engine.plugin.hookspecs", "Kind")), ""]
    return "\n".join(lines)


def settings_page() -> str:
    """By whoever owns them."""
    lines = [
        "# Settings",
        "",
        "Declared in `core/src/engine/config/declaration.py` and `plugins/server/src/engine_server/settings.py`.",
        "",
    ]
    lines += ["A driver is chosen in the same ways, by the keyword of its [point](points.md).", ""]
    for title, settings in (("The engine's", EngineSettings), ("The server's", ServerSettings)):
        lines += [f"## {title}", ""]
        lines += table(
            ("keyword and key", "flag", "environment", "type", "default", "meaning"),
            [_setting(setting) for setting in settings.declared.values()],
        )
    return "\n".join(lines)


def _setting(setting: Setting) -> tuple[str, ...]:
    kind = setting.type + (": " + ", ".join(code(choice) for choice in setting.choices) if setting.choices else "")
    default = "" if setting.default is None else code(str(setting.default))
    help_text = setting.help + (" (never shown)" if setting.secret else "")
    help_text += "; may be repeated" if setting.repeatable and "repeated" not in help_text else ""
    variable = f"ENGINE_{setting.name.upper()}"
    return code(setting.name), code(setting.flag), code(variable), kind, default, cell(help_text)


def error_classes() -> list[type[EngineError]]:
    """`EngineError` and every class below it that `engine.types.errors` defines, in the order of their definition."""
    module = importlib.import_module("engine.types.errors")
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, EngineError) and value.__module__ == module.__name__
    ]


def errors_page() -> str:
    """Defined in `engine.types.errors`; the status is what the server's own `describe` answers."""
    from engine_server.errors import describe

    logging.getLogger("engine.server").disabled = True  # it logs the errors that are only described here
    lines = ["# Errors", "", prose(sys.modules["engine.types.errors"].__doc__), ""]
    lines += ["The HTTP status is what the server answers when the error reaches a route.", ""]
    rows = [
        (f"[{kind.__name__}](#{kind.__name__.lower()})", code(kind.code), str(describe(kind("asked"))[0]))
        for kind in error_classes()
    ]
    lines += table(("class", "code", "HTTP status"), rows)
    for kind in error_classes():
        bases = " and ".join(f"`{base.__name__}`" for base in kind.__bases__)
        lines += [f"## {kind.__name__}", "", f"A kind of {bases}, with the code `{kind.code}`.", ""]
        lines += [prose(kind.__doc__), ""]
    return "\n".join(lines)


# -- commands and requests -----------------------------------------------------------------------------------------
def commands_page() -> str:
    """The commands of our plugins, each with the help that it prints."""
    from engine.cli.main import _find
    from engine.plugin.hints import known_drivers

    commands = {name: _find(name) for name in known_drivers()["commands"]}
    rows = [(code(f"engine {name}"), cell(command.help)) for name, command in commands.items()]
    lines = ["# Commands", "", *table(("command", "does"), rows)]
    for name, command in commands.items():
        parser = argparse.ArgumentParser(prog=f"engine {name}", description=command.help, formatter_class=_formatter())
        command.add_arguments(parser)
        for inner in _with_subparsers(parser):
            inner.formatter_class = _formatter()
            lines += [f"## {inner.prog}", "", "```text", inner.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _formatter() -> type[argparse.HelpFormatter]:
    return functools.partial(argparse.HelpFormatter, width=_HELP_WIDTH)  # type: ignore[return-value]


def _with_subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _with_subparsers(inner)


def requests_page() -> str:
    """The fields of the server's request bodies, inherited ones included."""
    from engine_server.bodies import Body

    modules = [importlib.import_module(name) for name in REQUEST_MODULES]
    meanings: dict[str, str] = arguments(class_docstrings("engine.types.params")["SamplingParams"])
    lines = ["# Requests", "", prose(modules[0].__doc__), ""]
    bodies = {getattr(m, name): text for m in modules for name, text in class_docstrings(m.__name__).items()}
    for body, docstring in bodies.items():
        name, own = body.__name__, dict(meanings)
        if name in COMMON_BODIES or not issubclass(body, Body):
            continue
        for base in reversed(body.__mro__):
            own |= arguments(bodies.get(base))
        annotations: dict[str, str] = {}
        for base in reversed(body.__mro__):
            annotations |= {n: str(t) for n, t in vars(base).get("__annotations__", {}).items()}
        rows = [
            (
                code(field),
                code(_ANNOTATED.sub(r"\1", annotations[field]).removesuffix(" | None")),
                "required" if info.is_required() else "" if info.default is None else code(repr(info.default)),
                cell(own.get(field, "")),
            )
            for field, info in body.model_fields.items()
        ]
        lines += [f"## {name}", "", prose(docstring.partition("\n")[0]), ""]
        lines += table(("field", "type", "default", "meaning"), rows)
    return "\n".join(lines)


def idle_server() -> Any:
    """A server, as its plugins see it, whose engine has done nothing yet."""
    from engine_server.keys import KeyRing
    from engine_server.plugins import ServerView

    idle: Any = SimpleNamespace(
        cores=[],
        hooks=HookRelay("frontend", Registry()),
        max_model_len=4096,
        model_name="model",
        observe=lambda measures: None,
        plan=SimpleNamespace(registry=Registry()),
        worker=None,
    )
    return ServerView(idle, Counter({200: 0}), KeyRing())


def metrics_page() -> str:
    """What the server's own exposition says of an engine that has done nothing yet."""
    from engine_server.metrics.exposition import Exposition

    text = bytes(asyncio.run(Exposition(idle_server()).metrics()).body).decode()
    meanings = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    rows = [
        (code(name), kind, cell(meanings[name]))
        for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
        if not name.endswith("_created")
    ]
    lines = ["# Metrics", "", "What `GET /metrics` shows, in the order in which it shows it.", ""]
    return "\n".join([*lines, *table(("metric", "type", "meaning"), rows)])


def _attribute_docstring(module: str, name: str) -> str:
    page = render_module(module)
    text = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
    return text.rpartition("```\n")[2]


if __name__ == "__main__":
    raise SystemExit(main())

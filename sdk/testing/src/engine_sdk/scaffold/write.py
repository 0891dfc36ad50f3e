"""Writes a plugin's package from the templates of its point."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from engine.plugin import POINTS, Registry
from engine.plugin.hints import did_you_mean
from engine.types.errors import ConfigError
from engine_sdk.conformance import SUITES

HOOKS = "hooks"
"""Not a point: a plugin that listens."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_ARCHITECTURE = re.compile(r"[A-Z][A-Za-z0-9]*\Z")
_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification", "Model")
"""Of architecture strings: what comes before is the model's name."""
_KIT = frozenset(
    {"adapter", "experts", "model", "platform", "quantization", "reasoning_parser", "tokenizer", "tool_parser"}
)
"""Points whose minimal body is built with the kit's parts."""
_NUMPY = frozenset({"adapter", "checkpoint", "drafter", "evictor", "grammar", "kv_connector"})
"""Points whose minimal body computes with numpy."""
_TORCH = frozenset(
    {"attention", "checkpoint", "communicator", "drafter", "kv_connector", "logits_processor", "model", "ops"}
    | {"adapter", "experts", "platform", "quantization"}
)
"""Points whose minimal body computes with torch."""
_USE = {
    "tool_parser": "engine serve --tool-call-parser my-driver",
    "reasoning_parser": "engine serve --reasoning-parser my-driver",
    "router": "engine serve --data-parallel-size 2 --router my-driver",
    "communicator": "engine serve --tensor-parallel-size 2 --communicator my-driver",
    "tokenizer": "engine generate --model FOLDER --tokenizer-mode my-driver 'Once upon a time'",
    "checkpoint": "engine generate --model my-driver:FOLDER 'Once upon a time'",
    "nodes": "engine serve --model FOLDER --tensor-parallel-size 2 --nodes my-driver",
    "experts": "engine serve --model FOLDER --tensor-parallel-size 2 --experts my-driver",
    "kv_connector": "engine serve --preemption-mode swap --swap-space 1GiB --kv-connector my-driver",
}


class Written(NamedTuple):
    """What was made.

    Attributes:
        folder: the package's.
        files: in it, relative.
    """

    folder: Path
    files: tuple[str, ...]


def kinds() -> tuple[str, ...]:
    """What there are templates for."""
    templates = files(__package__) / "templates"
    return tuple(kind for kind in (*SUITES, HOOKS) if (templates / kind).is_dir())


class _Names(NamedTuple):
    """What a plugin's parts are called.

    Attributes:
        driver: in its entry point.
        package: after "engine-".
        class_name: of its card and body, before what they end with.
        oracle: of a model, the line of its test that names one.
    """

    driver: str
    package: str
    class_name: str
    oracle: str = ""


def write(kind: str, name: str, parent: Path) -> Written:
    """Make the package `engine-<name>` in a new folder of that name.

    Args:
        kind: a point, or "hooks".
        name: the driver's, e.g. "my-attention"; of a model, the architecture's string as well: "MixtralForCausalLM"
            makes the package `engine-mixtral`.
        parent: where the folder is to be.

    Raises:
        ConfigError: there is no such kind; the name cannot be one, or is taken; the folder exists or cannot be made.
    """
    kind = kind.replace("-", "_")
    if kind not in kinds():
        found = "this version of the kit has no template for it" if kind in POINTS else "there is no such point"
        hint = did_you_mean(kind, kinds()) or f"there are templates for: {', '.join(kinds())}"
        raise ConfigError(f"make a plugin for '{kind}'", found, hint)
    names = _names(kind, name)
    point = "hooks.core" if kind == HOOKS else kind
    taken = [c for c in Registry.discover().candidates(point) if c.name == names.driver]
    if taken:
        raise ConfigError(
            f"make a plugin called '{name}'",
            f"{taken[0].provenance} offers a driver of this name for {kind}, and two of a name are an error",
            "choose another",
        )
    folder = parent / f"engine-{names.package}"
    contents = {path: _filled(text, kind, names) for path, text in _templates(kind).items()}
    package = f"engine_{names.package.replace('-', '_')}"
    contents = {path.replace("engine_my_driver", package): text for path, text in contents.items()}
    try:
        folder.mkdir(parents=True)
        for path, text in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"make {folder}", "it exists already", "choose another name, or another --folder") from error
    except OSError as error:
        raise ConfigError(f"make {folder}", str(error), "choose another --folder") from error
    return Written(folder, tuple(contents))


def _templates(kind: str) -> dict[str, str]:
    """Path in the package: text, with placeholders."""
    own, common = files(__package__) / "templates" / kind, files(__package__) / "templates" / "common"

    def text(name: str) -> str:
        source = own / f"{name}.txt"
        return (source if source.is_file() else common / f"{name}.txt").read_text(encoding="utf-8")

    package = "src/engine_my_driver"
    contents = {
        "pyproject.toml": text("pyproject.toml"),
        "README.md": text("README.md"),
        f"{package}/__init__.py": text("init.py"),
        f"{package}/py.typed": "",
        "tests/test_conformance.py" if kind != HOOKS else "tests/test_hooks.py": text("test.py"),
    }
    for source in sorted(own.iterdir(), key=lambda source: source.name):
        name = source.name.removesuffix(".txt")
        if name.endswith(".py") and name not in ("init.py", "test.py"):
            contents[f"{package}/{name}"] = source.read_text(encoding="utf-8")
    return contents


def _names(kind: str, name: str) -> _Names:
    """What the parts are called. Raises ConfigError for what is no name."""
    if kind == "model" and _ARCHITECTURE.match(name):
        plain = next((name.removesuffix(end) for end in _CLASS_ENDINGS if name.endswith(end)), "") or name
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", plain)
        return _Names(name, words.lower(), plain)
    if not _NAME.match(name) or keyword.iskeyword(name):
        remedy = "use lower-case letters, digits and dashes"
        remedy += ", or the architecture's string of config.json" if kind == "model" else ""
        raise ConfigError(f"make a plugin called '{name}'", "that is no name of a driver", remedy)
    class_name = "".join(part.capitalize() for part in name.split("-"))
    if kind != "model":
        return _Names(name, name, class_name)
    return _Names(f"{class_name}ForCausalLM", name, class_name, '\n    oracle = "LlamaForCausalLM"')


def _filled(text: str, kind: str, names: _Names) -> str:
    dependencies = [
        '"engine-base"',
        *(['"engine-kit"'] if kind in _KIT else []),
        *(['"msgspec"'] if kind == "kv_connector" else []),
    ]
    dependencies += ['"numpy"'] if kind in _NUMPY else []
    dependencies += ['"torch"'] if kind in _TORCH else []
    dependencies += ['"jinja2"'] if kind == "tokenizer" else []
    if kind == HOOKS:
        help_line, group = "A plugin that listens to hooks", "engine.hooks.core.v0"
        entry = "engine_my_driver.body:MyDriver"
        point = flag = suite = ""
    else:
        help_line, point = f"A driver of the point {kind}", kind
        group, entry = POINTS[kind].group(POINTS[kind].majors[-1]), "engine_my_driver.card:MyDriverCard"
        flag, suite = POINTS[kind].option_flag, SUITES[kind][0]
    fields = {
        "architecture": names.driver,
        "oracle": names.oracle,
        "help": help_line,
        "dependencies": ", ".join(dependencies),
        "group": group,
        "entry": entry,
        "point": point,
        "suite": suite,
        "use": _USE.get(kind, f"engine generate {flag} my-driver 'Once upon a time'"),
    }
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    plain = names.package.replace("-", "_")
    placeholders = {"my_driver": plain, "MyDriver": names.class_name, "my-driver": names.package}
    for placeholder, value in placeholders.items():
        text = text.replace(placeholder, value)
    return text

"""Grammar drivers against the JSON-Schema-Test-Suite, of which the user brings a copy.

    python -m engine_sdk.conformance.grammar.json_schema_test_suite COPY --grammar auto

Each schema is compiled, and each instance of it is written in many spellings (`spellings`). An instance that the suite
calls invalid and that can be written is a violation. Schemas that nobody takes are counted by the keyword that the
refusal names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, cast

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import Grammar, GrammarCard
from engine.plugin import Registry
from engine.plugin.choosing import choose
from engine.plugin.points import GRAMMAR
from engine.types.errors import ConfigError, EngineError, InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_sdk.conformance.grammar.cases import VOCAB_SIZE, vocabulary
from engine_sdk.conformance.grammar.spellings import spellings
from engine_sdk.conformance.grammar.walk import Walk, named, taken

COPY = "JSON_SCHEMA_TEST_SUITE"
"""The environment variable that names a copy."""
DRAFT = "draft2020-12"
_MEMBER = re.compile(rf"(?:^|/)tests/{re.escape(DRAFT)}/(.+)\.json$")


@dataclass(frozen=True)
class Group:
    """A schema of the suite, and instances of it.

    Args:
        name: "file: description".
        schema: decoded; a bool, too.
        tests: description, instance, and whether it is valid.
    """

    name: str
    schema: Any
    tests: Sequence[tuple[str, Any, bool]]


@dataclass
class Found:
    """What came of it.

    Attributes:
        schemas: how many there were.
        served: how many schemas each driver took.
        refused: the schemas that nobody took, by the keyword that the error names; "" where it names none.
        violations: invalid instances that can be written.
        too_strict: valid instances that cannot be written, in no spelling, of schemas that were taken.
        empty: schemas that were taken, and that have valid instances of which none can be written.
    """

    schemas: int = 0
    served: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    too_strict: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)


# -- a copy of the suite ---------------------------------------------------------------------------------------------
def groups(copy: Path, formats: bool = False) -> list[Group]:
    """The schemas of draft 2020-12 in a copy: the suite's own folder, its git directory, or an sdist of the package
    jsonschema, which has one.

    Args:
        formats: those of `format` alone, where it is to be enforced, with the type "string"; else all others.

    Raises ConfigError where there are none.
    """
    found = []
    for name, data in sorted(_files(copy)):
        if name.startswith("optional/format/") == formats:
            for group in json.loads(data):
                tests = [(test["description"], test["data"], test["valid"]) for test in group["tests"]]
                schema = group["schema"]
                if formats:  # of texts: many a driver takes no schema without a type
                    schema, tests = {**schema, "type": "string"}, [test for test in tests if isinstance(test[1], str)]
                found.append(Group(f"{name}: {group['description']}", schema, tests))
    if not found:
        raise ConfigError(
            f"read the JSON-Schema-Test-Suite in {copy}",
            f"there are no files tests/{DRAFT}/*.json",
            "clone https://github.com/json-schema-org/JSON-Schema-Test-Suite, or say --bring",
        )
    return found


def bring(folder: Path) -> Path:
    """Have pip load the sdist of the package jsonschema into a folder. Returns its path. Raises ConfigError."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, "jsonschema"], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError("load the sdist of the package jsonschema", f"pip fails: {said}")
    return max(folder.glob("jsonschema-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def _files(copy: Path) -> Iterator[tuple[str, bytes]]:
    """The names below the draft's folder, without ".json", and what is in them."""
    if copy.is_file():
        with tarfile.open(copy) as archive:
            yield from _members(archive)
        return
    if found := [folder for folder in copy.rglob(DRAFT) if folder.parent.name == "tests"]:
        for path in found[0].rglob("*.json"):
            yield path.relative_to(found[0]).with_suffix("").as_posix(), path.read_bytes()
    elif copy.is_dir():  # perhaps a git directory without files
        command = ["git", "-C", str(copy), "archive", "HEAD", f"tests/{DRAFT}"]
        done = subprocess.run(command, capture_output=True)
        if not done.returncode:
            with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
                yield from _members(archive)


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name, file = _MEMBER.search(member.name), archive.extractfile(member)
        if name is not None and file is not None:
            yield name[1], file.read()


# -- the drivers in turn ---------------------------------------------------------------------------------------------
class Turns:
    """The drivers at work, asked in turn as an engine asks them.

    Args:
        asked: as `--grammar`: names separated by commas, or "auto".
        options: the drivers' options as a user sets them; each gets those that it knows.

    Raises PluginError and OptionsError for names and options that there are not.
    """

    def __init__(self, asked: str, options: Mapping[str, Any]) -> None:
        chosen = choose(Registry.discover(), GRAMMAR, {"json": None}, asked, options)
        self._drivers: list[tuple[str, type[GrammarCard], Grammar]] = []
        for selection in chosen:
            context = GrammarContext(vocab_size=VOCAB_SIZE, vocabulary=vocabulary, options=selection.options)
            self._drivers.append((selection.candidate.name, selection.card, cast("Grammar", selection.build(context))))
        self.names = [name for name, _, _ in self._drivers]

    def taker(self, constraint: StructuredOutputsParams) -> tuple[str, Walk]:
        """Who takes a constraint, and texts under it. Raises InvalidRequestError with what all say."""
        constraint.verify()
        refusals: list[tuple[str, InvalidRequestError]] = []
        for name, card, grammar in self._drivers:
            try:
                return name, taken(card, grammar, constraint)
            except InvalidRequestError as error:
                refusals.append((name, error))
        raise constraint.refused(refusals)


def examine(turns: Turns, suite: Sequence[Group]) -> Found:
    """Every schema and instance of the suite."""
    found = Found(schemas=len(suite))
    for group in suite:
        try:
            constraint = StructuredOutputsParams(json=json.dumps(group.schema))
            driver, walk = turns.taker(constraint)
        except InvalidRequestError as error:
            found.refused.setdefault(named(error, group.schema), []).append(f"{group.name}: {error}")
            continue
        found.served[driver] += 1
        valid = written = 0
        for description, instance, is_valid in group.tests:
            texts = spellings(instance)
            name = f"{group.name}: {description}"
            text = next((text for text in texts if walk.writes(text)), None)
            if text is not None and not is_valid:
                found.violations.append(f"{driver}: {name}: {json.dumps(group.schema):.200}: {text!r}")
            if is_valid:
                valid += 1
                written += text is not None
                if text is None:
                    found.too_strict.append(f"{driver}: {name}: {json.dumps(group.schema):.200}: {texts[0]!r}")
        if valid and not written:
            found.empty.append(f"{driver}: {group.name}: {json.dumps(group.schema):.200}")
    return found


# -- the report ------------------------------------------------------------------------------------------------------
def report(found: Found, details: bool) -> str:
    """For people."""
    served = sum(found.served.values())
    lines = [f"schemas: {found.schemas}, taken: {served} ({', '.join(f'{n} by {d}' for d, n in found.served.items())})"]
    lines.append(f"refused: {found.schemas - served}, by the keyword that the refusal names:")
    for keyword, errors in sorted(found.refused.items(), key=lambda item: -len(item[1])):
        lines.append(f"  {len(errors):4} {keyword or '(NONE NAMED)'}")
        if details or not keyword:
            lines += [f"         {error}" for error in errors]
    lines.append(f"valid instances that cannot be written: {len(found.too_strict)}")
    lines += [f"  {text}" for text in found.too_strict] if details else []
    lines.append(f"schemas of which no valid instance can be written: {len(found.empty)}")
    lines += [f"  {text}" for text in found.empty] if details else []
    lines.append(f"violations, invalid instances that can be written: {len(found.violations)}")
    lines += [f"  {text}" for text in found.violations]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """The program. Returns 0 where no invalid instance can be written, 1 where one can, 2 where it cannot begin."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name if __spec__ else __name__}",
        description="Grammar drivers against the JSON-Schema-Test-Suite, draft 2020-12.",
    )
    parser.add_argument(
        "copy", nargs="?", default=os.environ.get(COPY), metavar="COPY",
        help=f"a clone of it, its git directory, or an sdist of jsonschema (default: what {COPY} names)",
    )  # fmt: skip
    parser.add_argument("--bring", metavar="FOLDER", help="load the sdist of jsonschema there, by pip, and take that")
    parser.add_argument("--grammar", default="auto", metavar="NAMES", help="as `engine serve` takes it (default: auto)")
    parser.add_argument(
        "--option", action="append", default=[], type=_pair, metavar="NAME=VALUE", help="an option of the drivers"
    )
    parser.add_argument("--formats", action="store_true", help="the schemas of `format` alone, where it is enforced")
    parser.add_argument("--details", action="store_true", help="each refusal and each valid instance refused, too")
    arguments = parser.parse_args(given)
    try:
        copy = bring(Path(arguments.bring)) if arguments.bring else arguments.copy
        if copy is None:
            raise ConfigError("read the JSON-Schema-Test-Suite", "no copy is named", f"name one, or set {COPY}")
        suite = groups(Path(copy), arguments.formats)
        turns = Turns(arguments.grammar, dict(arguments.option))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()
    found = examine(turns, suite)
    print(f"{copy}: {', '.join(turns.names)} in turn, {time.monotonic() - began:.0f} s")
    print(report(found, arguments.details))
    return 1 if found.violations else 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value: write NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())

"""The table of schemas is true, its spellings decode to what they spell, and the JSON-Schema-Test-Suite is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from broken_schemas import RefusesNotWithoutName, without_type
from judge import canonical, valid
from plain_grammar import Plain
from plain_grammar_card import PlainGrammar

from engine.interfaces.context import GrammarContext
from engine.types.errors import ConfigError, InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.schemas.normal import normalised
from engine_sdk.conformance.grammar.cases import VOCAB_SIZE, vocabulary
from engine_sdk.conformance.grammar.decoding import decoded
from engine_sdk.conformance.grammar.json_schema_test_suite import COPY, Group, Turns, examine, groups, main, report
from engine_sdk.conformance.grammar.parts import HELD
from engine_sdk.conformance.grammar.spellings import REPEATED, spellings, usual
from engine_sdk.conformance.grammar.values import Held
from engine_sdk.conformance.grammar.walk import Walk, named, taken

DIALECT = re.compile(r"\\[dwSpb]|\$$")
"""Patterns that Python's `re`, which the validator asks, reads otherwise than ECMA 262."""


def judged(held: Held) -> bool:
    """Whether the validator can tell: it knows nothing of formats, has its own patterns, and divides floats."""
    schema = held.schema if isinstance(held.schema, dict) else {}
    return not ("format" in schema or DIALECT.search(schema.get("pattern", "")) or schema.get("multipleOf") == 0.01)


# -- the table -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keyword", HELD)
def test_the_table_is_true(keyword: str) -> None:
    """What it calls valid is, and what it calls invalid is not."""
    for held in filter(judged, HELD[keyword]):
        assert [i for i in held.valid if not valid(held.schema, i)] == [], held.schema
        assert [i for i in held.invalid if valid(held.schema, i)] == [], held.schema
        for text in held.broken:
            try:
                instance = decoded(text)
            except ValueError:
                continue
            assert not valid(held.schema, instance), f"{held.schema}: {text}"


@pytest.mark.parametrize("keyword", HELD)
def test_normalised_schemas_mean_the_same(keyword: str) -> None:
    """What drivers are handed has the same valid instances, or is refused with a keyword."""
    for held in filter(judged, HELD[keyword]):
        try:
            normal = normalised(StructuredOutputsParams(json=json.dumps(held.schema))).schema
        except InvalidRequestError as error:
            assert named(error, held.schema), error
            continue
        assert [i for i in held.valid if not valid(normal, i)] == [], f"{held.schema}: {normal}"
        assert [i for i in held.invalid if valid(normal, i)] == [], f"{held.schema}: {normal}"


@pytest.mark.parametrize("keyword", HELD)
def test_spellings_decode_to_what_they_spell(keyword: str) -> None:
    for instance in chain.from_iterable((*held.valid, *held.invalid) for held in HELD[keyword]):
        texts = spellings(instance)
        assert len(texts) == len(set(texts)) and texts[: len(set(usual(instance)))] == list(
            dict.fromkeys(usual(instance))
        )
        for text in texts:
            assert canonical(decoded(text)) == canonical(instance), text


def test_spellings_differ_in_all_that_may_differ() -> None:
    texts = spellings({"aé": [12, "x"], "b": 0})
    for part in (
        "12.0",
        "12e0",
        "120E-1",
        "0.12e+2",
        '"\\u0078"',
        '"a\\u00e9"',
        '"\\u0061é"',
        '"\\u0061\\u00E9"',
        "\n",
    ):
        assert any(part in text for text in texts), part
    assert '{"b":0,"aé":[12,"x"]}' in texts
    assert '{"aé":[12,"x"],"b":0,"\\u0061\\u00e9":[12,"x"]}' in texts
    assert '{"b":null,"aé":[12,"x"],"b":0}' in texts and '{"b":true,"aé":[12,"x"],"\\u0062":0}' in texts
    assert usual({"b": 1e20, "a": [2e-7]})[-1] == '{"a":[0.0000002],"b":100000000000000000000}'
    assert len(spellings({str(n): {"a": 1} for n in range(50)})) < REPEATED + 45


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '{"\\udc00":1}', "4e+78354047452", "[-1e400]", "NaN", "01", '{"a":1,}', ""]
)
def test_what_readers_do_not_agree_on_is_not_decoded(text: str) -> None:
    with pytest.raises(ValueError):
        decoded(text)


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "found", "schema", "keyword"),
    [
        ("structured_outputs.json='not' in the schema at /items", "it cannot", {"items": {"not": {}}}, "not"),
        ("structured_outputs.json='{}'", "no driver: 'a': structured_outputs.json='if' in the schema: no", {}, "if"),
        ("structured_outputs.json='{}'", 'Unimplemented keys: ["oneOf"]', {"oneOf": []}, "oneOf"),
        ("structured_outputs.json='false'", "nothing can be written", False, "false"),
        ("structured_outputs.json={'not': {}}", "it cannot", {"not": {}}, ""),
        ("structured_outputs.json='{}'", "1 | start: {'not': {}}", {"not": {}}, ""),
        ("structured_outputs.json='{}'", "the 'schema' is odd", {"schema": 1}, ""),
    ],
)
def test_the_keyword_that_a_refusal_names(asked: str, found: str, schema: Any, keyword: str) -> None:
    assert named(InvalidRequestError(asked, found), schema) == keyword


# -- the JSON-Schema-Test-Suite --------------------------------------------------------------------------------------
FILES = {
    "maxItems": [{
        "description": "untyped", "schema": {"maxItems": 2}, "tests": [
            {"description": "two", "data": [1, 2], "valid": True},
            {"description": "three", "data": [1, 2, 3], "valid": False},
        ],
    }],
    "not": [{"description": "no integer", "schema": {"not": {"type": "integer"}}, "tests": [
        {"description": "one", "data": 1, "valid": False},
    ]}],
    "optional/format/date": [{"description": "dates", "schema": {"format": "date"}, "tests": [
        {"description": "no text", "data": 1, "valid": True},
        {"description": "February", "data": "2024-02-30", "valid": False},
    ]}],
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    for name, content in FILES.items():
        for draft in ("draft2020-12", "draft7"):
            path = folder / "tests" / draft / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content if draft == "draft2020-12" else []), encoding="utf-8")
    return folder


def test_copies_are_found(copy: Path, tmp_path: Path) -> None:
    """A folder, one in a folder, an archive, a git directory; and where there is none, it says so."""
    wanted = [Group("maxItems: untyped", {"maxItems": 2}, [("two", [1, 2], True), ("three", [1, 2, 3], False)])]
    wanted.append(Group("not: no integer", {"not": {"type": "integer"}}, [("one", 1, False)]))
    assert groups(copy) == groups(tmp_path) == wanted
    typed = {"format": "date", "type": "string"}
    assert groups(copy, formats=True) == [
        Group("optional/format/date: dates", typed, [("February", "2024-02-30", False)])
    ]
    with tarfile.open(tmp_path / "jsonschema-1.tar.gz", "w:gz") as archive:
        archive.add(copy, "jsonschema-1/json")
    assert groups(tmp_path / "jsonschema-1.tar.gz") == wanted
    git = ["git", "-C", str(copy), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    assert groups(copy / ".git") == wanted
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there are no files tests/draft2020-12"):
        groups(tmp_path / "empty")


class One:
    """One driver's turn."""

    def __init__(self, body: type[Plain]) -> None:
        self._grammar = body(GrammarContext(vocab_size=VOCAB_SIZE, vocabulary=vocabulary))

    def taker(self, constraint: StructuredOutputsParams) -> tuple[str, Walk]:
        return "one", taken(PlainGrammar, self._grammar, constraint)


def test_violations_and_refusals_are_told(copy: Path) -> None:
    sound = examine(One(Plain), groups(copy))
    assert (sound.schemas, dict(sound.served)) == (2, {"one": 2})
    assert not (sound.violations or sound.too_strict or sound.empty or sound.refused)
    loose = examine(One(without_type("maxItems")), groups(copy))
    assert len(loose.violations) == 1 and "untyped: three" in loose.violations[0] and "[1,2,3]" in loose.violations[0]
    silent = examine(One(RefusesNotWithoutName), groups(copy))
    assert list(silent.refused) == [""] and "(NONE NAMED)" in report(silent, details=False)


def test_the_program(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COPY, raising=False)
    assert main([]) == 2 and COPY in capsys.readouterr().err
    assert main([str(copy), "--grammar", "nobody"]) == 2
    assert main([str(copy), "--grammar", "choice"]) == 2  # it takes no schemas


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get(COPY), reason=f"{COPY} names no copy of the JSON-Schema-Test-Suite")
@pytest.mark.parametrize("formats", [False, True])
@pytest.mark.parametrize("grammar", ["auto", "xgrammar", "llguidance", "outlines"])
def test_no_driver_of_ours_writes_what_the_official_suite_calls_invalid(grammar: str, formats: bool) -> None:
    found = examine(Turns(grammar, {}), groups(Path(os.environ[COPY]), formats))
    assert not found.violations, "\n".join(found.violations)
    assert found.served and "" not in found.refused, found.refused.get("")

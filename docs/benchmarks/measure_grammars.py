"""What grammar drivers cost: `python docs/benchmarks/measure_grammars.py [DRIVER ...]`.

Over a vocabulary of 32,000 pieces: the bytes, and the commonest words of Python's own library. For each driver: how
long the first constraint takes (its process starts), further ones (median), one that is cached; and while a text of a
JSON schema is written, the masks of one row (median, and the slowest in a hundred) and of 64 rows at once, a row.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import numpy as np

from engine.interfaces.context import GrammarContext
from engine.plugin import Registry, choose
from engine.plugin.points import GRAMMAR
from engine.types.errors import InvalidRequestError
from engine.types.structured_outputs import KINDS, StructuredOutputsParams

SIZE, END, ROWS, FURTHER = 32_000, 31_999, 64, 8
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["cat", "dog", "owner"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "tags", "address"],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "name": "Anna from the return statement",
        "kind": "owner",
        "tags": ["class", "default value of nothing", "import error"],
        "address": {"street": "Main function 12", "zip": "12345"},
    },
    separators=(",", ":"),
)


def vocabulary() -> list[bytes | None]:
    """The bytes, then words (with the space before them) by how often they come, and an end."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        counts.update(re.findall(r" ?\w+|[^\w\s]{1,4}|\s+", path.read_text(encoding="utf-8", errors="replace")))
    words = [word.encode() for word, _ in counts.most_common(SIZE) if len(word.encode()) > 1]
    pieces: list[bytes | None] = [bytes([byte]) for byte in range(256)]
    return [*pieces, *words[: SIZE - 257], *[None] * max(0, SIZE - 256 - len(words[: SIZE - 257]))][:SIZE]


def tokens(pieces: list[bytes | None]) -> list[int]:
    """TEXT in the longest pieces."""
    ids = {piece: token for token, piece in reversed(list(enumerate(pieces))) if piece}
    left, found = TEXT.encode(), []
    while left:
        size = next(size for size in range(min(40, len(left)), 0, -1) if left[:size] in ids)
        found.append(ids[left[:size]])
        left = left[size:]
    return found


def measure(name: str, pieces: list[bytes | None]) -> dict[str, object]:
    """One driver's figures, in milliseconds and microseconds."""
    chosen, *_ = choose(Registry.discover(), GRAMMAR, dict.fromkeys(KINDS), name)
    card = chosen.card
    context = GrammarContext(vocab_size=SIZE, vocabulary=lambda: pieces, options=chosen.options)
    grammar = chosen.load_body()(context)

    def compiled(**constraint: object) -> float:
        began = time.perf_counter()
        params = StructuredOutputsParams(**constraint)  # type: ignore[arg-type]
        params.verify()
        card.verify(params)
        grammar.compile(params, (END,))
        return (time.perf_counter() - began) * 1e3

    def further(**more: object) -> float:
        return statistics.median(compiled(json={**PERSON, "title": f"{i}", **more}) for i in range(FURTHER))

    try:
        found: dict[str, object] = {"driver": name, "first_ms": round(compiled(json=PERSON), 1)}
        found["further_schema_ms"] = round(further(), 2)
        found["regex_ms"] = round(statistics.median(compiled(regex=f"[0-9]{{3}}-x{i}") for i in range(FURTHER)), 2)
        found["cached_ms"] = round(statistics.median(compiled(json=PERSON) for _ in range(FURTHER)), 3)
        constraint = StructuredOutputsParams(json=PERSON)
        alone, together, accepts = [], [], []
        matchers = [grammar.compile(constraint, (END,)) for _ in range(ROWS)]
        out, rows = np.zeros((ROWS, SIZE // 32), np.int32), np.arange(ROWS, dtype=np.int32)
        for token in tokens(pieces):
            began = time.perf_counter()
            grammar.fill_masks(matchers[:1], rows[:1], out)
            alone.append(time.perf_counter() - began)
            began = time.perf_counter()
            grammar.fill_masks(matchers, rows, out)
            together.append((time.perf_counter() - began) / ROWS)
            assert out.view(np.uint32)[0, token >> 5] >> (token & 31) & 1, "the text does not fit"
            began = time.perf_counter()
            for matcher in matchers:
                assert matcher.accept([token]) == 1
            accepts.append((time.perf_counter() - began) / ROWS)
        assert all(matcher.finished for matcher in matchers)
        for key, values in (("mask_us", alone), ("mask_of_64_us", together), ("accept_us", accepts)):
            found[key] = round(statistics.median(values) * 1e6, 1)
            found[key.replace("_us", "_p99_us")] = round(float(np.percentile(values, 99)) * 1e6, 1)
        return found
    except InvalidRequestError as error:
        return {"driver": name, "refused": str(error)}
    finally:
        grammar.close()


if __name__ == "__main__":
    vocabulary_of_words = vocabulary()
    for driver in sys.argv[1:] or ["xgrammar", "llguidance", "outlines"]:
        print(json.dumps(measure(driver, vocabulary_of_words)), flush=True)

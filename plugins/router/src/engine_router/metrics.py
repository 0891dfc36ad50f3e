"""`/metrics` of all servers as one page, each sample with its server's labels; and what the router counts itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from engine_router.backends import Backend

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<rest>.*)")


class Page:
    """Families of metrics, each with its samples together, as the text form has it."""

    def __init__(self) -> None:
        self._heads: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, text: str, labels: str) -> None:
        """Take a page over, with these labels for each sample."""
        family = ""
        for line in text.splitlines():
            if line.startswith("# ") and line[2:6] in ("HELP", "TYPE"):
                family = line.split(" ", 3)[2]
                head = self._heads.setdefault(family, [])
                if all(line[2:6] != one[2:6] for one in head):
                    head.append(line)
            elif found := _SAMPLE.fullmatch(line):
                own = found["labels"]
                both = f"{labels},{own}" if own else labels
                name = found["name"]
                place = family if family and name.startswith(family) else name
                self._samples.setdefault(place, []).append(f"{name}{{{both}}} {found['rest']}")

    def add_family(self, name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> None:
        """The router's own; samples by their labels."""
        self._heads[name] = [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
        self._samples[name] = [
            f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples
        ]

    def text(self) -> str:
        """The page."""
        lines: list[str] = []
        for family, samples in self._samples.items():
            lines += [*self._heads.get(family, ()), *samples]
        return "\n".join(lines) + "\n"


def labels_of(backend: Backend) -> str:
    """The labels that tell servers apart."""
    name = backend.name.replace("\\", r"\\").replace('"', r"\"")
    return f'backend="{name}",role="{backend.role}"'


def add_own(page: Page, backends: Iterable[Backend], whole: Mapping[str, int], responses: Counter[int]) -> None:
    """What the router counts itself; `whole`: prompts that were computed where they go on, by why."""
    several = list(backends)
    page.add_family(
        "engine_router:backend_up",
        "gauge",
        "1 for each server that takes requests.",
        [(labels_of(one), int(one.alive)) for one in several],
    )
    page.add_family(
        "engine_router:active_requests",
        "gauge",
        "Requests that were sent to a server and have not ended.",
        [(labels_of(one), one.active) for one in several],
    )
    page.add_family(
        "engine_router:requests_total",
        "counter",
        "Requests sent to a server, by what became of them: a status, unreachable, lost.",
        [(f'{labels_of(one)},outcome="{name}"', count) for one in several for name, count in one.counts.items()],
    )
    page.add_family(
        "engine_router:whole_requests_total",
        "counter",
        "Requests whose prompt was computed where they go on, although servers for prompts are there, by why.",
        [(f'reason="{why}"', count) for why, count in whole.items()],
    )
    page.add_family(
        "engine_router:http_responses_total",
        "counter",
        "Answers by status code.",
        [(f'code="{code}"', count) for code, count in responses.items()],
    )

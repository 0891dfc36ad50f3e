"""The page docs/benchmarks/servers.md and its plot, written from results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine_bench.plot import draw_lines
from engine_bench.statistics import median
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.servers.known import OURS, SERVERS
from tests.benchmarks.servers.results import GRID, Load, Point, Results, Search, rate_of

BAR = 1.3
"""How many times the best server's rate ours has to keep."""

INTRODUCTION = f"""# Servers beside servers

`engine serve` and other servers on the same processor, with the same checkpoint, under the same client: that of
[`engine bench serve`](method.md), over HTTP, with streamed chats. Conversations begin at random (Poisson), share a few
system prompts, and have several turns; each turn is sent when the answer to the one before is whole and the user has
thought. Words, lengths, arrivals and pauses are drawn from a seed that every server is given alike; answers are each
server's own.

The figure is the highest rate, in conversations that begin in a second, at which the 99th percentile of the time to the
first token keeps the objective. Each search goes up in steps until it does not, then halves what lies between, on a
grid whose neighbours differ by {2 ** (1 / GRID) - 1:.0%}. Servers are searched one after the other, in turns, several
rounds; the ratio is the median of the rounds', with the lowest and the highest. Above 1, ours is ahead.

Every answer is checked: none fails, they have as many tokens as they asked for and end by their length, and first
prompts have as many tokens on every server. A rate with a fault does not count as kept. Client and server share the
processor's cores: what the client takes of them stands in the tables. Servers are told the longest context, the
requests at once, the chat template, and, as each has to be, memory for keys and values, numbers and threads; they are
otherwise left as they come."""


def page(results: Results, plot: str | None) -> str:
    """All of it, as Markdown. plot: the file's name, beside the page."""
    if not results.searches:
        command = 'make bench-servers SERVERS_FLAGS="--page docs/benchmarks/servers.md"'
        parts = [INTRODUCTION, f"Nothing has been measured yet: `{command}` writes this page.", _left_out(results)]
        return "\n\n".join(part for part in parts if part) + "\n"
    parts = [INTRODUCTION, _servers(results), _run(results)]
    for model in MODELS:
        if any(one.model == model for one in results.searches):
            parts.append(_model(results, model))
    if plot is not None:
        parts.append(f"![First token, time between tokens and goodput by rate]({plot})")
    parts.append(_left_out(results))
    return "\n\n".join(part for part in parts if part) + "\n"


def _left_out(results: Results) -> str:
    if not results.left_out:
        return ""
    return "## Left out\n\n" + "\n".join(f"- {entry.what}: {entry.reason}" for entry in results.left_out)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _names(results: Results, model: str) -> list[str]:
    """The servers that were measured with a model, ours first."""
    found = dict.fromkeys(one.server for one in results.searches if one.model == model)
    return sorted(found, key=lambda name: name != OURS.name)


def _servers(results: Results) -> str:
    about = {server.name: server.about for server in SERVERS.values()}
    rows = [
        (f"`{name}`", about.get(name, ""), ", ".join(f"{one} {text}" for one, text in found.items()))
        for name, found in results.versions.items()
    ]
    return _table(("server", "how it is used", "versions"), rows)


def _run(results: Results) -> str:
    features = ", ".join(results.features) or "no vector instructions known"
    told = f"{results.date}, {results.threads} cores ({features}), which client and server share."
    return "\n".join(["## The run", "", told, "", "```sh", *results.commands, "```"])


def _model(results: Results, model: str) -> str:
    load = results.loads[model]
    names = _names(results, model)
    rows = []
    for name in names:
        ratios = [] if name == OURS.name else results.ratios(model, OURS.name, name)
        found = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        rows.append((f"`{name}`", ", ".join(_limit(one) for one in results.of(model, name)), found))
    parts = [
        f"## {model} ({MODELS[model].num_parameters() / 1e6:,.0f} million parameters)",
        _load(load),
        _table(("server", f"rate kept in each round, {_UNIT}", "ours over it"), rows),
        _bar(results, model, names),
        _table(_HEAD, [_row(name, place, points) for name in names for place, points in _places(results, model, name)]),
        "Medians of the rounds that measured the rate. Goodput counts turns that kept both objectives. In brackets:\n"
        "more than half of the rounds did not keep the rate.",
    ]
    return "\n\n".join(parts)


_UNIT = "conversations/s"
_HEAD = (
    "server", _UNIT, "rounds", "first token p50, ms", "p99", "a token p50, ms", "p99", "goodput, turns/s", "of turns/s",
    "output tokens/s", "client, cores",
)  # fmt: skip


def _load(load: Load) -> str:
    lines = [
        f"Conversations of {load.turns} turns; {load.system_prompts} system prompts of {load.system_words} words;",
        f"turns of {load.words} words, answers of {load.output_len} tokens,",
        f"{load.think_time:g} s of thought on average.",
        f"They begin during {load.seconds:g} s. The objective: {load.slo_ttft:g} s to the first token, and on average",
        f"{load.slo_tpot * 1e3:g} ms a token. Each server may run {load.max_num_seqs} requests at once.",
    ]
    return "\n".join(lines)


def _limit(search: Search) -> str:
    return "none" if search.limit is None else f"{rate_of(search.limit):.3g}"


def _bar(results: Results, model: str, names: Sequence[str]) -> str:
    ratios = {name: results.ratio(model, OURS.name, name) for name in names if name != OURS.name}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return f"The bar is {BAR:g} times the best of the others, of which none was measured."
    best = min(known, key=lambda name: known[name])
    word = "met" if known[best] >= BAR else "missed"
    return f"The bar is {BAR:g} times the best of the others: {known[best]:.2f} times `{best}`, {word}."


def _places(results: Results, model: str, server: str) -> list[tuple[int, list[Point]]]:
    found: dict[int, list[Point]] = {}
    for one in results.of(model, server):
        for point in one.points:
            found.setdefault(point.place, []).append(point)
    return sorted(found.items())


def _middle(points: Sequence[Point], name: str) -> float:
    return median([point.figures[name] for point in points if name in point.figures] or [float("nan")])


def _cell(figure: float, form: str = "") -> str:
    """Empty where no turn had it."""
    return "" if math.isnan(figure) else format(figure, form or (",.3g" if figure < 1000 else ",.0f"))


def _good(point: Point) -> float:
    """The share of the answered turns that kept both objectives; 0 where none was answered."""
    done = point.figures["completed"]
    return point.figures["good_requests"] / done if done else 0.0


def _kept(points: Sequence[Point]) -> bool:
    return sum(point.keeps for point in points) * 2 > len(points)


def _row(server: str, place: int, points: Sequence[Point]) -> tuple[str, ...]:
    names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "goodput_per_s", "requests_per_s")
    cells = [_cell(_middle(points, name)) for name in names]
    rate = f"{rate_of(place):.3g}"
    tokens, client = (_middle(points, name) for name in ("output_tokens_per_s", "client_cores"))
    cells += [_cell(tokens, ",.0f"), _cell(client, ".2f")]
    return (f"`{server}`", rate if _kept(points) else f"({rate})", str(len(points)), *cells)


def draw(results: Results, path: Path) -> None:
    """The plot: by rate, what the 99th percentiles are of what the objective allows, and the share of good turns."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for model in dict.fromkeys(one.model for one in results.searches):
        load = results.loads[model]
        figures = {
            f"{model}: first token, p99": ("ttft_ms_p99", load.slo_ttft * 1e3),
            f"{model}: time a token, p99": ("tpot_ms_p99", load.slo_tpot * 1e3),
        }
        for title, (figure, allowed) in figures.items():
            panels[title] = {
                name: [(rate_of(place), _middle(points, figure) / allowed) for place, points in found]
                for name in _names(results, model)
                if (found := _places(results, model, name))
            }
        panels[f"{model}: good turns"] = {
            name: [(rate_of(place), median([_good(point) for point in points])) for place, points in found]
            for name in _names(results, model)
            if (found := _places(results, model, name))
        }  # fmt: skip
    draw_lines(str(path), "", "conversations a second", "of what the objective allows", panels)

"""`engine bench speculation`: what each drafter brings, one stream at a time, beside none in the same run."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from engine.embedding import OutputKind
from engine.plugin import Registry
from engine.types.errors import ConfigError, EngineError
from engine.types.outputs import StepStats
from engine.types.params import SamplingParams
from engine_bench.plot import check_plot, draw_lines
from engine_bench.report import Report
from engine_bench.session import Session, open_session
from engine_bench.speculation_prompts import PROMPTS, WARM_UP
from engine_bench.statistics import spread

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.interfaces.drafter import DrafterCard

KNOWN = "known"
"""The drafter of engine-drafters whose acceptance is set."""
_ROUNDS = 4
"""Runs at most until `known` knows the answers that are given with its drafts: other shapes of batches round otherwise,
and where the two best tokens are nearly equal the text goes on in another way."""
_NOISY = 0.2


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """What to measure.

    Args:
        drafters: (name, options) of each; None: all that are installed, without options.
        num_tokens: numbers of drafts, ascending.
        right: shares of drafts that are right, of which `known` is measured.
        output_len: tokens of an answer at most.
        plot: a file to draw to.
    """

    drafters: Sequence[tuple[str, Mapping[str, str]]] | None
    num_tokens: Sequence[int]
    right: Sequence[float]
    output_len: int
    plot: str | None = None


@dataclass
class Sample:
    """What was counted while answers were decoded, from each one's first token on."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    drafts: int = 0
    accepted: int = 0

    def add(self, other: Sample) -> None:
        """Count another one, too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Run:
    """One engine's answers.

    Args:
        name: of what drafted; "none".
        k: the most drafts.
        adaptive: whether their number followed the rule.
        kinds: what was counted, by kind of prompt.
        answers: (tokens of the prompt, ids of prompt and answer) of each.
    """

    name: str
    k: int = 0
    adaptive: bool = False
    kinds: dict[str, Sample] = field(default_factory=dict)
    answers: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def all(self) -> Sample:
        """Of all kinds."""
        total = Sample()
        for sample in self.kinds.values():
            total.add(sample)
        return total

    @property
    def label(self) -> str:
        """Of its figures."""
        return f"{self.name}_{'up_to_' if self.adaptive else 'k'}{self.k}"


def parse_drafters(texts: Sequence[str]) -> list[tuple[str, dict[str, str]]] | None:
    """Read "NAME,option=value,..." of each, or "none"; None for nothing at all. Raises ConfigError."""
    if not texts:
        return None
    if list(texts) == ["none"]:
        return []
    found = []
    for text in texts:
        name, *options = re.split(r",(?=[\w.]+=)", text)  # values, like a tree's paths, may have commas
        if not name or re.search("[,=]", name):
            raise ConfigError(f"--draft {text}", "that is no drafter", "write NAME, or NAME,option=value,...")
        chosen = dict(option.split("=", 1) for option in options)
        if taken := sorted(chosen.keys() & {"num_tokens", "adaptive"}):
            raise ConfigError(
                f"--draft {text}",
                f"this measures several numbers of drafts, and the rule: {' and '.join(taken)} would not count",
                "give the numbers by --num-tokens N,...",
            )
        found.append((name, chosen))
    return found


def measure_speculation(config: EngineConfig, options: SpeculationOptions) -> Report:
    """Run it. Raises ConfigError for a drafter in `config`, for a file that cannot be drawn to, for a named drafter
    that cannot be used here and for answers too short to measure, and the errors of the engine."""
    if config.asked("drafter") is not None or config.options_for("drafter"):
        raise ConfigError("--drafter", "this measures one drafter after the other", "name it by --draft")
    if options.plot is not None:
        check_plot(options.plot)
    before, about = _none(config, options)
    if not before.all.tokens:
        raise ConfigError(
            f"measure speculation with answers of up to {options.output_len} tokens",
            "every answer ended with its first token, behind which drafts would come",
            "take a larger --output-len, or a model that answers at length",
        )
    installed = _installed()
    runs: list[Run] = []
    left_out: list[str] = []
    every = [(name, dict[str, str]()) for name in installed if name != KNOWN]
    seen: Counter[str] = Counter()
    for name, chosen in every if options.drafters is None else options.drafters:
        seen[name] += 1
        label = name if seen[name] == 1 else f"{name}_{seen[name]}"  # with other options
        try:
            runs += _measured(config, label, name, chosen, options)
        except EngineError as error:
            if options.drafters is not None:
                raise
            left_out.append(f"{name} is left out: {error.found}")
    with tempfile.TemporaryDirectory() as folder:
        if options.right and KNOWN not in installed:
            left_out.append(f"{KNOWN} is left out: engine-drafters is not installed")
        for right in options.right if KNOWN in installed else ():
            runs += _known(config, right, before.answers, Path(folder) / "answers.json", options)
    after, _ = _none(config, options)
    return _report(about, options, before, after, runs, left_out)


def _installed() -> list[str]:
    return sorted({candidate.name for candidate in Registry.discover().candidates("drafter")})


def _with(config: EngineConfig, name: str, options: Mapping[str, Any]) -> EngineConfig:
    return config.model_copy(
        update={"points": {**config.points, "drafter": name}, "options": {**config.options, "drafter": dict(options)}}
    )


def _none(config: EngineConfig, options: SpeculationOptions) -> tuple[Run, tuple[str, dict[str, Any]]]:
    """A run without drafts, and the engine in words and figures."""
    with open_session(config) as session:
        return _answered(session, Run("none"), options), (session.title(), session.figures())


def _measured(
    config: EngineConfig, label: str, name: str, chosen: Mapping[str, Any], options: SpeculationOptions
) -> Iterator[Run]:
    """Each number of drafts, and the rule with the largest; of a tree that is named, its own number alone."""
    own = _number_of(config, name, chosen)
    numbers = options.num_tokens if own is None else [own]
    for k, adaptive in [*((k, False) for k in numbers), (numbers[-1], True)]:
        with open_session(_with(config, name, {**chosen, "num_tokens": k, "adaptive": adaptive})) as session:
            yield _answered(session, Run(label, k, adaptive), options)


def _number_of(config: EngineConfig, name: str, chosen: Mapping[str, Any]) -> int | None:
    """The drafts that a driver has by its other options, a tree's nodes for one; None where they say nothing of it."""
    registry = Registry.discover().following(config.plugin_list)
    try:
        card = cast("type[DrafterCard]", registry.card(registry.find("drafter", name)))
        options = card.Options.model_validate(chosen)
    except (EngineError, ValidationError):
        return None  # the engine says it better
    return options.num_tokens if "num_tokens" in options.model_fields_set else None


def _known(
    config: EngineConfig, right: float, answers: list[tuple[int, list[int]]], file: Path, options: SpeculationOptions
) -> Iterator[Run]:
    """The drafter that knows the answers, right so often: again until it knows those that are given with its drafts."""
    for k, adaptive in [*((k, False) for k in options.num_tokens), (options.num_tokens[-1], True)]:
        chosen = {"answers": str(file), "right": right, "num_tokens": k, "adaptive": adaptive}
        for _ in range(_ROUNDS):
            file.write_text(json.dumps(answers))
            with open_session(_with(config, KNOWN, chosen)) as session:
                run = _answered(session, Run(f"{KNOWN}_{100 * right:.4g}", k, adaptive), options)
            if run.answers == answers:
                break
            answers = run.answers
        yield run


def _answered(session: Session, run: Run, options: SpeculationOptions) -> Run:
    """Ask everything, one after the other."""
    _, prompt, ids, _ = _stream(session, [{"role": "user", "content": WARM_UP}], options.output_len)
    run.answers.append((len(prompt), prompt + ids))
    for kind, conversations in PROMPTS.items():
        sample = run.kinds[kind] = Sample()
        for turns in conversations:
            messages: list[dict[str, str]] = []
            for turn in turns:
                messages.append({"role": "user", "content": turn})
                counted, prompt, ids, text = _stream(session, messages, options.output_len)
                sample.add(counted)
                run.answers.append((len(prompt), prompt + ids))
                messages.append({"role": "assistant", "content": text})
    return run


def _stream(
    session: Session, messages: Sequence[dict[str, str]], output_len: int
) -> tuple[Sample, list[int], list[int], str]:
    """One answer, greedy: what was counted, the prompt's ids, the answer's, its text."""
    engine = session.engine
    try:
        prompt: Any = engine.frontend.inputs.render_chat(messages)
    except EngineError:  # a model without a chat template
        prompt = "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
    engine.add_request(
        "one", prompt, SamplingParams(temperature=0.0, max_tokens=output_len), output_kind=OutputKind.DELTA
    )
    ids: list[int] = []
    text, asked, began, first = "", list[int](), 0.0, StepStats()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if not ids:
                asked = list(output.prompt_token_ids)
                began, first = time.perf_counter(), engine.stats()
            ids += output.outputs[0].token_ids
            text += output.outputs[0].text
    seconds, last = time.perf_counter() - began, engine.stats()
    counted = Sample(
        tokens=last.generation_tokens - first.generation_tokens,
        seconds=seconds,
        steps=last.step_id - first.step_id,
        rows=last.num_draft_rows - first.num_draft_rows,
        drafts=last.num_drafts - first.num_drafts,
        accepted=last.num_accepted_drafts - first.num_accepted_drafts,
    )
    return counted, asked, ids, text


def _report(
    about: tuple[str, dict[str, Any]],
    options: SpeculationOptions,
    before: Run,
    after: Run,
    runs: Sequence[Run],
    left_out: Sequence[str],
) -> Report:
    title, figures = about
    report = Report(
        f"speculation of {title}: one stream, answers of up to {options.output_len} tokens", {"bench": "speculation"}
    )
    report.figures |= figures
    plain = before.all
    plain.add(after.all)
    step = plain.seconds / max(plain.steps, 1)
    rate = plain.rate
    report.figures |= {"none_tokens_per_s": rate, "none_step_ms": 1e3 * step, "tokens": before.all.tokens}
    report.row("", "drafts", "accepted", "accepted length", "a step", "cost of a draft", "tokens/s", "beside none")
    report.row("none", "", "", "", f"{1e3 * step:.2f} ms", "", f"{rate:.1f}", "1.00")
    for run in runs:
        _add_run(report, run, step, rate)
    report.lines.append("")
    report.row("beside none", *PROMPTS)
    kinds = {kind: Sample() for kind in PROMPTS}
    for kind, sample in kinds.items():
        sample.add(before.kinds[kind])
        sample.add(after.kinds[kind])
    for run in runs:
        cells = []
        for kind, sample in run.kinds.items():
            speed = sample.rate / kinds[kind].rate if kinds[kind].rate else 0.0
            report.figures[f"{run.label}_{kind}_speedup"] = speed
            cells.append(f"{speed:.2f}")
        report.row(f"{run.name}, {_number(run)}", *cells)
    report.lines += ["", *left_out] if left_out else []
    if (apart := spread(before.all.rate, after.all.rate)) > _NOISY:
        report.warnings.append(f"without drafts the first run and the last one lie {apart:.0%} apart: noise")
    if options.plot is not None:
        draw_lines(options.plot, report.title, "drafts", "tokens/s beside none", _lines(runs, kinds, rate))
        report.lines.append(f"drawn to {options.plot}")
    return report


def _add_run(report: Report, run: Run, step: float, rate: float) -> None:
    """A line and figures. step: seconds of one without drafts; rate: tokens a second without."""
    total = run.all
    accepted = total.accepted / total.drafts if total.drafts else 0.0
    length = 1 + total.accepted / total.rows if total.rows else 1.0
    a_step = total.drafts / total.steps if total.steps else 0.0
    longer = total.seconds / max(total.steps, 1) / step if step else 0.0  # times one without drafts
    cost = (longer - 1) / a_step if a_step else 0.0
    speed = total.rate / rate if rate else 0.0
    cells = (f"{accepted:.1%}", f"{length:.2f}", f"{longer:.2f} times", f"{cost:.3f}", f"{total.rate:.1f}")
    report.row(run.name, _number(run), *cells, f"{speed:.2f}")
    report.figures |= {
        f"{run.label}_accepted_share": accepted,
        f"{run.label}_accepted_length": length,
        f"{run.label}_step": longer,
        f"{run.label}_draft_cost": cost,
        f"{run.label}_tokens_per_s": total.rate,
        f"{run.label}_speedup": speed,
    }


def _number(run: Run) -> str:
    return f"up to {run.k}" if run.adaptive else str(run.k)


def _lines(
    runs: Sequence[Run], kinds: Mapping[str, Sample], rate: float
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """By panel (all prompts, each kind) and drafter: the speed beside none for each number of drafts."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {"all": {}, **{kind: {} for kind in kinds}}
    for run in runs:
        if run.adaptive:
            continue
        panels["all"].setdefault(run.name, []).append((run.k, run.all.rate / rate))
        for kind, sample in run.kinds.items():
            panels[kind].setdefault(run.name, []).append((run.k, sample.rate / (kinds[kind].rate or 1)))
    return panels

"""What an engine says when it stands: the model, its memory, how much it holds, and who serves each point and why."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from engine.embedding import broken_plugins, capacity, longest
from engine.plugin.card import VARIES
from engine.plugin.points import HOOK_PROCESSES, HOOKS
from engine.types.hooks import ChosenDriver
from engine.types.parallel import split_layers
from engine_kit.chosen_drivers import chosen_drivers
from engine_kit.generation_config import as_text

if TYPE_CHECKING:
    from engine.embedding import Launch
    from engine.types.start import WorkerReady

_NARROWEST = 20
_PADDING = re.compile(" {2,}")
_SECOND_COLUMN = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")
_OPERATIONS_SHOWN = 3


def greeting(
    launch: Launch, worker: WorkerReady, address: str | None, api_processes: int = 1, *, verbose: bool = False
) -> str:
    """What whoever starts an engine is told, without a newline at the end: the model; device and cache; the address.
    With `verbose` all that `render` tells, whose arguments these are."""
    if verbose:
        return render(launch, worker, address, api_processes)
    start, ranks = launch.start.worker, launch.config.data_parallel_size
    several = f" on each of {ranks} ranks" if ranks > 1 else ""
    model = [launch.model.architecture, f"{_count(worker.num_parameters)} parameters"]
    model += ["with a chat template"] if launch.has_chat_template else []
    cache = "no KV cache"
    if start.layout.tables:
        cache = f"KV cache of {amount(worker.cache_bytes)} for {capacity(launch, worker)[0]:,} tokens{several}"
    lines = [
        f"{launch.model_name}: {', '.join(model)}",
        f"{start.dtype} on {start.device}, {cache}, {start.max_model_len:,} tokens a request"
        + _too_long(launch, worker),
    ]
    if broken := len(broken_plugins(launch, worker)):
        lines.append(f"{broken} broken plugins are left out; --verbose names them, `engine plugins doctor` helps")
    return "\n".join([*lines, *([] if address is None else [_served(launch, address, api_processes)])])


def show(text: str) -> None:
    """Print it; on a terminal, wrapped."""
    print(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text, flush=True)


def wrapped(text: str, width: int) -> str:
    """The text for a terminal of so many columns: a line that is longer goes on below its second column, or a little
    behind its own beginning where that stands too far to the right. No word is broken."""
    lines = []
    for line in text.split("\n"):
        column = _SECOND_COLUMN.match(line)
        indent = _indent(line) + 4
        if column is not None and 3 * column.end() <= 2 * width:
            indent = column.end()
        elif len(line) > width:
            line = " " * _indent(line) + _PADDING.sub("  ", line.lstrip(" "))
        lines += textwrap.wrap(
            line,
            max(width, _NARROWEST),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def render(launch: Launch, worker: WorkerReady, address: str | None, api_processes: int = 1) -> str:
    """The banner: one screen of text without a newline at the end.

    Args:
        launch: the launcher's decisions.
        worker: what the worker told when it was ready.
        address: where the server is reached, e.g. "http://127.0.0.1:8000/v1"; None where there is no server.
        api_processes: that take connections there.
    """
    start = launch.start.worker
    model = launch.model
    ranks = launch.config.data_parallel_size
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    tokens, full_length = capacity(launch, worker)
    at_once, cache = min(full_length, start.max_num_seqs), "none: the model keeps nothing"
    if start.layout.tables:
        cache = f"{amount(worker.cache_bytes)}, {tokens:,} tokens in blocks of {start.layout.block_size}"
        if start.kv_cache_dtype not in (None, start.dtype):
            cache += f", {start.kv_cache_dtype}"
        cache += each
        cache += "" if launch.start.enable_prefix_caching else ", prefix caching off"
    facts = [
        ("model", f"{launch.model_name} ({model.architecture}, {_count(worker.num_parameters)} parameters)"),
        ("folder", launch.files.folder),
        ("dtype", f"{start.dtype} on {start.device}" + _stored_as(launch)),
        ("weights", f"{amount(worker.weight_bytes)}, loaded in {worker.load_seconds:.2f} s"),
        ("KV cache", cache),
        *(
            [("steps", f"{amount(worker.step_bytes)} at most, by a profile of the largest")]
            if worker.step_bytes is not None
            else []
        ),
        *([("capture", _capture(worker))] if worker.not_captured is not None else []),
        (
            "requests",
            f"up to {start.max_model_len:,} tokens each; {at_once:,.1f} at once at full length, "
            f"{start.max_num_seqs:,} at most{each}{_too_long(launch, worker)}",
        ),
    ]
    if launch.has_chat_template:
        facts.append(("chat", "by the template of --chat-template" if launch.chat_template else "by its chat template"))
    if sampling := as_text(model.sampling):
        facts.append(("sampling", sampling))
    if launch.config.batch_invariant:
        facts.append(("numerics", "a row has the same bits in any batch" + _passed_over(launch)))
    if launch.registry.plugins.text:
        facts.append(("plugins", f"{launch.registry.plugins.text} ({len(launch.registry.denied)} denied)"))
    if divided := _divided(launch):
        facts.insert(2, divided)
    drivers = [(_label(chosen), f"{chosen.driver}: {chosen.why}") for chosen in chosen_drivers(launch.selections)]
    text = [f"Engine {version('engine-base')}", *_columns(facts, 2), "  drivers", *_columns(drivers, 4)]
    broken = broken_plugins(launch, worker)
    if hooks := _hooks(launch, {(plugin.point, plugin.driver) for plugin in broken}):
        text += ["  hooks", *_columns(hooks, 4)]
    if broken:
        names = [(f"{plugin.point} '{plugin.driver}'", f"{plugin.provenance}: {plugin.found}") for plugin in broken]
        text += ["  broken, and left out (`engine plugins doctor` says how to mend them)", *_columns(names, 4)]
    if address is not None:
        text.append("  " + _served(launch, address, api_processes))
    return "\n".join(text)


def _divided(launch: Launch) -> tuple[str, str] | None:
    """Over how many processes the model is divided, and how; None where one has it all."""
    parallel, ranks = launch.start.worker.parallel, launch.config.data_parallel_size
    parts = []
    if parallel.pp > 1:
        layers = ", ".join(map(str, split_layers(parallel, launch.model.num_layers)))
        parts.append(f"{parallel.pp} pipeline stages of {layers} layers")
    if parallel.tp > 1:
        parts.append(f"each layer over {parallel.tp} ranks")
    if parallel.cp > 1:
        parts.append(f"the tokens of each sequence over {parallel.cp} ranks")
    if parallel.ep:
        parts.append(f"experts dealt whole over {parallel.ep_size} ranks")
    how = f"divided over {parallel.world} processes{' each' if ranks > 1 else ''}: {'; '.join(parts)}"
    if ranks > 1:
        whose = "which share routed experts" if parallel.dp > 1 else "each with the whole model"
        return "ranks", f"{ranks} engine cores, {whose}" + (f", {how}" if parts else "")
    return ("workers", f"the model is {how}") if parts else None


def _passed_over(launch: Launch) -> str:
    """What `batch_invariant` costs: the drivers that were left out for it alone, and what those at work say of it."""
    names: dict[str, None] = {}
    remarks: dict[str, None] = {}
    for selection in launch.selections:
        needs = selection.need if isinstance(selection.need, tuple) else (selection.need,)
        for need in needs:
            if getattr(need, "batch_invariant", False):
                usual = set(selection.card.remarks(replace(need, batch_invariant=False)))
                remarks |= dict.fromkeys(said for said in selection.card.remarks(need) if said not in usual)
        for verdict in selection.verdicts:
            if set(verdict.reasons) == {VARIES}:
                names[f"{selection.point} '{verdict.candidate.name}'"] = None
    left_out = f"; left out for it: {', '.join(names)}" if names else ""
    return left_out + "".join(f"; {said}" for said in remarks)


def _served(launch: Launch, address: str, api_processes: int) -> str:
    by = f", by {api_processes} API processes" if api_processes > 1 else ""
    return f"serves {', '.join(launch.model_names)} on {address}{by}"


def _hooks(launch: Launch, broken: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
    """(process, plugins) for each process whose hooks somebody hears."""
    rows = []
    for process in HOOK_PROCESSES:
        plugins = [c for c in launch.registry.candidates(f"{HOOKS}.{process}") if (c.point, c.name) not in broken]
        if plugins:
            rows.append((process, ", ".join(f"{c.name} ({c.provenance})" for c in plugins)))
    return rows


def _capture(worker: WorkerReady) -> str:
    if worker.captured:
        return f"decode steps of up to {worker.captured[-1]:,} rows"
    return "none: " + ("; ".join(worker.not_captured or ()) or "see the warning, or the platform's options")


def _columns(rows: list[tuple[str, str]], indent: int) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{' ' * indent}{name.ljust(width)}  {text}" for name, text in rows]


def _too_long(launch: Launch, worker: WorkerReady) -> str:
    """What the longest request needs where the KV cache has no room for it, and the longest that fits."""
    start = launch.start.worker
    fits, pages = longest(launch, worker)
    if fits >= start.max_model_len:
        return ""
    return (
        f". The KV cache has room for one of {fits:,} tokens alone: start with --max-model-len {max(1, fits)}, or with "
        f"a cache of {amount((pages + 1) * start.layout.page_bytes)}"
    )


def amount(size: int) -> str:
    """Bytes as people read them, e.g. "1.5 GiB"."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def _count(number: int) -> str:
    """A number of parameters, e.g. "7.62 B"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def _stored_as(launch: Launch) -> str:
    stored = launch.model.dtype
    return f" (stored as {stored})" if stored != launch.start.worker.dtype else ""


def _label(chosen: ChosenDriver) -> str:
    kinds = chosen.kinds
    if not kinds:
        return chosen.point
    return f"{chosen.point} ({len(kinds) if len(kinds) > _OPERATIONS_SHOWN else ', '.join(kinds)})"

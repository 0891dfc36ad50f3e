"""The page docs/benchmarks/peers.md, written from results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_bench.statistics import median
from tests.benchmarks.peers.bars import BEST, verdicts
from tests.benchmarks.peers.checkpoint import DRAFT_LAYERS, FADING
from tests.benchmarks.peers.dimensions import MODELS
from tests.benchmarks.peers.protocol import ADAPTERS, DRAFTS, RANK
from tests.benchmarks.peers.registry import OURS, PEERS
from tests.benchmarks.peers.results import START, Comparison, Results
from tests.benchmarks.peers.roofline import machine_share, range_of
from tests.benchmarks.peers.workloads import KV_TOKENS, MAX_MODEL_LEN, MAX_NUM_SEQS, WORKLOADS

_MIB = 2**20

INTRODUCTION = f"""# Beside other engines

Engine and other engines on the same processor, with the same checkpoints and the same work, in turns: ours, theirs,
ours, theirs. While one is measured, all processes of the other are held still, and before and after each pair the
machine is probed: such machines drift, so the ratio of neighbours says more than any figure by itself. The tables give
medians; the ratio is the median of the pairs' ratios, with the lowest and the highest. Above 1, ours is ahead.

The checkpoints are Llamas, and a mixture of experts as Mixtral, with seeded random weights in bf16. Prompts are seeded
token ids, other ones in each pair; tokens are chosen greedily and past any end of sequence. Every answer is checked:
each request has exactly as many tokens as it asked for, all from the vocabulary, and the times that a worker claims fit
those that the driver saw. Each engine has all cores and is left as it comes, but for what it lets itself be told of
these: contexts of {MAX_MODEL_LEN} tokens, {MAX_NUM_SEQS} requests at once, a cache for {KV_TOKENS} tokens."""


def page(results: Results) -> str:
    """All of it, as Markdown."""
    parts = [INTRODUCTION, _engines(), _work(), _run(results), _bars(results)]
    for model in MODELS:
        found = [c for c in results.comparisons if c.model == model]
        if found:
            parts.append(_model(model, found))
    parts += [_starts(results), _left_out(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _engines() -> str:
    rows = [(f"`{peer.name}`", peer.about) for peer in (OURS, *PEERS.values())]
    return _table(("engine", "how it is used"), rows)


def _work() -> str:
    rows = [(name, f"{work.about} ({work.unit})") for name, work in WORKLOADS.items()]
    note = (
        "W1 and W5 take the time of requests with one token from that of ones with 128. `W1-int8` and `W1-int4`\n"
        "are W1 with weights that each engine has quantized its own way. `-q8_0` and `-q4_k_m` are of one GGUF file\n"
        "that both read. `W1-draft` is W1 with a draft model: the\n"
        "target's "
        f"first {DRAFT_LAYERS} layers, with its embedding and head; what its other layers add is multiplied by\n"
        f"{FADING:g}, so that both mostly agree. Each engine drafts {DRAFTS} tokens a step, greedily, and keeps those\n"
        f"that the target says too. `W6-lora` is W6 over {ADAPTERS} LoRA adapters of rank {RANK} of all linear layers."
        "\n`-kv8` is of keys and values of 8 bits, which OpenVINO has as it comes; without it ours have 16."
    )
    return _table(("work", "what"), rows) + "\n\n" + note


def _run(results: Results) -> str:
    if not results.comparisons:
        command = 'make bench-peers PEERS_FLAGS="--page docs/benchmarks/peers.md"'
        return f"Nothing has been measured yet: `{command}` writes this page."
    machines = [machine for c in results.comparisons for machine in c.machine]
    features = ", ".join(results.features) or "no vector instructions known"
    lines = ["## The run", "", f"{results.date}, {results.threads} cores ({features}), {results.pairs} pairs."]
    low, high, least, most = range_of(machines)
    lines[-1] += f" Probes: {low:.0f} to {high:.0f} GB/s read, {least:.0f} to {most:.0f} GFLOP/s of bf16 products."
    lines += ["", "```sh", *results.commands, "```", ""]
    rows = [
        (f"`{engine}`", ", ".join(f"{name} {version}" for name, version in sorted(found.items())))
        for engine, found in sorted(results.versions.items())
    ]
    return "\n".join(lines) + "\n" + _table(("engine", "versions"), rows)


def _bars(results: Results) -> str:
    rows = []
    for verdict in verdicts(results):
        bar = verdict.bar
        ratio = "not measured" if verdict.ratio is None else f"{verdict.ratio:.2f} × {verdict.against}"
        met = {None: "", True: "met", False: "missed"}[verdict.met]
        rows.append((bar.model, bar.task, f"{bar.factor:g} × {bar.peer}", ratio, met))
    note = f"`{START}` compares first starts. {BEST.capitalize()} is the one that ours is least ahead of."
    return "## The bars\n\n" + _table(("model", "work", "bar", "found", ""), rows) + "\n\n" + note


def _model(model: str, comparisons: Sequence[Comparison]) -> str:
    rows = []
    for c in sorted(comparisons, key=lambda c: (c.task.name, c.peer)):
        spread = f"{min(c.ratios):.2f} to {max(c.ratios):.2f}"
        cells = [c.task.name, f"`{c.peer}`", _figure(c, c.ours), _figure(c, c.theirs), f"{c.ratio:.2f}", spread]
        rows.append([*cells, f"{c.same_first_tokens:.0%}"])
    dimensions = MODELS[model]
    millions = dimensions.num_parameters() / 1e6
    lines = [f"## {model} ({millions:,.0f} million parameters)", ""]
    head = ("work", "peer", "ours", "theirs", "ratio", "from .. to", "same first tokens")
    note = "In brackets: the part of the machine's read bandwidth (W1) or rate of matrix products (W4) that was used."
    return "\n".join(lines) + "\n" + _table(head, rows) + "\n\n" + note


def _figure(comparison: Comparison, figures: Sequence[float]) -> str:
    value = median(figures)
    text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    share = machine_share(comparison, MODELS[comparison.model], figures)
    return f"{text} {comparison.task.work.unit}" + ("" if share is None else f" ({share:.0%})")


def _starts(results: Results) -> str:
    rows = []
    for start in results.starts:
        later = f"{median(start.seconds[1:]):.2f}" if len(start.seconds) > 1 else ""
        memory = f"{start.peak_memory / _MIB:,.0f}"
        rows.append((start.model, start.weights, f"`{start.engine}`", f"{start.seconds[0]:.2f}", later, memory))
    if not rows:
        return ""
    note = (
        "Seconds from the start of the process to the first token of a prompt of 128: first with nothing that the\n"
        "engine had compiled before, then again. Memory is the most that each of its processes held, summed, over all\n"
        "of the work. Ours stands once beside each peer."
    )
    head = ("model", "weights", "engine", "first start, s", "later, s", "peak memory, MiB")
    return "## Start and memory\n\n" + note + "\n\n" + _table(head, rows)


def _left_out(results: Results) -> str:
    if not results.left_out:
        return ""
    return "## Left out\n\n" + "\n".join(f"- {entry.what}: {entry.reason}" for entry in results.left_out)

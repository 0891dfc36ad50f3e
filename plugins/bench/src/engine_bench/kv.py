"""`engine bench kv`: time to first token of prompts whose keys and values are kept, by where, beside computing them."""

from __future__ import annotations

import itertools
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from engine.embedding import OutputKind, launch
from engine.plugin import Registry
from engine.types.errors import ConfigError, EngineError
from engine.types.params import SamplingParams
from engine_bench.report import Report
from engine_bench.session import Session, open_session
from engine_bench.statistics import median, spread
from engine_bench.workload import Lengths

if TYPE_CHECKING:
    from engine.embedding import EngineConfig
    from engine.types.kv import KVLayout

Ask = Callable[[list[int]], tuple[float, int]]
"""One request with this question behind the prompt: seconds to the first token, and tokens that were not computed."""
COMPUTED = "computed"
TIERS = {
    COMPUTED: "nowhere: computed",
    "device": "on the device",
    "blended": "on the device, reordered",
    "host": "in host memory",
    "file": "in files, page cache",
    "redis": "in redis",
    "tcp": "elsewhere, fetched",
    "tcp-push": "elsewhere, pushed",
}
"""Where keys and values may be, in the order of a turn, and how the table says it."""
_UNMOVED = (COMPUTED, "device", "blended")
_BLENDING = "cacheblend"
_DOCUMENT = 256
"""Tokens of each document of a prompt that is blended, with the separator behind it; there are two at least."""
_TRIES = 8
"""How often it is looked whether a store has everything, before it is left out."""
_STORE_BYTES_PER_SECOND = 300e6
"""At least so fast a store is thought to write: so long it is waited for, at first."""
_COPY_BYTES = 256 << 20
_NOISY = 0.2


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """What to measure.

    Args:
        prompt_len: tokens whose keys and values are kept, a multiple of the block size.
        question_len: tokens behind them, which are computed in every case, and are others each time.
        turns: how often everything is measured.
        tiers: of `TIERS`; None: all that there are.
        max_seconds: no further turn begins after so long.
        redis_url: of the server.
    """

    prompt_len: int
    question_len: int
    turns: int
    tiers: Sequence[str] | None = None
    max_seconds: float = float("inf")
    redis_url: str = "redis://localhost:6379/0"


@dataclass
class Tier:
    """One place for keys and values.

    Args:
        name: of `TIERS`.
        ask: sends a request whose prompt is there.
        kept: tokens that are to come from there.

    Attributes:
        seconds: of each turn; None where what was kept did not come.
    """

    name: str
    ask: Ask
    kept: int
    seconds: list[float | None] = field(default_factory=list)

    def measure(self, question: list[int]) -> None:
        """One turn."""
        seconds, cached = self.ask(question)
        self.seconds.append(seconds if cached == self.kept else None)

    @property
    def good(self) -> list[float]:
        """Of the turns in which everything came from there."""
        return [seconds for seconds in self.seconds if seconds is not None]


class Sizes:
    """What a prompt needs of an engine with this layout."""

    def __init__(self, layout: KVLayout, options: KVOptions) -> None:
        if options.prompt_len % layout.block_size:
            raise ConfigError(
                f"--prompt-len {options.prompt_len}",
                f"whole blocks are kept, and a block has {layout.block_size} tokens",
                f"give a multiple of {layout.block_size}, or another --block-size",
            )
        if options.question_len > layout.block_size:
            raise ConfigError(
                f"--question-len {options.question_len}",
                f"a block has {layout.block_size} tokens, and a question of more would be kept, too",
                f"give at most {layout.block_size}",
            )
        blocks = -(-(options.prompt_len + options.question_len + 1) // layout.block_size)
        self.num_pages = len(layout.tables) * (3 * blocks + 8) + 1
        self.page_bytes = layout.page_bytes
        self.moved = options.prompt_len // layout.block_size * len(layout.tables) * layout.page_bytes
        """Bytes of the pages that hold the prompt."""


def measure_kv(config: EngineConfig, options: KVOptions) -> Report:
    """Run it. Raises ConfigError for lengths that do not fit, for tiers that there are not, and for connectors in
    `config`, and the errors of the engine."""
    if config.asked("kv_connector") is not None or config.options_for("kv_connector"):
        raise ConfigError("--kv-connector", "this measures one after the other", "name them by --tiers")
    if wrong := [name for name in options.tiers or () if name not in TIERS]:
        raise ConfigError(f"--tiers {','.join(wrong)}", "there is no such tier", f"the tiers are {', '.join(TIERS)}")
    sizes = Sizes(launch(config).start.worker.layout, options)
    with ExitStack() as opened:
        bench = _Bench(config, options, sizes, opened)
        tiers, left_out = bench.tiers()
        copy_before = copy_rate(sizes.moved)
        began = time.perf_counter()
        for _ in range(options.turns):
            for tier in tiers:
                tier.measure(bench.question())
            if time.perf_counter() - began > options.max_seconds:
                break
        return _report(bench.base, options, sizes, tiers, left_out, (copy_before, copy_rate(sizes.moved)))


class _Bench:
    """The engines, all open at once so that they take turns. `opened` closes them."""

    def __init__(self, config: EngineConfig, options: KVOptions, sizes: Sizes, opened: ExitStack) -> None:
        if config.kv_cache_memory is None and config.num_kv_pages is None and config.memory_utilization is None:
            config = config.model_copy(update={"num_kv_pages": sizes.num_pages})
        self._config = config
        self._options = options
        self._sizes = sizes
        self._opened = opened
        self._random = np.random.default_rng(config.seed)
        self._names = itertools.count()
        self._two: tuple[Session, Session, int] | None = None
        self.base = self._open()
        lengths = Lengths(options.prompt_len + options.question_len, options.prompt_len + options.question_len)
        self.base.check_lengths(lengths, Lengths(1, 1), "--prompt-len")
        self._prompt = self._tokens(options.prompt_len)

    def question(self) -> list[int]:
        """Another each time."""
        return self._tokens(self._options.question_len)

    def _tokens(self, count: int) -> list[int]:
        plan = self.base.plan
        return [int(token) for token in self._random.integers(0, plan.model.vocab_size, count)]

    def _open(self, driver: str | None = None, swap_space: int = 0, blends: bool = False, **chosen: Any) -> Session:
        config = self._config
        if blends:
            asked = config.asked("evictor") == _BLENDING  # then with the options that it has there
            options = config.options if asked else {**config.options, "evictor": {}}
            config = config.model_copy(update={"points": {**config.points, "evictor": _BLENDING}, "options": options})
        if driver is not None:
            update = {
                "points": {**config.points, "kv_connector": driver},
                "options": {**config.options, "kv_connector": chosen},
            }
            config = config.model_copy(update=update | ({"swap_space": swap_space} if swap_space else {}))
        return self._opened.enter_context(open_session(config))

    # -- tiers ---------------------------------------------------------------------------------------------------------
    def tiers(self) -> tuple[list[Tier], list[str]]:
        """Those that there are, with everything in its place, and why others are left out. Raises EngineError for one
        that was asked for and is not there."""
        asked = self._options.tiers
        wanted = [name for name in TIERS if asked is None or name in asked]
        found = [Tier(COMPUTED, self._computed, 0)]
        if "device" in wanted:
            found.append(Tier("device", lambda question: self._first(self.base, question), self._options.prompt_len))
        left_out = []
        if "blended" in wanted:
            try:
                found.append(self._blended())
            except EngineError as error:
                if asked is not None:
                    raise
                left_out.append(f"blended is left out: {error.found}")
        installed = {candidate.name for candidate in Registry.discover().candidates("kv_connector")}
        for name, make in (
            ("host", self._host),
            ("file", self._file),
            ("redis", self._redis),
            ("tcp", self._fetched),
            ("tcp-push", self._pushed),
        ):
            if name not in wanted:
                continue
            try:
                if (driver := name.partition("-")[0]) not in installed:
                    raise EngineError(f"measure {name}", f"the connector {driver} is not installed")
                tier = Tier(name, make(), self._options.prompt_len)
                self._wait_for(tier)
                found.append(tier)
            except EngineError as error:
                if asked is not None:
                    raise
                left_out.append(f"{name} is left out: {error.found}")
        return found, left_out

    def _wait_for(self, tier: Tier) -> None:
        """Ask until everything is there: stores write in their own time. Raises EngineError where it does not come."""
        cached, patience = 0, max(0.05, self._sizes.moved / _STORE_BYTES_PER_SECOND)
        for _ in range(_TRIES):
            cached = tier.ask(self.question())[1]
            if cached == tier.kept:
                return
            time.sleep(patience)
            patience *= 1.5
        raise EngineError(f"measure {tier.name}", f"of {tier.kept} tokens that it was to keep it gave {cached}")

    def _computed(self, question: list[int]) -> tuple[float, int]:
        self.base.engine.call("reset_prefix_cache")
        return self._first(self.base, question)

    def _blended(self) -> Tier:
        """Documents in another order each time, none of which stands where it stood. Raises EngineError where nothing
        can be blended."""
        session = self._open(blends=True)
        (choice,) = (one for one in session.plan.start.worker.choices if one.point == "evictor")
        tokenizer = session.engine.frontend.inputs.tokenizer
        separator = tokenizer.encode(choice.options["separator"], False)
        count = max(2, self._options.prompt_len // _DOCUMENT)
        size, more = divmod(self._options.prompt_len, count)
        if size - len(separator) < choice.options["shortest"]:
            found = f"its {count} documents have {size} tokens each, of which {len(separator)} separate them"
            raise EngineError(
                f"blend a prompt of {self._options.prompt_len} tokens", found, "give a larger --prompt-len"
            )
        free = tokenizer.decode(separator).encode()
        plain = [
            token
            for token, piece in enumerate(tokenizer.vocabulary()[: session.plan.model.vocab_size])
            if piece and piece.isascii() and not set(piece) & set(free)  # no two of them make a separator
        ]
        documents = [
            [*self._random.choice(plain, size + more * (i == 0) - len(separator)).tolist(), *separator]
            for i in range(count)
        ]
        orders = itertools.cycle(range(1, count))

        def ask(question: list[int]) -> tuple[float, int]:
            first = next(orders)
            before = session.engine.stats().reused_tokens
            prompt = list(itertools.chain(*documents[first:], *documents[:first]))
            seconds, _, _ = self._run(session, question, prompt)
            _settle(session)
            return seconds, session.engine.stats().reused_tokens - before

        self._run(session, self.question(), list(itertools.chain(*documents)))
        _settle(session)
        tier = Tier("blended", ask, self._options.prompt_len - count * len(separator))
        self._wait_for(tier)
        return tier

    def _host(self) -> Ask:
        return self._from_store(self._open("host", self._sizes.num_pages * self._sizes.page_bytes))

    def _file(self) -> Ask:
        folder = self._opened.enter_context(tempfile.TemporaryDirectory())
        size = max(1 << 30, 16 * self._sizes.moved)
        return self._from_store(self._open("file", path=str(Path(folder)), size=size, buffer=self._buffer()))

    def _redis(self) -> Ask:
        url = self._options.redis_url
        address = urlsplit(url)
        try:
            socket.create_connection((address.hostname or "localhost", address.port or 6379), 1.0).close()
        except OSError as error:
            raise EngineError(f"measure redis at {url}", f"no server answers: {error}", "start one") from error
        return self._from_store(self._open("redis", url=url, ttl=3600, buffer=self._buffer()))

    def _buffer(self) -> int:
        """Room for all pages of the prompt at once: none is dropped."""
        return max(256 << 20, 2 * self._sizes.moved)

    def _from_store(self, session: Session) -> Ask:
        def ask(question: list[int]) -> tuple[float, int]:
            session.engine.call("reset_prefix_cache")
            return self._first(session, question)

        return ask

    def _fetched(self) -> Ask:
        """The other engine has answered one token; this one goes on."""
        other, session, _ = self._pair()

        def ask(question: list[int]) -> tuple[float, int]:
            told = self._run(other, question, kv_transfer={"do_remote_decode": True})[2]
            other.engine.step()  # which offers the pages
            session.engine.call("reset_prefix_cache")
            seconds, cached, _ = self._run(session, question, kv_transfer=told)
            _settle(session)
            _settle(other)
            return seconds, cached

        return ask

    def _pushed(self) -> Ask:
        """Both engines are asked at once; the other has the prompt, computes the question and pushes."""
        other, session, port = self._pair()
        self._run(other, self.question())  # the prompt is on its device

        def ask(question: list[int]) -> tuple[float, int]:
            session.engine.call("reset_prefix_cache")
            name = f"push-{next(self._names)}"
            pushed = {"push": True, "remote_request_id": name}
            target = {"remote_host": "127.0.0.1", "remote_port": port}
            began = time.perf_counter()
            self._add(session, question, kv_transfer={"do_remote_prefill": True} | pushed)
            self._add(other, question, kv_transfer={"do_remote_decode": True} | pushed | target)
            while other.engine.has_unfinished_requests():
                other.engine.step()
            other.engine.step()
            seconds, cached, _ = _first_token(session, began)
            _settle(session)
            _settle(other)
            return seconds, cached

        return ask

    def _pair(self) -> tuple[Session, Session, int]:
        """The engine that has the prompt, the one that goes on, and the port of that; one pair for both orders."""
        if self._two is None:
            ports = _free_ports(2)
            other = self._open("tcp", role="prefill", port=ports[0])
            self._two = other, self._open("tcp", role="decode", port=ports[1]), ports[1]
        return self._two

    # -- requests ------------------------------------------------------------------------------------------------------
    def _first(self, session: Session, question: list[int]) -> tuple[float, int]:
        seconds, cached, _ = self._run(session, question)
        _settle(session)
        return seconds, cached

    def _run(
        self, session: Session, question: list[int], kept: list[int] | None = None, **more: Any
    ) -> tuple[float, int, dict[str, Any] | None]:
        began = time.perf_counter()
        self._add(session, question, kept, **more)
        return _first_token(session, began)

    def _add(self, session: Session, question: list[int], kept: list[int] | None = None, **more: Any) -> None:
        """kept: before the question, in place of the prompt."""
        prompt: Any = {"prompt_token_ids": (self._prompt if kept is None else kept) + question, **more}
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        session.engine.add_request(f"{next(self._names)}", prompt, params, output_kind=OutputKind.FINAL)


def _first_token(session: Session, began: float) -> tuple[float, int, dict[str, Any] | None]:
    """Of the one request under way: seconds, tokens that were not computed, what its connector tells others."""
    while session.engine.has_unfinished_requests():
        for output in session.engine.step():
            seconds = time.perf_counter() - began
            if output.error is not None:
                raise output.error
            return seconds, output.num_cached_tokens, output.kv_transfer
    raise EngineError("measure a request", "it ended without a token")


def _settle(session: Session) -> None:
    """Let connectors do what the last request has left for further steps, as a server's steps would."""
    for _ in range(4):
        session.engine.step()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def copy_rate(size: int) -> float:
    """10^9 bytes a second that one thread copies within memory, of a buffer of this size or 256 MiB: the best of
    several."""
    source = np.ones(min(max(size, 1 << 20), _COPY_BYTES), np.uint8)
    target = np.zeros_like(source)

    def once() -> Iterator[float]:
        for _ in range(7):
            began = time.perf_counter()
            np.copyto(target, source)
            yield time.perf_counter() - began

    return source.nbytes / min(once()) / 1e9


def _report(
    session: Session,
    options: KVOptions,
    sizes: Sizes,
    tiers: Sequence[Tier],
    left_out: Sequence[str],
    copies: tuple[float, float],
) -> Report:
    turns = len(tiers[0].seconds)
    title = (
        f"KV cache of {session.title()}: prompts of {options.prompt_len} tokens that are kept and "
        f"{options.question_len} more, {turns} turns"
    )
    report = Report(
        title,
        {
            "bench": "kv",
            **session.figures(),
            "prompt_len": options.prompt_len,
            "question_len": options.question_len,
            "turns": turns,
            "moved_bytes": sizes.moved,
            "machine_copy_gb_s_before": copies[0],
            "machine_copy_gb_s_after": copies[1],
            "noisy": spread(*copies) > _NOISY,
        },
    )
    computed = tiers[0].seconds
    device = next((median(tier.good) for tier in tiers if tier.name == "device" and tier.good), 0.0)
    report.row("keys and values are", "first token", "least to most", "of computed", "moved", "rate")
    for tier in tiers:
        if len(tier.good) < turns:
            report.warnings.append(
                f"{tier.name}: in {turns - len(tier.good)} of {turns} turns it was computed, not found"
            )
        if tier.good:
            _add_tier(report, tier, computed, 0 if tier.name in _UNMOVED else sizes.moved, device)
    before, after = copies
    report.row("this machine", f"one thread copies {before:.1f} GB/s before, {after:.1f} GB/s after")
    report.lines += ["", *left_out] if left_out else []
    if spread(before, after) > _NOISY:
        report.warnings.append("the copies lie further apart than 20 %: something else runs here")
    return report


def _add_tier(report: Report, tier: Tier, computed: Sequence[float | None], moved: int, device: float) -> None:
    """A line and figures. moved: bytes; device: seconds of what needs no moving."""
    middle = median(tier.good)
    shares = [own / whole for own, whole in zip(tier.seconds, computed, strict=True) if own and whole]
    label = tier.name.replace("-", "_")
    report.figures |= {f"{label}_ttft_ms": 1e3 * middle, f"{label}_of_computed": median(shares)}
    cells = [f"{1e3 * middle:,.1f} ms", f"{1e3 * min(tier.good):,.1f} to {1e3 * max(tier.good):,.1f}"]
    cells.append(f"{median(shares):.3f}")
    if moved:
        rate = moved / max(middle - device, 1e-9) / 1e9
        report.figures[f"{label}_gb_s"] = rate
        cells += [f"{moved / 1e6:,.0f} MB", f"{rate:.2f} GB/s"]
    report.row(f"{TIERS[tier.name]}", *cells)

"""Servers beside servers: the search, what is found out of servers that go wrong, the results, the page."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.errors import EngineError
from tests.benchmarks.conftest import TINY
from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import Settings
from tests.benchmarks.peers.results import LeftOut
from tests.benchmarks.servers import __main__ as command
from tests.benchmarks.servers import search as searching
from tests.benchmarks.servers.known import NOT_HAD, OURS, SERVERS, Server
from tests.benchmarks.servers.page import draw, page
from tests.benchmarks.servers.process import ServerError, ServerProcess
from tests.benchmarks.servers.results import Load, Point, Results, Search, rate_of
from tests.benchmarks.servers.search import HIGHEST, LOWEST, search

LOAD = Load(
    turns="2", system_prompts=1, system_words=4, words="3:5", output_len="5:8", think_time=0.01, seconds=0.2,
    slo_ttft=30.0, slo_tpot=10.0, max_num_seqs=4,
)  # fmt: skip
HONEST = "none"
Run = Callable[..., tuple[Results, str]]


def fake(name: str, fault: str = HONEST) -> Server:
    """A server of the tests."""
    peer = Peer(name, "tests.benchmarks.fake_server", ("bf16",), None, "")
    return Server(name, peer, ("{python}", "-m", peer.module, "{port}", fault), "counts", ("numpy",))


def point(place: int, keeps: bool) -> Point:
    return Point(place=place, figures={}, faults=[], keeps=keeps)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path) -> Run:
    """Measures fake servers at 32 to 38 conversations a second: run("short", ...) -> the results, the page."""
    monkeypatch.setattr(searching, "LOWEST", 40)
    monkeypatch.setattr(searching, "HIGHEST", 42)
    monkeypatch.setattr(command, "LOADS", {"10M": LOAD})
    monkeypatch.setattr(command, "STARTS", {"10M": 40})
    monkeypatch.setattr(command, "checkpoint", lambda dimensions, cache: tiny_checkpoint)

    def go(*faults: str, flags: tuple[str, ...] = ("--rounds", "1")) -> tuple[Results, str]:
        servers = {"engine": fake("engine")} | {fault: fake(fault, fault) for fault in faults if fault not in NOT_HAD}
        monkeypatch.setattr(command, "SERVERS", servers)
        paths = ["--cache", str(tmp_path), "--json", str(tmp_path / "found.json")]
        assert command.main(["--server", ",".join(["engine", *faults]), *flags, *paths]) == 0
        results = Results.load(tmp_path / "found.json")
        return results, page(results, None)

    return go


@given(st.integers(LOWEST - 1, HIGHEST), st.integers(LOWEST, HIGHEST), st.sampled_from([1, 2, 8]))
def test_the_search_finds_the_limit_and_measures_no_rate_twice(limit: int, start: int, step: int) -> None:
    """Whoever keeps every rate up to some one, and none above."""
    measured: list[int] = []

    def at(place: int) -> Point:
        measured.append(place)
        return point(place, place <= limit)

    found, points = search(at, start, step)
    assert found == (limit if limit >= LOWEST else None)
    assert [one.place for one in points] == measured and len(set(measured)) == len(measured)
    assert all(LOWEST <= place <= HIGHEST for place in measured) and len(measured) <= 22


def test_servers_are_searched_in_turns_and_rounds_are_added(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = run("other", flags=("--rounds", "2"))
    assert [(one.server, one.round) for one in results.searches] == [
        ("engine", 1), ("other", 1), ("engine", 2), ("other", 2)
    ]  # fmt: skip
    assert {one.limit for one in results.searches} == {42}
    assert {one.first_prompt for one in results.searches} == {results.searches[0].first_prompt}
    figures = results.searches[0].points[0].figures
    assert figures["completed"] == 2 * figures["conversations"] == 2 * round(0.2 * rate_of(40))
    assert figures["good_requests"] == figures["completed"]
    assert results.ratio("10M", "engine", "other") == 1.0 and not results.left_out
    assert list(results.versions["other"]) == ["numpy"]
    added, text = run("other", flags=("--rounds", "1"))
    assert [(one.server, one.round) for one in added.searches[4:]] == [("engine", 3), ("other", 3)]
    assert len(added.commands) == 2 and all(line in text for line in added.commands)
    again, _ = run("other", flags=("--rounds", "0", "--page", str(tmp_path / "servers.md")))
    assert again == added and "](servers.svg)" in (tmp_path / "servers.md").read_text()
    assert (tmp_path / "servers.svg").read_text().count("<svg") == 1
    with pytest.raises(SystemExit, match="under another load"):
        run("other", flags=("--rounds", "1", "--words", "9"))
    monkeypatch.setattr(command, "processor_features", lambda: ["other"])
    with pytest.raises(SystemExit, match="on a processor with other features"):
        run("other", flags=("--rounds", "1"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("short", r"\d+ tokens, not \d+"),
        ("stop", r"answers ended by {'stop': \d+}, not all \d+ by their length"),
        ("busy", r"\d+ http_503; \d+ not sent"),
    ],
)
def test_a_server_whose_answers_are_not_as_asked_keeps_no_rate(run: Run, fault: str, said: str) -> None:
    results, text = run(fault)
    ours, theirs = results.searches
    assert (ours.limit, theirs.limit) == (42, None)
    (found,) = theirs.points
    assert not found.keeps and re.search(said, "; ".join(found.faults)), found.faults
    assert f"| `{fault}` | none |  |" in text and "none was measured" in text


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("die", "ended before it served: out of everything"),
        ("template", r"its first prompts have \d+\.?\d* tokens, engine's \d+\.?\d*, of the same text"),
    ],
)
def test_a_server_that_fails_is_named_and_the_others_go_on(run: Run, fault: str, said: str) -> None:
    results, text = run(fault, "other")
    assert [one.server for one in results.searches] == ["engine", "other"]
    (left,) = results.left_out
    assert left.what == f"{fault}, 10M" and re.search(said, left.reason), left.reason
    assert f"- {fault}, 10M: " in text


def test_a_warm_up_that_fails_in_part_is_the_servers_own(tmp_path: Path) -> None:
    """The average over what is left would be another than that of the others, who would be blamed."""
    settings = Settings("none", str(tmp_path), "bf16", 1, 64, 2, 1 << 20)
    with ServerProcess(fake("half", "half"), Path(sys.executable), tmp_path, settings) as process:
        process.wait()
        with pytest.raises(EngineError, match=r"warm the server up; \d+ http_503"):
            searching.warm_up(process.url, LOAD)


class Standing:
    """In place of a server's process: nothing, whose name says what goes wrong."""

    waited = 0
    url = "http://nowhere"

    def __init__(self, server: Server, *rest: object) -> None:
        self.name = server.name

    def wait(self) -> None:
        type(self).waited += 1
        if self.name == "die":
            raise ServerError("die: ended before it served")

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without processes, which keep every rate."""
    monkeypatch.setattr(command, "ServerProcess", Standing)
    monkeypatch.setattr(command, "versions_of", lambda standing: {})
    monkeypatch.setattr(command, "warm_up", lambda url, load: 9.0)
    monkeypatch.setattr(command, "measure", lambda url, load, place, seed: point(place, True))


def test_a_refused_first_request_ends_no_search(run: Run, standing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may still be at what the rate before has left."""
    refused = []

    def once_refused(url: str, load: Load, place: int, seed: int) -> Point:
        if place in refused:
            return point(place, True)
        refused.append(place)
        raise EngineError("send a first request to the server", "http_503", "see the server's log")

    monkeypatch.setattr(command, "measure", once_refused)
    monkeypatch.setattr(Standing, "waited", 0)
    results, _ = run(flags=("--rounds", "1", "--seconds", "1"))
    assert [one.limit for one in results.searches] == [42] and refused == [40, 41, 42] and not results.left_out
    assert Standing.waited == 1 + len(refused)


def test_what_was_left_out_is_forgotten_when_it_is_tried_again(run: Run, standing: None, tmp_path: Path) -> None:
    found, _ = run("die", "openvino")
    assert [left.what for left in found.left_out] == ["openvino", "die, 10M"]
    found.left_out.append(LeftOut("vllm", "no wheel"))
    found.save(tmp_path / "found.json")
    again, _ = run("openvino")
    assert [left.what for left in again.left_out] == ["die, 10M", "vllm", "openvino"], "die was not tried again"
    last, _ = run("die")
    assert [left.what for left in last.left_out] == ["vllm", "openvino", "die, 10M"]


def test_a_rate_at_which_nothing_was_completed_has_a_page_and_a_plot(tmp_path: Path) -> None:
    figures = {"completed": 0.0, "good_requests": 0.0, "requests_per_s": 0.0, "goodput_per_s": 0.0}
    points = [Point(place=8, figures=figures, faults=["4 timeout"], keeps=False)]
    results = Results(commands=[], date="", threads=2, features=[], loads={"10M": LOAD})
    results.searches = [Search(model="10M", server="engine", round=1, first_prompt=9.0, limit=None, points=points)]
    draw(results, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1
    assert "| `engine` | (2) | 1 |  |  |  |  | 0 | 0 |" in page(results, "plot.svg")


def test_what_cannot_be_had_is_told(run: Run, standing: None) -> None:
    results, text = run("openvino")
    assert [one.server for one in results.searches] == ["engine"]
    assert "- openvino: its model server is on no package registry" in text


def test_a_server_is_ended_with_its_measurement(tmp_path: Path) -> None:
    settings = Settings("none", str(tmp_path), "bf16", 1, 64, 2, 1 << 20)
    with ServerProcess(fake("fake"), Path(sys.executable), tmp_path, settings) as process:
        process.wait()
        pid = process._process.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


def test_a_page_of_nothing_says_how_it_is_written() -> None:
    results = Results(commands=[], date="", threads=2, features=[], loads={})
    assert page(results, "plot.svg").endswith('--page docs/benchmarks/servers.md"` writes this page.\n')


def test_the_page_tells_the_ratio_of_neighbours_and_the_bar() -> None:
    def found(server: str, number: int, limit: int | None) -> Search:
        figures = {"ttft_ms_p99": 500.0, "good_requests": 3.0, "completed": 4.0}
        points = [Point(place=place, figures=figures, faults=[], keeps=place == limit) for place in (8, 16)]
        return Search(model="10M", server=server, round=number, first_prompt=9.0, limit=limit, points=points)

    results = Results(commands=["run it"], date="2026-11-28", threads=2, features=["avx2"], loads={"10M": LOAD})
    limits = {"engine": (16, 16, 24), "llama.cpp": (8, 16, 16), "vllm": (0, None, 8)}
    results.searches = [found(name, i + 1, one) for name, all_of in limits.items() for i, one in enumerate(all_of)]
    assert results.ratios("10M", "engine", "llama.cpp") == [2.0, 1.0, 2.0]
    text = page(results, "plot.svg")
    assert "| `engine` | 4, 4, 8 |  |" in text
    assert "| `llama.cpp` | 2, 4, 4 | 2.00 (1.00 to 2.00) |" in text
    assert "| `vllm` | 1, none, 2 | 4.00 (4.00 to 4.00) |" in text
    assert "2.00 times `llama.cpp`, met." in text
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `engine` |")]
    assert [[cell.strip() for cell in row] for row in rows[-2:]] == [["`engine`", "(2)", "3"], ["`engine`", "4", "3"]]
    assert "](plot.svg)" in text and "```sh\nrun it\n```" in text


@pytest.mark.slow
def test_ours_is_started_as_the_others_are(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The real server, with the chat template, under the client of the measurement."""
    settings = Settings(str(tiny_checkpoint), str(tmp_path), "bf16", 1, 256, 4, TINY.kv_bytes(1024))
    with ServerProcess(OURS, Path(sys.executable), tmp_path, settings) as process:
        process.wait()
        first = searching.warm_up(process.url, LOAD)
        found = searching.measure(process.url, LOAD, 24, 1)
    assert first > 0 and found.faults == [] and found.keeps
    assert found.figures["completed"] == 2 * found.figures["conversations"]


def test_every_server_is_told_the_same(tmp_path: Path) -> None:
    """Each command names what the others are told, and nothing is left to fill in."""
    settings = Settings("/models/x", str(tmp_path), "bf16", 2, 512, 8, 4096)
    for server in SERVERS.values():
        line = server.line(Path("/env/bin/python"), settings, Path("/t.jinja"), 8123)
        assert {"8123", "/t.jinja", "8"} <= set(line) and not any("{" in word for word in line)
        assert "512" in line or str(8 * 512) in line

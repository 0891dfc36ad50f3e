"""The client of a core in another process, against a core that a test plays."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

import pytest

from engine import EngineArgs
from engine.frontend.launch import launch
from engine.types.errors import EngineDeadError, EngineError
from engine.types.messages import Abort, Add, Call, FromCore, Ready, Reply, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import WorkerReady
from engine_kit import process_client
from engine_kit.process_client import ProcessClient, start_process

SILENT = """
import sys
sys.stdin.buffer.read()
"""


def start(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessClient:
    (folder / "played_core.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(process_client, "MODULE", "played_core")
    return start_process(launch(EngineArgs(model="tiny", num_kv_pages=100)).start)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), FileNotFoundError(2, "No such folder")])
def test_no_room_for_sockets(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    plan = launch(EngineArgs(model="tiny", num_kv_pages=100)).start
    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(EngineDeadError, match=r"(No space|No such).*TMPDIR"):
        start_process(plan)


def test_no_process_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    plan = launch(EngineArgs(model="tiny", num_kv_pages=100)).start
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", fail)
    with pytest.raises(EngineDeadError, match="temporarily unavailable"):
        start_process(plan)
    assert list(tmp_path.iterdir()) == []


def test_a_shutdown_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(SILENT, tmp_path, monkeypatch)
    closing = threading.Thread(target=lambda: (time.sleep(0.2), core.shutdown()))
    closing.start()
    with pytest.raises(EngineDeadError):  # shut down, or seen to have ended just before
        core.wait_ready()
    closing.join(20)
    assert not closing.is_alive() and not core.alive()


class Played:
    """See `engine_kit.process_client.CoreEnd`."""

    remote = False

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.failed = False
        self.pid = 7
        self.alive = True
        self.silence = 0.0
        self.sent: list[ToCore] = []
        self.said: deque[FromCore | EngineError] = deque()

    def send(self, message: ToCore) -> None:
        self.sent.append(message)

    def receive(self, timeout: float) -> FromCore | None:
        message = self.said.popleft() if self.said else None
        if isinstance(message, EngineError):
            raise message
        return message


def news(*names: str, others: int = 0, **counts: int) -> CoreOutputs:
    stats = StepStats(**(dict.fromkeys(StepStats.__struct_fields__, 0) | {"hook_failures": ()} | counts))
    outputs = [CoreOutput(request_id=name, finish_reason=FinishReason.STOP) for name in names]
    return CoreOutputs(outputs=outputs, stats=stats, others=others)


@pytest.fixture
def core() -> Played:
    return Played()


@pytest.fixture
def client(core: Played) -> ProcessClient:
    client = ProcessClient(core, 3, client=5)  # type: ignore[arg-type]
    assert client.states() == []
    core.said.append(Ready(WorkerReady(num_pages=2, weight_bytes=0, cache_bytes=0, num_parameters=0, load_seconds=0)))
    assert client.wait_ready().num_pages == 2
    return client


def test_what_is_sent_and_has_not_ended_is_known(core: Played, client: ProcessClient) -> None:
    several = [EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams()) for name in "abcd"]
    client.add(several[:3])
    client.add(several[3:])
    assert core.sent == [Add(several[:3], 5), Add(several[3:], 5)]
    core.said += [news(others=2, num_running=3, pages_used=1, pages_total=4), news("a", "elsewhere", num_running=2)]
    assert [output.request_id for output in client.receive().outputs] == ["a", "elsewhere"]
    client.abort(["b", "a", "unknown", "b"])
    assert core.sent[-1] == Abort(["b"], 5) and list(client.unfinished) == ["c", "d"] and client.has_work()
    count = len(core.sent)
    client.abort(["b"])
    assert len(core.sent) == count
    core.said.append(news(others=2, num_running=3, pages_used=1, pages_total=4))
    assert client.receive(0.0).outputs == [] and client.num_others == 2
    (state,) = client.states()
    assert state[:6] == (3, 7, True, 3, 1, 0.25), "one is on its way"
    assert state.stats is client.last_stats and not state.stopped and state.error is None


def test_calls_are_answered_refused_or_die(core: Played, client: ProcessClient) -> None:
    answers = [client.call(method) for method in ("stats", "check_integrity", "page_maps", "stats")]
    calls = [message for message in core.sent if isinstance(message, Call)]
    assert [(call.method, call.client) for call in calls] == [
        ("stats", 5), ("check_integrity", 5), ("page_maps", 5), ("stats", 5),
    ]  # fmt: skip
    answers[2].cancel()  # whoever asked has given up
    core.said += [
        Reply(calls[1].call_id, error="AssertionError: a page is lost"),
        Reply(calls[2].call_id, []),
        Reply(calls[0].call_id, {"num_running": 1}),
        Reply(99, "of nobody"),
    ]
    for _ in range(4):
        assert client.receive(0.0).outputs == []
    assert answers[0].result(0) == {"num_running": 1}
    with pytest.raises(EngineError, match="a page is lost"):
        answers[1].result(0)
    core.said.append(death := EngineDeadError("the core", "gone"))
    with pytest.raises(EngineDeadError):
        client.receive(0.0)
    assert answers[3].exception(0) is death and client.call("stats").exception(0) is death
    assert client.states()[0].error is death and not client.states()[0].alive
    for late in (lambda: client.add([]), lambda: client.receive(0.0)):
        with pytest.raises(EngineDeadError, match="gone"):
            late()


def test_one_that_is_stopped_does_not_respond(
    core: Played, client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(client._tree, "stopped", lambda: looks.append(True) or True)
    assert client.responds() and not looks, "the system is asked where nothing was heard for a while, and not before"
    core.silence = process_client.SILENT_SECONDS
    assert not client.responds()

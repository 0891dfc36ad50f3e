"""`LLM` and `LLMEngine` on a core that plays a script: order, errors, interrupts, and an engine that stays usable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import engine
from engine import EngineArgs
from engine.frontend.request_state import OutputKind
from engine.llm import LLMEngine
from engine.types.errors import (
    EngineDeadError,
    EngineError,
    InvalidLogitsError,
    InvalidRequestError,
    KVCacheTooSmallError,
    PromptTooLongError,
)
from engine.types.params import SamplingParams
from engine_kit.deferred_interrupt import DeferredInterrupt
from engine_kit.llm import LLM

Make = Callable[[Any], LLM]
LONG = SamplingParams(max_tokens=None)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def usable(llm: LLM) -> None:
    assert texts(llm.generate(["y", "z"], LONG, use_tqdm=False)) == ["ok", "ok"]
    assert not llm.llm_engine.has_unfinished_requests()


def test_outputs_come_in_the_order_of_the_prompts(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"a": ("long answer", "stop"), "b": ("x", "stop"), "c": ("middle", "length")})
    outputs = make_llm(core).generate(["a", "b", "c"], LONG, use_tqdm=False)
    assert texts(outputs) == ["long answer", "x", "middle"]
    assert [o.prompt for o in outputs] == ["a", "b", "c"]
    assert all(o.finished for o in outputs)
    assert [o.outputs[0].finish_reason for o in outputs] == ["stop", "stop", "length"]


def test_forms_of_prompts_and_params(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"a": ("abcdef", "length")})
    llm = make_llm(core)
    ids = {"prompt_token_ids": [97]}
    for prompts in ("a", {"prompt": "a"}, ids, [97], ["a"], [ids], [[97]]):
        (output,) = llm.generate(prompts, LONG, use_tqdm=False)
        assert output.outputs[0].text == "abcdef"
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert texts(llm.generate(["a", "a"], params, use_tqdm=False)) == ["a", "ab"]
    assert texts(llm.generate(["a"], use_tqdm=False)) == ["abcdef"]
    assert llm.generate([], use_tqdm=False) == []
    with pytest.raises(InvalidRequestError, match="1 prompts with 2 sampling params"):
        llm.generate(["a"], params, use_tqdm=False)


def test_n_and_stop_strings(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"a": ("hello END more", "length")})
    (output,) = make_llm(core).generate("a", SamplingParams(n=2, max_tokens=None, stop=["END"]), use_tqdm=False)
    assert [c.text for c in output.outputs] == ["hello ", "hello "]
    assert [c.index for c in output.outputs] == [0, 1]
    assert sorted(core.aborted) == ["0#0", "0#1"]


def test_one_that_cannot_be_served_stands_in_its_place_where_errors_are_to_be_returned(
    doubles: ModuleType, make_llm: Make
) -> None:
    """Refused before anything begins, or by the core; the others are answered, and the engine can be used again."""
    core = doubles.ScriptedCore({"a": ("one", "stop"), "b": ("", "error")})
    core.fail_at["5"] = InvalidLogitsError("serve c", "no numbers")
    llm = make_llm(core)
    params = [LONG, SamplingParams(max_tokens=None, n=2), LONG, LONG, LONG, LONG]
    outputs = llm.generate(["a", "x" * 100, "b", "", "a", "c"], params, use_tqdm=False, return_errors=True)
    assert texts(outputs) == ["one", "", "", "", "one", ""]
    errors = [None, PromptTooLongError, KVCacheTooSmallError, InvalidRequestError, None, InvalidLogitsError]
    assert [output.error and type(output.error) for output in outputs] == errors
    assert all(output.finished for output in outputs)
    reasons = [[completion.finish_reason for completion in output.outputs] for output in outputs]
    assert reasons == [["stop"], ["error", "error"], ["error"], ["error"], ["stop"], ["error"]]
    assert outputs[1].prompt == "x" * 100
    usable(llm)
    core.raise_at_step[core.steps + 1] = EngineDeadError("go on", "gone")
    with pytest.raises(EngineDeadError):
        llm.generate(["a", ""], LONG, use_tqdm=False, return_errors=True)


def test_a_conversation_that_the_template_refuses_stands_in_its_place_too(doubles: ModuleType, make_llm: Make) -> None:
    llm = make_llm(doubles.ScriptedCore())
    contents: list[Any] = ["Hi", "x" * 100, [{"type": "image_url"}]]
    talks = [[{"role": "user", "content": content}] for content in contents]
    first, second, third = llm.chat(talks, LONG, use_tqdm=False, return_errors=True)
    assert first.error is None and first.outputs[0].text
    assert isinstance(second.error, PromptTooLongError) and isinstance(third.error, EngineError)


def test_nothing_is_begun_when_one_prompt_is_bad(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore()
    llm = make_llm(core)
    for bad, error in (("x" * 100, PromptTooLongError), ("", InvalidRequestError), (None, InvalidRequestError)):
        with pytest.raises(error):
            llm.generate(["a", bad], LONG, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate(["a"], SamplingParams(temperature=float("nan")), use_tqdm=False)
    assert core.requests == []
    usable(llm)


def test_a_failed_request_loses_no_other(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"bad": ("", "error"), "a": ("slow answer", "stop")})
    llm = make_llm(core)
    with pytest.raises(KVCacheTooSmallError, match="asked; found; remedy") as caught:
        llm.generate(["a", "bad", "a"], LONG, use_tqdm=False)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert texts(outputs) == ["slow answer", "", "slow answer"]
    assert outputs[1].error is caught.value and outputs[1].outputs[0].finish_reason == "error"
    assert "1 of 3 prompts failed" in caught.value.__notes__[0]
    usable(llm)


def test_a_core_that_refuses(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore()
    core.fail_at["1#1"] = KVCacheTooSmallError("no")
    llm = make_llm(core)
    params = [SamplingParams(), SamplingParams(n=3)]
    with pytest.raises(KVCacheTooSmallError):
        llm.generate(["a", "b"], params, use_tqdm=False)
    assert sorted(core.aborted) == ["0", "1#0"]
    assert not core.running
    usable(llm)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), MemoryError()])
def test_an_error_in_a_step_aborts_all(doubles: ModuleType, make_llm: Make, error: BaseException) -> None:
    core = doubles.ScriptedCore({"a": ("long answer", "stop")})
    core.raise_at_step[3] = error
    llm = make_llm(core)
    with pytest.raises(type(error)):
        llm.generate(["a", "b", "a"], LONG, use_tqdm=False)
    assert not core.running
    assert not llm.llm_engine.has_unfinished_requests()
    usable(llm)


def test_ctrl_c_waits_for_the_end_of_the_step(doubles: ModuleType, make_llm: Make) -> None:
    class Core(doubles.ScriptedCore):  # type: ignore[name-defined, misc]
        torn = True

        def step(self) -> Any:
            if self.steps == 2:
                os.kill(os.getpid(), signal.SIGINT)
            outputs = super().step()
            if self.steps == 3:
                self.torn = False
            return outputs

    core = Core({"a": ("long answer", "stop")})
    llm = make_llm(core)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"], LONG, use_tqdm=False)
    assert not core.torn and core.steps == 3
    assert core.aborted == ["0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    usable(llm)


def test_interrupts_are_left_alone_elsewhere() -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        with DeferredInterrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            interrupt.check()
        assert calls == [1]
    finally:
        signal.signal(signal.SIGINT, previous)
    results: list[Any] = []

    def other_thread() -> None:
        with DeferredInterrupt():
            results.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert results == [previous]
    with pytest.raises(KeyboardInterrupt), DeferredInterrupt():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # whoever insists gets out at once
        pytest.fail("not reached")


def test_a_core_that_forgets_does_not_hang(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore()
    core.forget = True
    llm = make_llm(core)
    with pytest.raises(EngineDeadError, match="knows nothing of 1"):
        llm.generate("a", use_tqdm=False)
    core.forget = False
    usable(llm)


def test_requests_added_by_hand_are_not_lost(doubles: ModuleType, make_llm: Make) -> None:
    llm = make_llm(doubles.ScriptedCore())
    engine = llm.llm_engine
    engine.add_request("mine", "x", LONG, output_kind=OutputKind.FINAL)
    assert texts(llm.generate(["a"], LONG, use_tqdm=False)) == ["ok"]
    assert engine.has_unfinished_requests()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [(o.request_id, o.outputs[0].text) for o in outputs] == [("mine", "ok")]


def test_the_classic_loop(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"a": ("abc", "length"), "b": ("xyz", "length")})
    engine = make_llm(core).llm_engine
    assert engine.step() == [] and core.steps == 0
    engine.add_request("1", "a", LONG)
    engine.add_request("2", "b", LONG, output_kind=OutputKind.DELTA)
    with pytest.raises(InvalidRequestError, match="has that id"):
        engine.add_request("1", "a", LONG)
    seen: dict[str, list[str]] = {"1": [], "2": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output.outputs[0].text)
            if output.request_id == "1" and len(seen["1"]) == 2:
                engine.abort_request("1")
    assert seen == {"1": ["a", "ab"], "2": ["x", "y", "z"]}
    assert core.aborted == ["1"]
    engine.abort_request(["1", "absent"])
    assert engine.num_unfinished == 0
    assert engine.stats().num_running == 0


def test_chat(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore({"user:hi;!": ("hello", "stop"), "user:hi;": ("bare", "stop")})
    llm = make_llm(core)
    message = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(message, LONG, use_tqdm=False)) == ["hello"]
    assert texts(llm.chat([message, message], LONG, use_tqdm=False)) == ["hello", "hello"]
    assert texts(llm.chat(message, LONG, use_tqdm=False, add_generation_prompt=False)) == ["bare"]
    with pytest.raises(InvalidRequestError):
        llm.chat([], use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.chat("hi", use_tqdm=False)  # type: ignore[arg-type]


def test_progress(doubles: ModuleType, make_llm: Make, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(doubles.ScriptedCore())
    llm.generate(["a", "b"])
    assert "Processed prompts" in capsys.readouterr().err
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            self.total = total
            self.done = 0
            self.closed = False
            bars.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    llm.generate(["a", "b"], use_tqdm=Bar)
    assert (bars[0].total, bars[0].done, bars[0].closed) == (2, 2, True)


def test_shutdown(doubles: ModuleType, make_llm: Make) -> None:
    core = doubles.ScriptedCore()
    with make_llm(core) as llm:
        llm.llm_engine.add_request("x", "a")
    assert core.closed == 1
    llm.shutdown()
    assert core.closed == 1
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.llm_engine.step()


def test_parts_that_no_package_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    with pytest.raises(EngineError, match="no installed package brings 'llm'; pip install --upgrade"):
        engine.__getattr__("LLM")


def test_an_engine_that_cannot_begin_ends_its_core(
    doubles: ModuleType, make_llm: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = doubles.ScriptedCore()
    made = make_llm(core).llm_engine
    for name, found in (("launch", None), ("assemble_frontend", made.frontend), ("start_client", made.client)):
        monkeypatch.setattr(f"engine.llm.{name}", lambda *args, found=found: found)
    monkeypatch.setattr("engine.plugin.loading.entry_points", lambda group: ())
    with pytest.raises(EngineError, match="no installed package brings 'lifecycle'"):
        LLMEngine.from_engine_args(EngineArgs())
    assert core.closed == 1

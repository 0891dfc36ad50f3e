"""A command that was written for vLLM runs, and says what became of its flags; what would mean something else is
refused, with what to do."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import _find, _flags, canonical, main
from engine.config.declaration import EngineSettings
from engine.config.settings import EngineConfig
from engine.plugin.points import POINTS
from engine.types.params import MAX_LOGPROBS
from engine_kit import vllm_flags
from engine_kit.flags import merged_settings
from engine_kit.vllm_flags import READERS, other_names, translate
from engine_server.config import ServerConfig
from engine_server.settings import ServerSettings

OURS = {setting.flag for setting in (EngineSettings.declared | ServerSettings.declared).values()} | {
    point.option_flag for point in POINTS.values()
}
OURS |= {"--no-log-stats", "--no-enable-prefix-caching", "--system", "--hooks"}


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run in this process: exit code, standard output, standard error."""
    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def parsed(command: str, *arguments: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS, exit_on_error=False)
    _find(command).add_arguments(parser)
    translated, notes = translate(arguments, _flags(parser))
    namespace, unknown = parser.parse_known_args(canonical(translated))
    assert not unknown, unknown
    return namespace, notes


COPIED = """
serve tiny --dtype half --gpu-memory-utilization 0.9 --max-model-len 8k --enable-auto-tool-choice
  --tool-call-parser hermes --trust-remote-code --disable-log-requests --enforce-eager -tp 2 --swap-space 4
  --distributed-executor-backend mp --uvicorn-log-level=warning --generation-config vllm --api-server-count=2
  --disable-log-stats --enable-chunked-prefill --no-enable-prefix-caching --task embed --kv_cache_memory_bytes 2G
  --allowed-origins ["https://a.example","https://b.example"] --limit-mm-per-prompt {"image":0} -pp 1
  --guided-decoding-backend xgrammar --num-gpu-blocks-override 99 --no-async-scheduling -O3
"""


def test_a_copied_command_runs() -> None:
    namespace, notes = parsed(*COPIED.split())
    merged = merged_settings(namespace)
    config, server = EngineConfig.from_merged(merged), ServerConfig.from_merged(merged)
    assert (config.dtype, config.memory_utilization, config.max_model_len) == ("float16", 0.9, 8000)
    assert (config.tensor_parallel_size, config.swap_space, config.num_kv_pages) == (2, 4 * 2**30, 99)
    assert (config.generation_config, config.runner, config.in_flight) == ("engine", "pooling", 1)
    assert config.kv_cache_memory == 2 * 2**30 and not config.enable_prefix_caching
    assert config.asked("grammar") == "xgrammar" and config.options == {"platform": {"capture": "never"}}
    assert (server.api_workers, server.log_stats) == (2, False)
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert namespace.positional_model == "tiny"
    flags = re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", COPIED)
    ours = {"--max-model-len", "--tool-call-parser", "--no-enable-prefix-caching", "--model"}
    expected = [flag.replace("_", "-") for flag in flags if flag not in ours or flag == "--max-model-len"]
    assert [note.split()[0] for note in notes] == expected, "one line each"
    assert "--gpu-memory-utilization 0.9 is --memory-utilization 0.9 here" in notes
    assert any(note.startswith("--enable-auto-tool-choice changes nothing here: tool_choice") for note in notes)


def test_the_lines_are_told(program, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (path := tmp_path / "in.jsonl").write_text("")
    options = ["--gpu-memory-utilization", "0.5", "--trust-remote-code"]
    code, _, said = program("run-batch", "-i", str(path), "-o", str(tmp_path / "out"), *options)
    assert code == 2 and "it is empty" in said
    notes = [line for line in said.splitlines() if line.startswith("note: ")]
    assert len(notes) == 2 and "--memory-utilization 0.5" in notes[0]
    code, _, said = program("run-batch", "-i", str(path), "--log-format", "json", "--trust-remote-code")
    assert code == 2 and "it is not given" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speculative-config", "{}"], "pass --drafter and its options"),
        (["--speculative-config.method", "ngram"], "pass --drafter and its options"),
        (["--distributed_executor_backend", "ray"], "pass --executor"),
        (["--max-logprobs", "5"], "requests may ask for up to 64"),
        (["--no-enable-chunked-prefill"], "--max-num-batched-tokens"),
        (["--no-enable-auto-tool-choice"], "there is no such flag"),
        (["--task"], "expected one argument"),
    ],
)
def test_what_would_mean_something_else_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["serve", *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "run-batch", "chat", "generate"])
def test_what_the_tables_name_exists_and_what_they_replace_does_not(command: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    _find(command).add_arguments(parser)
    known, names = set(_flags(parser)), other_names()
    for flag, facts in names.items():
        assert flag not in known or not facts.keys() & {"needless", "instead"}, flag
        assert flag not in known or "is" not in facts or flag == "-q"
        assert "is" not in facts or re.split("[.=]", facts["is"])[0] in OURS, flag
        for named in re.findall(r"--[a-z-]*[a-z]", f"{facts.get('instead')} {facts.get('needless')}"):
            assert named in OURS, flag
        limited = bool(facts.get("only"))
        assert limited == ("needless" in facts and "instead" in facts), f"{flag}: what of its other values?"
        assert "read" not in facts or "is" in facts or flag in OURS
    assert {facts["read"] for facts in names.values() if isinstance(facts.get("read"), str)} == set(READERS)
    taken = [number for number in range(1000) if re.fullmatch(names["--max-logprobs"]["only"], str(number))]
    assert taken == list(range(20, MAX_LOGPROBS + 1))


WORDS = st.sampled_from(["a", "-1", "0.5", "[1]", "--", "--port", "--max-num-seqs", "--seed=1", "x=y", "--attention.x"])


@given(st.lists(WORDS, max_size=8))
def test_a_command_line_of_ours_is_left_alone(arguments: list[str]) -> None:
    assert translate(arguments, OURS) == (arguments, [])


@pytest.mark.parametrize(
    ("arguments", "becomes"),
    [
        (["--max-log-len", "--port", "1"], ["--port", "1"]),
        (["--", "--gpu-memory-utilization", "1"], ["--", "--gpu-memory-utilization", "1"]),
        (["--max-model-len", "1.5K"], ["--max-model-len=1536"]),
        (["--max-model-len", "512"], ["--max-model-len=512"]),
        (["--swap-space", "0"], ["--swap-space=0"]),
        (["--swap-space", "4GiB"], ["--swap-space=4GiB"]),
        (["--swap-space=0.5"], ["--swap-space=0.5GiB"]),
        (["--allowed-origins", "*"], ["--allowed-origins=*"]),
        (["--allowed-origins", "[broken"], ["--allowed-origins=[broken"]),
    ],
)
def test_values(arguments: list[str], becomes: list[str]) -> None:
    assert translate(arguments, OURS)[0] == becomes


def test_a_second_model_or_prompt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["serve", "tiny", "tiny2"], "'tiny2' is a second model"),
        (["chat", "tiny", "tiny2"], "'tiny2' is a second model"),
        (["generate", "Once", "upon"], "it is a second prompt"),
        (["run-batch", "a", "b", "c"], "nothing stands in this place"),
        (["complete"], "engine generate PROMPT"),
    ):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


def test_the_files_of_a_batch_by_place_or_by_flag(program, tmp_path) -> None:
    (path := tmp_path / "in.jsonl").write_text("plain\n" + json.dumps({"body": {}}) + "\n")
    for arguments in (
        [str(path), str(tmp_path / "out")],
        ["--input-file", str(path), "-o", str(tmp_path / "out")],
        [str(path), "-o", str(tmp_path / "out")],
    ):
        code, _, said = program("run-batch", *arguments)
        assert code == 2 and "none of its 2 lines is a request: line 1; it is not valid JSON" in said
    code, _, said = program("run-batch", "a", "b", "-i", "c")
    assert code == 2 and "it is 'a' and 'c'" in said


def test_a_plugin_brings_flags_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ours go before them; a file that cannot be read takes nobody else's with it."""
    (tmp_path / "good.toml").write_text('"--speed" = { is = "--seed" }\n"-tp" = { is = "--seed" }\n')
    (tmp_path / "bad.toml").write_text("[--speed")
    (tmp_path / "odd.toml").write_text('needless = "--speed"')

    def entry(name: str) -> SimpleNamespace:
        return SimpleNamespace(load=lambda: tmp_path / f"{name}.toml")

    entries = [entry(name) for name in ("good", "bad", "odd", "none")]
    monkeypatch.setattr(vllm_flags, "entry_points", lambda group: entries)
    other_names.cache_clear()
    try:
        names = other_names()
        assert names["--speed"] == {"is": "--seed"} and names["-tp"] == {"is": "--tensor-parallel-size"}
        assert "--api-server-count" not in names and "needless" not in names
        assert len(caplog.records) == 3
    finally:
        other_names.cache_clear()

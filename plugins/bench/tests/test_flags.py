"""`engine bench serve` hands the engine's flags on to its server."""

from __future__ import annotations

import argparse

import pytest

from engine.cli.main import canonical
from engine_bench import serve
from engine_bench.command import _KINDS, Bench
from engine_bench.kinds import Kind, run_kind, server_flags
from engine_bench.report import Report
from engine_kit.flags import merged_settings


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, argument_default=argparse.SUPPRESS)
    Bench().add_arguments(parser)
    return parser.parse_args(canonical(arguments))


def test_every_kind_of_flag_comes_through():
    flags = server_flags(
        parsed("serve", "--rate", "3", "--dtype", "float32", "--no-enable-prefix-caching", "--config", "c.yaml",
               "--evictor=lru", "--load-format", "tiny", "--attention.num_splits", "4", "--max_num_seqs=9",
               "--api-key", "k")
    )  # fmt: skip
    assert sorted(flags) == sorted(
        ["--dtype=float32", "--no-enable-prefix-caching", "--config=c.yaml", "--evictor=lru", "--load-format=tiny",
         "--option=attention.num_splits=4", "--max-num-seqs=9", "--api-key=k"]
    )  # fmt: skip


def test_measurements_flags_are_not_the_servers():
    assert server_flags(parsed("serve", "--num-requests", "3", "--plot", "x.png", "--slo-ttft", "9")) == []


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [(["--api-key=a", "--api-key=b"], "", "a"), ([], "c,d", "c"), ([], "", None)],
)
def test_the_first_key_is_sent(monkeypatch, given, environment, sent):
    monkeypatch.setenv("ENGINE_API_KEY", environment)
    monkeypatch.setattr(serve, "measure_serve", lambda options, flags: options.api_key)
    arguments = parsed("serve", "--url", "http://127.0.0.1:1", *given)
    assert _KINDS["serve"].measure(arguments, merged_settings(arguments)) == sent


def test_a_report_does_not_show_the_key(monkeypatch, capsys):
    typed = ["serve", "--api-key", "hunter2", "--api-key=hunter3", "--rate=3"]
    monkeypatch.setattr("sys.argv", ["engine", "bench", *typed])
    kind = Kind(lambda arguments, merged: Report("a server", {}), lambda parser: None, "")
    assert run_kind("engine", {"serve": kind}, parsed(*typed, "--json")) == 0
    shown = capsys.readouterr().out
    assert "hunter" not in shown and "--api-key '***' '--api-key=***' --rate=3" in shown

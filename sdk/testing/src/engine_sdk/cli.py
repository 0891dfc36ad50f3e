"""`engine plugins test POINT DRIVER`: the conformance suite against any installed driver."""

from __future__ import annotations

import argparse
from typing import Any

from engine.plugin import POINTS, Command
from engine.plugin.hints import did_you_mean
from engine.plugin.points import HOOKS
from engine.types.errors import ConfigError


class Test(Command):
    """Run a point's suite against an installed driver, and print what came out."""

    help = "Test an installed driver against what its interface says: passed, skipped with reasons, failed, a figure."
    __test__ = False  # pytest: this is a command

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("point", metavar="POINT", help="the point, e.g. attention")
        parser.add_argument("driver", metavar="DRIVER", help="the driver's name")
        parser.add_argument("--device", default="cpu", help="torch's device string (default: cpu)")
        parser.add_argument("--thorough", action="store_true", default=False, help="the long ranges too: minutes")
        parser.add_argument(
            "-k", dest="select", default="", metavar="EXPRESSION", help="only these tests, as pytest's -k"
        )
        parser.add_argument(
            "--model", default="", metavar="NAME", help="for checkpoint and tokenizer drivers: a model to open"
        )
        parser.add_argument(
            "--model-config",
            metavar="FILE",
            help="for models: a small config.json in place of the one that is made",
        )
        parser.add_argument("--json", action="store_true", default=False, help="print JSON")
        parser.add_argument("--details", action="store_true", default=False, help="print pytest's own output too")
        parser.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="an option of the driver, as --POINT.OPTION",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from engine_sdk.conformance import SUITES
        from engine_sdk.conformance.report import as_json, render, run_driver
        from engine_sdk.conformance.subject import Subject

        point, driver = arguments.point.replace("-", "_"), arguments.driver
        if point not in SUITES:
            found = "this version of the kit has no suite for it" if point in POINTS else "there is no such point"
            remedy = did_you_mean(point, SUITES) or f"there are suites for: {', '.join(SUITES)}"
            if point == HOOKS:
                found = "what a hook plugin does is its own affair, so that there is no suite for it"
                remedy = "run its own tests; `engine plugins doctor` says whether it can be imported"
            raise ConfigError(f"test a driver of point '{arguments.point}'", found, remedy)
        options = _options(point, arguments.option)
        subject = Subject.installed(point, driver, options)  # what is wrong with the name is said here, and typed
        config = getattr(arguments, "model_config", "")
        if config and point != "model":
            raise ConfigError(
                f"test a driver of point '{point}' with --model-config {config}",
                "only models have a config.json",
                "leave it out",
            )
        report = run_driver(
            point,
            driver,
            options,
            device=arguments.device,
            thorough=arguments.thorough,
            select=arguments.select,
            model=arguments.model,
            config=config,
        )
        if arguments.details:
            print(report.output)
        print(
            as_json(report) if arguments.json else render(report, f"{point} {driver} ({subject.candidate.provenance})")
        )
        return 0 if report.proved else 1


def _options(point: str, given: list[str]) -> dict[str, Any]:
    """`--attention.window 5` reaches a command as "attention.window=5"."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--option {text}", "it has no value", "write --option NAME=VALUE")
        options[name.removeprefix(f"{point}.").removeprefix(f"{point.replace('_', '-')}.")] = value
    return options

"""`engine serve [MODEL]` and `engine run-batch IN OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.embedding import Key, Merged
from engine.plugin.card import Command
from engine.types.errors import ConfigError, InvalidRequestError
from engine_kit.flags import (
    add_engine_flags,
    add_positional_model,
    add_settings,
    command_settings,
    name_positional_model,
)
from engine_server.settings import ServerSettings


class Serve(Command):
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""

    help = "Serve a model over HTTP, as OpenAI's clients expect it."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_positional_model(parser)
        add_settings(parser.add_argument_group("server"), ServerSettings.declared)
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        name_positional_model(arguments, "serve")
        merged = command_settings(arguments)
        give_role(merged)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.embedding import EngineConfig
        from engine_server.config import ServerConfig
        from engine_server.run import serve

        config, server = EngineConfig.from_merged(merged), ServerConfig.from_merged(merged)
        return serve(config, server)


def give_role(merged: Merged) -> None:
    """Let connectors have `kv_role` as their option `role`. One that has no such option is refused as with any other.

    Raises ConfigError where no connector is named, and where the option says something else.
    """
    if (role := merged.section("settings").get("kv_role")) is None:
        return
    option = Key("options", "kv_connector", "role")
    if merged.choice("kv_connector")[0] == "auto":
        found = "no connector is named, and by one it would serve the others"
        raise ConfigError(f"set kv_role to {role!r}", found, "name one that has a role, e.g. --kv-connector tcp")
    if merged.values.get(option, role) != role:
        found = f"--kv-connector.role is {merged.values[option]!r}"
        raise ConfigError(f"set kv_role to {role!r}", found, "say one of them")
    merged.set(option, role, merged.origins[Key("settings", "kv_role")])


_EPILOG = """\
Each line of IN is an object {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}; url
is any route of the server that takes a POST. OUT gets a line for each as it is done: "custom_id", and "response" with
"status_code" and "body", or "error" for a line that could not be read. Where OUT is there, the requests whose results
it holds are passed over: the same command goes on where it was stopped. The exit code is 2 where requests failed."""

_FILES = (
    ("input", "IN", "the requests, one JSON object a line"),
    ("output", "OUT", "the results, one JSON object a line; added to what is there"),
)


class RunBatch(Command):
    """Answer a file of requests."""

    help = "Answer a file of requests in OpenAI's batch format; a run that was stopped goes on where it was."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.epilog = _EPILOG
        for name, metavar, text in _FILES:
            parser.add_argument(name, nargs="?", metavar=metavar, help=text)
        for name, metavar, _ in _FILES:
            flags = f"-{name[0]}", f"--{name}-file"
            parser.add_argument(*flags, metavar=metavar, dest=f"{name}_file", help=f"the same as {metavar}")
        add_engine_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        source, target = (_file(arguments, name, metavar) for name, metavar, _ in _FILES)
        merged = command_settings(arguments)

        # Only now is anything heavy imported: mistakes in the command line are answered at once.
        from engine.embedding import EngineConfig
        from engine_server.batch import Results, left, read_requests

        config = EngineConfig.from_merged(merged)
        requests = read_requests(_data(source, target), source)
        if all(request.custom_id is None for request in requests):
            found = f"none of its {len(requests)} lines is a request: {requests[0].error}"
            raise InvalidRequestError(
                f"run the batch {source!r}", found, "a line holds a request, see: engine run-batch --help"
            )
        with Results(target) as results:
            todo = left(requests, results)
            skipped, failed, postponed = len(requests) - len(todo), results.failed, 0
            if skipped:
                print(f"{skipped} of {len(requests)} requests are done already", file=sys.stderr)
            if todo:
                from tqdm import tqdm

                from engine_server.batch import run_batch

                bar = tqdm(total=len(requests), initial=skipped, desc="Requests", dynamic_ncols=True, disable=None)
                try:
                    count = run_batch(config, todo, results, bar.update)
                except KeyboardInterrupt:
                    print("\nstopped; the same command goes on from here", file=sys.stderr)
                    raise
                finally:
                    bar.close()
                failed, postponed = failed + count.failed, count.postponed
        done = len(requests) - postponed
        print(f"{done} of {len(requests)} requests are done, {failed} of them failed", file=sys.stderr)
        if postponed:
            print(f"{postponed} could not be taken; run the same command again", file=sys.stderr)
        return 2 if failed or postponed else 0


def _file(arguments: argparse.Namespace, name: str, metavar: str) -> str:
    """A file's path, given by its place or by its flag."""
    given = {getattr(arguments, place) for place in (name, f"{name}_file") if hasattr(arguments, place)}
    if len(given) == 1:
        path: str = given.pop()
        return path
    found = f"it is {' and '.join(map(repr, sorted(given)))}" if given else "it is not given"
    raise ConfigError(f"run a batch with {metavar}", found, "write: engine run-batch IN OUT")


def _data(path: str, output: str) -> bytes:
    asked = f"read the batch {path!r}"
    try:
        if Path(output).exists() and Path(output).samefile(path):
            raise InvalidRequestError(asked, "the results would be written to the same file", "name another")
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(asked, error.strerror or str(error), "check the path") from error

"""`engine plugins new POINT NAME`."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.plugin import Command
from engine_sdk.scaffold.write import HOOKS, write


class New(Command):
    """Make a plugin's package."""

    help = "Make a package with a new driver that installs, registers and passes its point's suite as it is."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("point", metavar="POINT", help=f"the point, e.g. attention; or {HOOKS}, to listen")
        parser.add_argument("name", metavar="NAME", help="the driver's name, e.g. my-attention; a model's architecture")
        parser.add_argument(
            "--folder", default=".", metavar="FOLDER", help="where the package's folder is made (default: here)"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        written = write(arguments.point, arguments.name, Path(arguments.folder))
        print(f"{written.folder}:")
        for path in written.files:
            print(f"  {path}")
        print(f'\nnext: cd {written.folder} && pip install -e ".[test]" && pytest')
        return 0

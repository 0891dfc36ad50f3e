"""An environment of its own, with wheels of ours and no source tree in sight."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from ..serving.conftest import Server

ROOT = Path(__file__).parents[2]

REFERENCE = ("core", "sdk/kit", "plugins/reference", "plugins/tiny")
"""Enough for `LLM` offline."""
OURS = (*REFERENCE, "plugins/server", "plugins/parsers", "plugins/parallel", "plugins/chat", "plugins/inspect")
"""Enough to serve the bundled model, and to ask it in the terminal."""


BUILD = """
import importlib, os, sys, tomllib
import setuptools.build_meta
for source in sys.argv[2:]:
    if (child := os.fork()) == 0:
        os.chdir(source)
        with open("pyproject.toml", "rb") as file:
            backend = importlib.import_module(tomllib.load(file)["build-system"]["build-backend"])
        backend.build_wheel(sys.argv[1])
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, source
"""
"""What `pip wheel --no-build-isolation` asks of a package's backend (PEP 517), without its second for each of them."""


class House:
    """A virtual environment with wheels of ours, and the libraries that they need but nothing else of ours.

    Args:
        folder: for all that is made.
        packages: folders of the repository.
        without: libraries that are not to be there, by their names in site-packages.
    """

    def __init__(self, folder: Path, packages: Sequence[str], without: Collection[str] = ()) -> None:
        self._without = set(without)
        self.folder = folder
        self.wheels = folder / "wheels"
        self.home = folder / "home"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").iterdir()) / "site-packages"
        self._share_libraries()
        self.home.mkdir()
        self.wheels.mkdir()
        copies = []
        for package in packages:
            # Built from a copy: setuptools writes beside its sources.
            copies.append(folder / "sources" / package.replace("/", "-").replace(".", "engine"))
            ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "tests")
            if package == ".":  # the distribution `engine` has no code
                copies[-1].mkdir(parents=True)
                for name in ("pyproject.toml", "README.md", "LICENSE"):
                    shutil.copy(ROOT / name, copies[-1])
            else:
                shutil.copytree(ROOT / package, copies[-1], ignore=ignored)
        self.install(*self.build(*copies))

    def _share_libraries(self) -> None:
        shared = self.folder / "libraries"
        shared.mkdir()
        for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
            for entry in folder.iterdir():
                ours = re.match(r"_*(editable_*)?engine[_-]|engine$|.*\.pth$", entry.name)
                hidden = re.split(r"[-.]", entry.name)[0].lower() in self._without
                if not ours and not hidden and not (shared / entry.name).exists():
                    (shared / entry.name).symlink_to(entry)
        (self.site / "libraries.pth").write_text(f"{shared}\n")

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "--quiet", *arguments]
        subprocess.run(command, check=True, cwd=self.home, stdin=subprocess.DEVNULL)

    def build(self, *sources: Path) -> list[Path]:
        """The wheels of these folders."""
        before = set(self.wheels.glob("*.whl"))
        command = [sys.executable, "-c", BUILD, str(self.wheels), *map(str, sources)]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        made = set(self.wheels.glob("*.whl")) - before
        assert len(made) == len(sources)
        return sorted(made)

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--force-reinstall", *map(str, wheels))

    def run(self, *arguments: str) -> tuple[int, str]:
        """(exit code, output) of a command of the program."""
        ended = subprocess.run(
            [str(self.python), "-m", "engine", *arguments],
            cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return ended.returncode, ended.stdout + ended.stderr

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ENGINE_", "VIRTUAL"))
        }
        return {**kept, "OMP_NUM_THREADS": "1"}

    def serve(self, *arguments: str) -> Server:
        return Server(*arguments, python=str(self.python), cwd=str(self.home), environment=self.environment)

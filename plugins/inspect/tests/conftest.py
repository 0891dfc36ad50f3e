"""The program, as the core's tests run it."""

from core.tests.cli.conftest import clean_environment, process, program

__all__ = ["clean_environment", "process", "program"]

"""The errors that Engine raises on purpose; where they are defined is `engine.types.errors`."""

from engine.types.errors import *  # noqa: F403

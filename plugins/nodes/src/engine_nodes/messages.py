"""What an agent and the head say to each other, beside what processes need (`engine_kit.spawning`)."""

from __future__ import annotations

import msgspec

from engine.types.messages import Beat
from engine_kit.spawning import Ended, Kill, LetGo, Refused, Spawn, Started


class Hello(msgspec.Struct, frozen=True, tag="join"):
    """An agent wants to join. See `engine.interfaces.nodes.Node`. versions: of `engine_kit.alike`, compared first."""

    name: str
    address: str
    devices: int
    processors: int
    facts: tuple[str, ...]
    versions: dict[str, str] = {}


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Tell what you have of this: versions, drivers, weights. start: a `WorkerStart`, as bytes. timeout: of
    `Welcome`."""

    start: bytes
    timeout: float


class Found(msgspec.Struct, frozen=True, tag="found"):
    """What it has, by name. error: why it could not look."""

    found: dict[str, str]
    error: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """It belongs to the engine now. timeout: seconds without a sign of life after which either takes the other for
    lost."""

    timeout: float


class Denied(msgspec.Struct, frozen=True, tag="denied"):
    """It does not. again: it may try again, in a moment."""

    why: str
    again: bool = False


FromAgent = Hello | Found | Started | Refused | Ended | Beat
ToAgent = Check | Welcome | Denied | Spawn | LetGo | Kill | Beat

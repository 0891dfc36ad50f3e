"""What an API process is started with, by message on its standard input."""

from __future__ import annotations

import msgspec

from engine.types.start import CoreStart


class ApiStart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one needs; see `engine_server.processes.child`.

    Args:
        number: of the process, from 0 on; one that comes in a dead one's place has the same.
        client: its number for the cores, which nobody had before.
        core: what the cores were started with.
        num_cores: how many they are.
        config: the engine's settings as JSON, those that were set.
        settings: the server's, likewise.
        listener, channel: descriptors that it inherits: the listening socket's, and the one's to the first process.
        asks_for_key: whether clients need one.
        replaces: it comes in a dead one's place, beside others that serve: it listens when it can serve, and until then
            no connection is given to it. Without that it listens at once, so that probes learn that the model loads.
    """

    number: int
    client: int
    core: CoreStart
    num_cores: int
    config: str
    settings: str
    listener: int
    channel: int
    asks_for_key: bool
    replaces: bool = False

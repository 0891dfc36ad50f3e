"""The settings of `engine join`."""

from __future__ import annotations

from engine.embedding import Settings, setting


class JoinSettings(Settings):
    """The head's address is an argument."""

    token_file: str | None = setting(None, "a file with the secret that the head has, too; nobody else may read it")
    node_name: str | None = setting(None, "what this machine is called, one name each (default: its host name)")
    node_address: str | None = setting(
        None, "this machine's own address, by which the others reach it (default: that by which it reaches the head)"
    )
    node_devices: int | None = setting(
        None,
        "devices for workers here, where they compute on some (default: the GPUs that are found)",
        least=0,
    )

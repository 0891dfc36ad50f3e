"""The card of nodes `agent`."""

from __future__ import annotations

import socket
import sys

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.interfaces.nodes import NodesCard, NodesNeed


def names_one(host: str) -> bool:
    """Whether it may be a machine's own address: 0.0.0.0 is every one that it has."""
    try:
        return any(socket.inet_aton(host))
    except OSError:  # a name
        return host.strip("*:[]") not in ("", "0")


class AgentOptions(BaseModel):
    """Set as `--nodes.listen tcp://10.0.0.1:9400 --nodes.token_file F --nodes.count 2`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    listen: str = Field(
        "tcp://127.0.0.1:9400", pattern=r"^tcp://[^:*]+:\d+$", description="this machine's own address, and a port"
    )
    token_file: str = Field("", description="a file with the secret that agents have, too; nobody else may read it")
    count: int = Field(1, ge=1, description="machines to wait for")
    timeout: float = Field(10.0, gt=0, description="seconds without a sign of life after which a machine is lost")
    join_timeout: float = Field(600.0, gt=0, description="seconds to wait for the machines at the start")

    @field_validator("listen")
    @classmethod
    def _own_address(cls, listen: str) -> str:
        host, _, port = listen.removeprefix("tcp://").partition(":")
        if not (names_one(host) and 0 < int(port) < 2**16):
            raise ValueError(
                "name an address of this machine, by which the others reach it, and a port from 1 to 65535"
            )
        return listen


class AgentNodes(NodesCard):
    """Machines on which `engine join` runs: it joins this process, and starts the engine's there."""

    by_name = True
    several = True
    Options = AgentOptions
    body = "engine_nodes.head:Head"

    @classmethod
    def unsupported(cls, need: NodesNeed) -> list[str]:
        return ["it speaks to processes over Unix sockets"] if sys.platform == "win32" else []

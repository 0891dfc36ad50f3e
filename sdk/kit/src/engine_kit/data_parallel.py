"""Which engine cores stand behind this server, where several servers have some of them each (entry-point group
`engine_parts`). The flags are vLLM's, and mean what they mean there:

- internal: one server, all cores behind it. Nothing but --data-parallel-size is given.
- external: a server for each core, which says which one it is: --data-parallel-rank. What is before them balances.
- hybrid: several cores behind each of several servers: --data-parallel-hybrid-lb, with how many of them are here and
  which is the first.

Cores without shared experts know nothing of those behind other servers.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING

from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.embedding import EngineConfig

ADDRESS = "127.0.0.1"
PORT = 29550
_SECRET = 16
"""Bytes that a token has at least."""
_MEETING = ("data_parallel_address", "data_parallel_rpc_port", "data_parallel_token_file")


def of_this_server(config: EngineConfig) -> tuple[EngineConfig, int, str]:
    """The settings with `data_parallel_size` as the cores of this server, the number of the first, and where they meet
    those of other servers: "" where they do not.

    Raises ConfigError where the flags contradict each other, or somebody else could join.
    """
    size, rank, local = config.data_parallel_size, config.data_parallel_rank, config.data_parallel_size_local
    first = config.data_parallel_start_rank or 0
    if rank is not None or config.data_parallel_external_lb:
        if rank is None:
            found = "which core is here is not said"
            raise ConfigError("data_parallel_external_lb=True", found, "say so: --data-parallel-rank")
        if local not in (None, 1) or config.data_parallel_hybrid_lb or config.data_parallel_start_rank is not None:
            found = "a server of an external balancer has one core, which that names"
            remedy = "leave --data-parallel-size-local, --data-parallel-start-rank and --data-parallel-hybrid-lb out"
            raise ConfigError(f"data_parallel_rank={rank}", found, remedy)
        first, local = rank, 1
    elif config.data_parallel_hybrid_lb:
        if local is None:
            found = "how many of the cores are here is not said"
            raise ConfigError("data_parallel_hybrid_lb=True", found, "say so: --data-parallel-size-local")
    elif local not in (None, size) or config.data_parallel_start_rank is not None:
        asked = f"data_parallel_size_local={local} of data_parallel_size={size}, from {first} on"
        remedy = "pass --data-parallel-hybrid-lb on each server, or let one reach all machines: --nodes"
        raise ConfigError(asked, "nobody says who serves the other cores", remedy)
    else:
        for name in _MEETING:
            if getattr(config, name) is not None:
                found = "all cores are behind this server, and meet in a private directory"
                raise ConfigError(f"{name}={getattr(config, name)}", found, "leave it out")
        return config, 0, ""
    if first + local > size:
        found = f"this server would have the cores {first} to {first + local - 1}, counted from 0"
        raise ConfigError(f"data_parallel_size={size}", found, "raise it, or name others")
    place = ""
    if config.enable_expert_parallel and local < size:
        _check_token(config)
        host = config.data_parallel_address or ADDRESS
        place = f"tcp://{f'[{host}]' if ':' in host else host}:{config.data_parallel_rpc_port or PORT}"
    elif config.data_parallel_token_file is not None:
        found = "the cores of this server meet none of another: only shared experts make them"
        remedy = "leave it out, or pass --enable-expert-parallel on several servers"
        raise ConfigError(f"data_parallel_token_file={config.data_parallel_token_file}", found, remedy)
    return config.model_copy(update={"data_parallel_size": local}), first, place


def _check_token(config: EngineConfig) -> None:
    """Who joins takes part in every step: on an address that others reach a secret says who may."""
    host, name = config.data_parallel_address or ADDRESS, config.data_parallel_token_file
    asked = f"data_parallel_address={host}"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        loopback = host == "localhost"
    else:
        loopback = address.is_loopback
        if address.is_unspecified:
            found = "that is every address of this machine, and none at which others reach it"
            raise ConfigError(asked, found, "name the one at which the other servers reach core 0")
    if name is None:
        if not loopback:
            found = "others reach that address, and whoever joins takes part in every step"
            remedy = "write a secret to a file, and pass it to all with --data-parallel-token-file"
            raise ConfigError(asked, found, remedy)
        return
    try:
        size = len(Path(name).read_bytes().strip())
    except OSError as error:
        remedy = "name a file that this user may read"
        raise ConfigError(f"data_parallel_token_file={name}", error.strerror or str(error), remedy) from error
    if size < _SECRET:
        remedy = f"head -c 32 /dev/urandom | base64 > {name}"
        raise ConfigError(f"data_parallel_token_file={name}", f"it holds {size} bytes, which can be guessed", remedy)

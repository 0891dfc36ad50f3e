"""The settings of `engine route`."""

from __future__ import annotations

from engine.embedding import Settings, setting

ORDERS = ("prefill-first", "decode-first")


class RouterSettings(Settings):
    """Those that a server has, too, mean the same."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    backend: tuple[str, ...] | None = setting(
        None, "addresses of servers that answer whole requests, with commas between", repeatable=True, least=1
    )
    prefill: tuple[str, ...] | None = setting(
        None, "addresses of servers that compute prompts, with commas between", repeatable=True, least=1
    )
    decode: tuple[str, ...] | None = setting(
        None, "addresses of servers that go on from there, with commas between", repeatable=True, least=1
    )
    order: str = setting(
        "prefill-first",
        "prefill-first: the server that goes on pulls a prompt's KV cache when it is computed; decode-first: it makes "
        "room at once, and the other pushes as it computes",
        choices=ORDERS,
    )
    overlap: bool = setting(
        False,
        "with --order prefill-first: ask the server that goes on at once, too, which pulls each layer's KV cache while "
        "the other computes the next",
    )
    prefix_tokens: int = setting(
        2**20, "how many tokens of prompts to remember of each server, for routers that follow prefixes", least=1
    )
    check_interval: float = setting(1.0, "seconds from one look at each server's health to the next", above=0)
    max_body: int = setting(
        8 * 2**20, "largest body of a request, e.g. 64MiB; larger ones are refused (413)", type="bytes"
    )
    body_timeout: float = setting(60.0, "seconds in which a request's body has to arrive (else 408)", above=0)
    header_timeout: float = setting(20.0, "seconds in which a request's headers have to arrive", above=0)
    write_timeout: float = setting(
        60.0, "seconds that a client may take nothing of its answer before it is cut off", above=0
    )
    max_connections: int = setting(16384, "most connections that are open; what comes then is refused (503)", least=1)
    access_log: bool = setting(False, "write one line to standard error for each request")
    shutdown_timeout: float = setting(10.0, "seconds that requests in progress get to finish after SIGTERM", least=0)

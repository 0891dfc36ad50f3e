"""uvicorn, as every process that takes connections runs it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from engine.embedding import AsyncLLM, ServerConfig
from engine.process.logs import logs_json
from engine_server.app import Shared, create_app
from engine_server.drain import FAREWELL_SECONDS
from engine_server.http import bounded_protocol
from engine_server.keys import AdminKey, KeyRing
from engine_server.lifecycle import Lifecycle


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us: its own handling would end the process before the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    llm: AsyncLLM,
    settings: ServerConfig,
    lifecycle: Lifecycle,
    keys: KeyRing,
    admin: AdminKey,
    shared: Shared | None = None,
) -> Server:
    """The server around `engine_server.app.create_app`, whose arguments these are."""
    # Several processes share the connections that may be open; each takes its part.
    connections = -(-settings.max_connections // settings.api_workers)
    config = uvicorn.Config(
        create_app(llm, llm.model_names, settings, lifecycle, keys, admin, shared),
        http=bounded_protocol(settings.header_timeout, settings.write_timeout, connections),
        log_level="warning",
        access_log=False,
        server_header=False,
        log_config=None if logs_json() else LOGGING_CONFIG,  # its own writes text
        timeout_graceful_shutdown=FAREWELL_SECONDS,
        lifespan="off",
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
    return Server(config)

"""The validated settings of the server. Imports pydantic, so only a starting server imports this."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from engine.config.faults import config_error
from engine.config.names import fold
from engine.config.sizes import parse_bytes
from engine.config.sources import Merged
from engine.types.errors import ConfigError

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
BytesOrNone = Annotated[int, BeforeValidator(lambda value: 0 if value in (0, "0") else parse_bytes(value))]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServerConfig(BaseModel):
    """How a server listens and what it lets in. Frozen; `engine.config.declaration` says what each setting means.

    They are set as the engine's are: by flag, by a config file (flat, or under `server:`), by ENGINE_<NAME>.

    Raises:
        ConfigError: a keyword is no setting of the server, or a value is of the wrong type or out of range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_workers: Annotated[int, Field(ge=1, le=256)] = 1
    api_worker_timeout: Annotated[float, Field(ge=2, allow_inf_nan=False)] = 60.0
    api_key: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(default=None, repr=False)
    api_key_file: str | None = None
    admin_key: Annotated[str, Field(min_length=1)] | None = Field(default=None, repr=False)
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent_requests: Annotated[int, Field(ge=1)] | None = None
    share_prefix_cache: bool = False
    enable_force_include_usage: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    allowed_origins: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    max_queue: Annotated[int, Field(ge=0)] = 8192
    max_body: Bytes = 8 * 2**20
    response_store_size: BytesOrNone = 256 * 2**20
    response_store_time: Seconds = 86400.0
    body_timeout: Seconds = 60.0
    header_timeout: Seconds = 20.0
    write_timeout: Seconds = 60.0
    max_connections: Annotated[int, Field(ge=1)] = 16384
    access_log: bool = False
    log_stats: bool = True
    verbose: bool = False
    shutdown_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0

    def __init__(self, /, **keywords: Any) -> None:
        values = fold(keywords)
        if strangers := [key for key in values if key.section != "server"]:
            name = strangers[0].name
            raise ConfigError(f"set {name!r} for a server", "it is a setting of the engine", "pass it to EngineConfig")
        self._validate(Merged(values, dict.fromkeys(values, "")), super().__init__)

    @classmethod
    def from_merged(cls, merged: Merged) -> Self:
        """Validate what `engine.config.sources.gather` merged; errors name the place where a value was set."""
        config = cls.__new__(cls)
        cls._validate(merged, lambda **values: BaseModel.__init__(config, **values))
        return config

    @field_validator("api_key", "allowed_origins", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """One, or several with commas between, as the environment has them; a flag or a file has a list."""
        return tuple(part for text in value.split(",") if (part := text.strip())) if isinstance(value, str) else value

    @staticmethod
    def _validate(merged: Merged, build: Any) -> None:
        try:
            build(**merged.section("server"))
        except ValidationError as error:
            raise config_error(error, "server", merged.origins) from error

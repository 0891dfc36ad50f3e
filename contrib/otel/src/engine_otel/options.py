"""The plugin's options."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator


class TracingOptions(BaseModel):
    """Set as `--hooks.otel.NAME VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="where the collector takes OTLP over HTTP, e.g. http://localhost:4318; none: no traces",
    )
    service_name: Annotated[str, Field(min_length=1)] = Field(
        default="engine", description="the resource's service.name"
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="part of the traces that begin here; what comes with a traceparent is as its sender says",
    )
    headers: dict[str, str] = Field(default_factory=dict, description="sent with each export", repr=False)
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=5.0, description="seconds that an export may take, and that the end of the engine waits for the last"
    )

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("it is no http:// or https:// address")
        return value or None

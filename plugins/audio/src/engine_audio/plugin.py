"""The hook, and the plugin's options. Light: every program with hooks imports this."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.plugin import hookimpl


class AudioOptions(BaseModel):
    """Set as `--hooks.audio_routes.NAME VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_seconds: Annotated[float, Field(gt=0, le=86400)] = Field(
        default=1500.0, description="the longest sound of one request"
    )
    max_decoding: Annotated[int, Field(ge=1, le=256)] = Field(
        default=2, description="files that are decoded at once; each may take some hundred megabytes while it is"
    )


class Audio:
    """OpenAI's API of speech to text."""

    Options = AudioOptions

    def __init__(self, options: AudioOptions) -> None:
        self._options = options

    @hookimpl
    def http_routes(self, router: Any) -> None:
        """Add the routes; they answer where the model is a Whisper."""
        from engine_audio.routes import add

        add(router, self._options.max_seconds, self._options.max_decoding)

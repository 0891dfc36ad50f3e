"""What a request says beside its file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from engine_server.bodies import QueuedBody
from engine_server.errors import invalid

MOST_FIELDS = 32


class AudioForm(QueuedBody):
    """Fields of a form are texts, which are read as what they stand for.

    Args:
        language: the code of what is spoken; None: the model finds out.
        prompt: text that stands before what is said, as an example of names and of style.
        response_format: of the answer.
        temperature: of sampling, 0 to 1.
        seed: of sampling.
        stream: segment by segment, as events.
        timestamp_granularities: what of `verbose_json` has its times.
    """

    model_config = ConfigDict(strict=False)

    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stream: bool = False
    timestamp_granularities: list[Literal["word", "segment"]] | None = None

    @property
    def with_segments(self) -> bool:
        """Whether the answer has times."""
        return self.response_format in ("srt", "vtt", "verbose_json")

    def check(self) -> None:
        """Raise APIError for what does not go together, or is not served."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise invalid("timestamp_granularities", "only response_format=verbose_json has times of that kind")
        if "word" in (self.timestamp_granularities or ()):
            why = "words have no times here, for which the decoder's looks at the sound would have to be kept"
            raise invalid("timestamp_granularities", f"{why}; ask for segment")
        if self.stream and self.with_segments:
            raise invalid("stream", f"{self.response_format} comes whole; ask for json or text, or leave stream out")


SCHEMA: dict[str, Any] = AudioForm.model_json_schema()
SCHEMA["properties"]["file"] = {"type": "string", "format": "binary", "title": "File"}
SCHEMA["required"] = ["file"]


async def read_form(request: Request) -> tuple[AudioForm, bytes]:
    """The fields and the file. Raises RequestValidationError and APIError."""
    fields: dict[str, Any] = {}
    async with request.form(max_files=1, max_fields=MOST_FIELDS) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise invalid("file", "it is missing; send the sound as the file of a multipart/form-data body")
        for key, value in form.multi_items():
            name = key.removesuffix("[]")  # so OpenAI's client names what may be there several times
            if name == "timestamp_granularities":
                fields.setdefault(name, []).append(value)
            elif name != "file":
                fields[name] = value
        content = await file.read()
    try:
        read = AudioForm.model_validate(fields)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found) from error
    read.check()
    return read, content

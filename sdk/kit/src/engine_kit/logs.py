"""Logs for programs: one JSON object a line on standard error, from every process that the engine starts (entry-point
group `engine_parts`)."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import TracebackType

REQUEST_ID: ContextVar[str | None] = ContextVar("engine_request_id", default=None)
"""The id of the HTTP request that is being served; None where there is none. Each request has a context of its own."""

_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s\"',;)]+")


class JSONFormatter(logging.Formatter):
    """Records as JSON objects: "time" (UTC), "level", "logger", "message", "pid"; "request_id" where the record was
    made for a request; what `extra={"fields": {...}}` adds, and the `fields` of every line; "exception", the traceback,
    where there is one. What follows the word Bearer, in a header that somebody logs, is hidden.
    """

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """One line without its end."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **self._fields,
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update((str(name), value) for name, value in fields.items() if name not in line)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        for name, value in line.items():
            line[name] = _BEARER.sub(r"\1(hidden)", value) if isinstance(value, str) else value
        return json.dumps(line, default=str)


def log_as(form: str, **fields: object) -> None:
    """Log in this form from now on, in the whole process. "text" leaves everything as it is.

    With "json", each line has these fields too, and Python's warnings and exceptions that nobody caught become lines.
    """
    if form != "json" or logs_json():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter(fields))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def logs_json() -> bool:
    """Whether this process logs JSON."""
    return any(isinstance(handler.formatter, JSONFormatter) for handler in logging.getLogger().handlers)


def tell(logger: str, text: str, plain: str, level: int = logging.WARNING, **fields: object) -> None:
    """Say something to the operator: a record where logs are JSON, and else the line `plain` on standard error.

    Args:
        logger: its name.
        text: the record's message.
        plain: the line for people.
        level: of the record, which is made even where the logger's own is higher.
        fields: of the record.
    """
    if not logs_json():
        print(plain, file=sys.stderr, flush=True)
        return
    log = logging.getLogger(logger)
    log.handle(log.makeRecord(logger, level, "", 0, text, (), None, extra={"fields": fields}))


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("engine").critical("uncaught exception", exc_info=(kind, error, trace))


def _uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is SystemExit or arguments.exc_value is None:
        return
    name = arguments.thread.name if arguments.thread is not None else "?"
    found = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    logging.getLogger("engine").critical("uncaught exception in thread %s of %d", name, os.getpid(), exc_info=found)

"""The errors that Engine raises on purpose.

Every message says three things: what was asked, what was found, what to do. `EngineError` takes them apart so that
a server can show them in its own form; `str(error)` joins them for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class EngineError(Exception):
    """Base of every error that a user can cause.

    Args:
        asked: what the user wanted, e.g. "load model '/models/llama'".
        found: what stood in the way, e.g. "the folder has no config.json".
        remedy: what to do about it; empty where nothing useful can be said.
    """

    code = "engine_error"

    def __init__(self, asked: str, found: str = "", remedy: str = "") -> None:
        self.asked = asked
        self.found = found
        self.remedy = remedy
        super().__init__(*self._text())

    def add_place(self, place: str) -> None:
        """Say where what was asked was set, e.g. "environment ENGINE_DTYPE", for those who did not type it."""
        self.asked += f" ({place})"
        self.args = self._text()

    def _text(self) -> tuple[str]:
        return ("; ".join(part for part in (self.asked, self.found, self.remedy) if part),)

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """(code, asked, found, remedy): what travels to another process; `rebuild_error` is the way back."""
        return self.code, self.asked, self.found, self.remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.asked, self.found, self.remedy)


def shown(value: object, most: int = 80) -> str:
    """The first characters of `repr(value)`, for errors. What is large or deep is not written out for them."""
    pieces: list[str] = []
    length = 0
    for piece in _pieces(value, most):
        pieces.append(piece)
        if (length := length + len(piece)) >= most:
            break
    return "".join(pieces)[:most]


_BRACKETS: dict[Any, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}


def _pieces(value: Any, most: int) -> Iterator[str]:
    if type(value) in (str, bytes):
        yield repr(value[:most])
    elif type(value) in _BRACKETS:
        before, after = _BRACKETS[type(value)]
        for item in value:
            yield before
            yield from _pieces(item, most)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[item], most)
            before = ", "
        yield (",)" if type(value) is tuple and len(value) == 1 else after) if value else before + after
    else:
        yield repr(value)


def rebuild_error(parts: tuple[str, str, str, str]) -> EngineError:
    """The typed error that these `parts` were taken from. An unknown code gives a plain EngineError."""
    code, *texts = parts
    pending: list[type[EngineError]] = [EngineError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind(*texts)
        pending += kind.__subclasses__()
    return EngineError(*texts)


# -- what a user asked of a running engine ---------------------------------------------------------------------------
class InvalidRequestError(EngineError, ValueError):
    """A request or a sampling parameter is out of range, of the wrong type, or contradicts another."""

    code = "invalid_request"


class PromptTooLongError(InvalidRequestError):
    """The prompt (with at least one token to generate) does not fit `max_model_len`."""

    code = "context_length_exceeded"


class KVCacheTooSmallError(EngineError):
    """A request needs more KV pages than the whole cache holds, or the cache holds no usable page."""

    code = "kv_cache_too_small"


class RequestTimeoutError(EngineError):
    """A request did not end within the time that its user gave it."""

    code = "request_timeout"


class InvalidLogitsError(EngineError):
    """The model's logits for this request are not numbers (NaN), so that no token can be drawn from them."""

    code = "invalid_logits"


class EngineDeadError(EngineError):
    """The engine core or one of its workers has died; requests in progress are lost."""

    code = "engine_dead"


class ShuttingDownError(EngineDeadError):
    """The engine is being stopped, as somebody planned; requests that are still in progress end with this."""

    code = "shutting_down"


class RankDeadError(EngineError):
    """One of several engine cores has died and took this request with it; the others go on. Send it again."""

    code = "rank_dead"


class RequestRefusedError(EngineError):
    """A hook plugin refused the request: a limit is reached, or a rule forbids it. Raised by plugins.

    Args:
        asked, found, remedy: as for every error; clients read them.
        status: of the HTTP answer, 400 to 599.
        retry_after: seconds after which to try again, sent as `Retry-After`; None says nothing.

    Raises ValueError for a status that is none of a refusal.
    """

    code = "request_refused"

    def __init__(
        self,
        asked: str,
        found: str = "",
        remedy: str = "",
        *,
        status: int = 403,
        retry_after: float | None = None,
    ) -> None:
        if not 400 <= status <= 599:
            raise ValueError(f"status={status}: a refusal is answered with 400 to 599")
        self.status = status
        self.retry_after = retry_after
        super().__init__(asked, found, remedy)


class HookFailedError(EngineError):
    """A hook that decides about requests failed, so the request is refused: what it would have decided is not known.

    The cause is logged, and is the exception's `__cause__`; clients are told the plugin's name alone.
    """

    code = "hook_failed"


# -- what a user asked at start --------------------------------------------------------------------------------------
class ConfigError(EngineError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""

    code = "invalid_config"


class ModelNotFoundError(EngineError):
    """No checkpoint driver can resolve this model name, or the folder is not a model."""

    code = "model_not_found"


class UnsupportedModelError(EngineError):
    """The model's architecture or a feature of its config is served by no installed driver."""

    code = "unsupported_model"


class CheckpointError(EngineError):
    """A checkpoint's files are missing, truncated, or contradict the model's config."""

    code = "bad_checkpoint"


class DeviceMemoryError(EngineError):
    """The device has no memory left for the weights, for a step, or for what the engine keeps beside them."""

    code = "out_of_device_memory"


class TokenizerError(EngineError):
    """A tokenizer or chat template is missing, broken, or refuses the messages."""

    code = "tokenizer_error"


# -- plugins ---------------------------------------------------------------------------------------------------------
class PluginError(EngineError):
    """Base of the errors about a point, a driver, or a distribution.

    Args:
        point: the extension point, e.g. "attention".
        driver: the driver's name, or "" where the error is about the point.
        distribution: "name version" of the distribution that offers it, or "" where unknown.
    """

    code = "plugin_error"

    def __init__(
        self,
        asked: str,
        found: str = "",
        remedy: str = "",
        *,
        point: str = "",
        driver: str = "",
        distribution: str = "",
    ) -> None:
        self.point = point
        self.driver = driver
        self.distribution = distribution
        super().__init__(asked, found, remedy)


class DriverNotFoundError(PluginError):
    """No installed distribution offers a driver of this name at this point."""

    code = "driver_not_found"


class DriverDeniedError(PluginError):
    """The driver is installed, and the list of plugins (`--plugins`) denies it."""

    code = "driver_denied"


class DuplicateDriverError(PluginError):
    """Two distributions offer one name at one point."""

    code = "duplicate_driver"


class DriverImportError(PluginError):
    """The card or the body of a driver could not be imported."""

    code = "driver_import_failed"


class IncompatibleDriverError(PluginError):
    """The driver speaks an interface version that this core does not serve."""

    code = "driver_incompatible"


class UnfitDriverError(PluginError):
    """The driver was asked for by name and says that it cannot do what is needed."""

    code = "driver_unfit"


class ContractError(PluginError):
    """The driver does not keep the interface's contract (wrong type, missing method, heavy card, ...)."""

    code = "driver_contract"


class OptionsError(PluginError, ValueError):
    """Options of a driver are unknown or have bad values: those that `options` names."""

    code = "driver_options"
    options: tuple[str, ...] = ()


class ManifestError(PluginError):
    """A process found other drivers or versions than the launcher wrote into the manifest."""

    code = "manifest_mismatch"

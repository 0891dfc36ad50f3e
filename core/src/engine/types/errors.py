"""The errors that Engine raises on purpose.

Every message says three things: what was asked, what was found, what to do. `EngineError` takes them apart so that
a server can show them in its own form; `str(error)` joins them for a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class EngineError(Exception):
    """Base of every error that a user can cause.

    Args:
        asked: what the user wanted, e.g. "load model '/models/llama'".
        found: what stood in the way, e.g. "the folder has no config.json".
        remedy: what to do about it; empty where nothing useful can be said.

    Attributes:
        code: of each class, which states it as `class SomeError(EngineError, code="some")`; clients read it.
    """

    code: ClassVar[str] = "engine_error"

    def __init_subclass__(cls, code: str = "") -> None:
        cls.code = code or cls.code

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


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Errors from within say so: see `EngineError.add_place`."""
    try:
        yield
    except EngineError as error:
        error.add_place(place)
        raise


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
class InvalidRequestError(EngineError, ValueError, code="invalid_request"):
    """A request or a sampling parameter is out of range, of the wrong type, or contradicts another."""


class PromptTooLongError(InvalidRequestError, code="context_length_exceeded"):
    """The prompt (with at least one token to generate) does not fit `max_model_len`."""


class KVCacheTooSmallError(EngineError, code="kv_cache_too_small"):
    """A request needs more KV pages than the whole cache holds, or the cache holds no usable page."""


class RequestTimeoutError(EngineError, code="request_timeout"):
    """A request did not end within the time that its user gave it."""


class InvalidLogitsError(EngineError, code="invalid_logits"):
    """The model's logits for this request are not numbers (NaN), so that no token can be drawn from them."""


class EngineDeadError(EngineError, code="engine_dead"):
    """The engine core or one of its workers has died; requests in progress are lost."""


class NodeMissingError(EngineDeadError, code="node_missing"):
    """A machine on which something is to be started is not there. It may come back."""


class ShuttingDownError(EngineDeadError, code="shutting_down"):
    """The engine is being stopped, as somebody planned; requests that are still in progress end with this."""


class RankDeadError(EngineError, code="rank_dead"):
    """One of several engine cores has died and took this request with it; the others go on. Send it again."""


class RequestRefusedError(EngineError, code="request_refused"):
    """A hook plugin refused the request: a limit is reached, or a rule forbids it. Raised by plugins.

    Args:
        asked, found, remedy: as for every error; clients read them.
        status: of the HTTP answer, 400 to 599.
        retry_after: seconds after which to try again, sent as `Retry-After`; None says nothing.

    Raises ValueError for a status that is none of a refusal.
    """

    def __init__(
        self, asked: str, found: str = "", remedy: str = "", *, status: int = 403, retry_after: float | None = None
    ) -> None:
        if not 400 <= status <= 599:
            raise ValueError(f"status={status}: a refusal is answered with 400 to 599")
        self.status = status
        self.retry_after = retry_after
        super().__init__(asked, found, remedy)


class HookFailedError(EngineError, code="hook_failed"):
    """A hook that decides about requests failed, so the request is refused: what it would have decided is not known.

    The cause is logged, and is the exception's `__cause__`; clients are told the plugin's name alone.
    """


# -- what a user asked at start --------------------------------------------------------------------------------------
class ConfigError(EngineError, ValueError, code="invalid_config"):
    """A setting is unknown, of the wrong type, out of range, or contradicts another."""


class ModelNotFoundError(EngineError, code="model_not_found"):
    """No checkpoint driver can resolve this model name, or the folder is not a model."""


class UnsupportedModelError(EngineError, code="unsupported_model"):
    """The model's architecture or a feature of its config is served by no installed driver."""


class CheckpointError(EngineError, code="bad_checkpoint"):
    """A checkpoint's files are missing, truncated, or contradict the model's config."""


class DeviceMemoryError(EngineError, code="out_of_device_memory"):
    """The device has no memory left for the weights, for a step, or for what the engine keeps beside them."""


class TokenizerError(EngineError, code="tokenizer_error"):
    """A tokenizer or chat template is missing, broken, or refuses the messages."""


# -- plugins ---------------------------------------------------------------------------------------------------------
class PluginError(EngineError, code="plugin_error"):
    """Base of the errors about a point, a driver, or a distribution.

    Args:
        point: the extension point, e.g. "attention".
        driver: the driver's name, or "" where the error is about the point.
        distribution: "name version" of the distribution that offers it, or "" where unknown.
    """

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


class DriverNotFoundError(PluginError, code="driver_not_found"):
    """No installed distribution offers a driver of this name at this point."""


class DriverDeniedError(PluginError, code="driver_denied"):
    """The driver is installed, and the list of plugins (`--plugins`) denies it."""


class DuplicateDriverError(PluginError, code="duplicate_driver"):
    """Two distributions offer one name at one point."""


class DriverImportError(PluginError, code="driver_import_failed"):
    """The card or the body of a driver could not be imported."""


class IncompatibleDriverError(PluginError, code="driver_incompatible"):
    """The driver speaks an interface version that this core does not serve."""


class UnfitDriverError(PluginError, code="driver_unfit"):
    """The driver was asked for by name and says that it cannot do what is needed."""


class ContractError(PluginError, code="driver_contract"):
    """The driver does not keep the interface's contract (wrong type, missing method, heavy card, ...)."""


class OptionsError(PluginError, ValueError, code="driver_options"):
    """Options of a driver are unknown or have bad values: those that `options` names."""

    options: tuple[str, ...] = ()


class ManifestError(PluginError, code="manifest_mismatch"):
    """A process found other drivers or versions than the launcher wrote into the manifest."""

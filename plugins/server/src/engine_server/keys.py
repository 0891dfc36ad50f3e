"""The API keys that a server knows, from flags and environment and from a file that is read again when it changes, and
how much each may ask for: requests a minute, and requests at once. The hook plugin `api_keys` brings what asks for
them.

A key itself is never kept, nor written anywhere: only its SHA-256, and a name for logs."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.types.errors import ConfigError
from engine_server.errors import APIError, try_again
from engine_server.lifecycle import LOOK_SECONDS, state_of_files

log = logging.getLogger("engine.server")

BUSY_RETRY_SECONDS = 1
_FIELDS = ("key", "name", "requests_per_minute", "max_concurrent_requests")


_SECRET_WORDS = ("auth", "cookie", "key", "token", "secret", "password", "passphrase", "credential", "signature")


def is_secret(name: str) -> bool:
    """Whether the value of a header, or of a driver's option, of this name is shown to nobody."""
    lower = name.lower()
    return any(word in lower for word in _SECRET_WORDS)


# -- how much one key may ask for --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class KeyLimits:
    """Of one key; None: no limit.

    Args:
        requests_per_minute: at least 1. So many may come at once, too, after a minute without any.
        max_concurrent_requests: at least 1.
    """

    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def __bool__(self) -> bool:
        return self.requests_per_minute is not None or self.max_concurrent_requests is not None


class KeyUsage(Protocol):
    """What a key has used, wherever it is counted: see `OwnUsage`."""

    def enter(self) -> APIError | Awaitable[APIError | None] | None: ...
    def hold(self) -> None: ...
    def leave(self) -> None: ...


class OwnUsage:
    """What a key has used: a token bucket (Turner, "New directions in communications", 1986) that holds a minute's
    requests and fills steadily, and the requests in progress.

    Args:
        limits: may be exchanged while requests are in progress.
        clock: seconds, never going back.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.active = 0
        self._clock = clock
        self._looked = clock()
        self._left = float(limits.requests_per_minute or 0)

    def enter(self) -> APIError | None:
        """Count a request in; where it is one too many, a 429 APIError that says when to come back, and nothing is
        counted."""
        most = self.limits.max_concurrent_requests
        if most is not None and self.active >= most:
            found = f"{self.active} requests with this API key are in progress, and no more than {most} may be"
            return try_again(429, found, BUSY_RETRY_SECONDS, "rate_limit_exceeded")
        rate = self.limits.requests_per_minute
        if rate is not None:
            now = self._clock()
            self._left = min(rate, self._left + (now - self._looked) * rate / 60)
            self._looked = now
            if self._left < 1:
                wait = math.ceil((1 - self._left) * 60 / rate)
                return try_again(429, f"this API key may send {rate} requests a minute", wait, "rate_limit_exceeded")
            self._left -= 1
        self.active += 1
        return None

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer: `leave` is called once more."""
        self.active += 1

    def leave(self) -> None:
        """A request that was counted in has ended."""
        self.active -= 1


# -- the keys ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ApiKey:
    """A key that fits.

    Attributes:
        digest: SHA-256 of the key.
        name: for logs and metrics; by itself the beginning of the digest.
        usage: of all requests that came with it.
    """

    digest: bytes
    name: str
    usage: KeyUsage

    @property
    def cache_salt(self) -> str:
        """Prompts of different keys share no cached pages: else the time of an answer would tell what others have sent.
        See `engine.types.request.EngineRequest.cache_salt`."""
        return "key " + self.digest.hex()


class KeyRing:
    """The keys of a server. It is true where clients need one.

    Args:
        keys: without a file.
        path: of the file, see `read_key_file`; None for none.
        limits: of every key for which the file does not say otherwise.
        admin: the key of the routes for administrators, which must be none of these; None: nobody may administer.

    Attributes:
        administered: whether there is an administrator's key.
        on_change: called when the file was read again.

    Raises:
        ConfigError: the file cannot be read, or is no file of keys; the administrator's key is among them, or blank.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: str | None = None,
        limits: KeyLimits | None = None,
        admin: str | None = None,
    ) -> None:
        if admin is not None and not admin.strip():
            raise ConfigError("set --admin-key", "it is blank", "make a long random one")
        self._path = path
        self._limits = limits or KeyLimits()
        self._admin = None if admin is None else _digest(admin.strip().encode())
        self.administered = admin is not None
        self._given = [_Entry(key) for key in keys]
        self.on_change: list[Callable[[], None]] = []
        self._keys: dict[bytes, ApiKey] = {}
        self._usages: dict[bytes, OwnUsage] = {}
        self._seen = state_of_files(path)
        self._take(read_key_file(path) if path is not None else [])

    def __bool__(self) -> bool:
        return bool(self._given) or self._path is not None  # a file without any key lets nobody in

    def find(self, authorization: bytes, x_api_key: bytes | None = None) -> ApiKey | None:
        """Whose headers these are; `x_api_key`, as Anthropic's clients send it, counts where there is one. Compared by
        digest, with every key, in constant time: the time tells nothing of any."""
        digest = _sent(authorization, x_api_key)
        found = [known for known in self._keys.values() if hmac.compare_digest(digest, known.digest)]
        return found[0] if found else None

    def find_administrator(self, authorization: bytes, x_api_key: bytes | None = None) -> bool:
        """Whether these headers bring the administrator's key."""
        return self._admin is not None and hmac.compare_digest(_sent(authorization, x_api_key), self._admin)

    def known(self) -> Iterator[tuple[ApiKey, OwnUsage]]:
        for digest, key in self._keys.items():
            yield key, self._usages[digest]

    def usage(self, digest: bytes) -> OwnUsage | None:
        """What the key with this digest has used; None where there is none."""
        return self._usages.get(digest)

    async def watch(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def read_at_signal(self, loop: asyncio.AbstractEventLoop) -> None:
        """SIGHUP has the file read again, where there is one; else it ends the program, as always."""
        if self._path is not None and hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, lambda: self.look(changed=True))

    def look(self, changed: bool = False) -> None:
        """Read the file again if it has changed, or is said to have. One that cannot be used leaves the keys as they
        are, and is logged."""
        state = state_of_files(self._path)
        if self._path is None or (state == self._seen and not changed):
            return
        self._seen = state
        before = set(self._keys)
        try:
            self._take(read_key_file(self._path))
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        for heard in self.on_change:
            heard()
        gone, come = len(before - set(self._keys)), len(set(self._keys) - before)
        log.warning("read the API keys again: %d in all, %d new, %d gone", len(self._keys), come, gone)

    def _take(self, entries: Iterable[_Entry]) -> None:
        """What a key has used stays with it, also under other limits. Raises ConfigError; nothing has changed then."""
        several = {_digest(entry.key.encode()): entry for entry in (*self._given, *entries)}
        if self._admin in several:
            raise ConfigError(
                "use one key for both --admin-key and the API",
                "whoever has it could administer the server",
                "make another for administrators",
            )
        keys: dict[bytes, ApiKey] = {}
        usages: dict[bytes, OwnUsage] = {}
        for digest, entry in several.items():
            limits = KeyLimits(
                entry.requests_per_minute or self._limits.requests_per_minute,
                entry.max_concurrent_requests or self._limits.max_concurrent_requests,
            )
            usage = usages[digest] = self._usages.get(digest) or OwnUsage(limits)
            usage.limits = limits
            keys[digest] = ApiKey(digest, entry.name or digest.hex()[:8], usage)
        self._keys = keys
        self._usages = usages


@dataclass(frozen=True)
class _Entry:
    key: str
    name: str | None = None
    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None


def read_key_file(path: str) -> list[_Entry]:
    """The keys of a file: a YAML (or JSON) list, whose entries are keys, or mappings:

        - sk-plain
        - key: sk-team
          name: team
          requests_per_minute: 600
          max_concurrent_requests: 32

    Raises:
        ConfigError: it cannot be read, or holds something else. The message shows no key.
    """
    import yaml

    asked = f"read the API keys of {path!r}"
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(asked, error.strerror or str(error), "check the path given with --api-key-file") from error
    except (yaml.YAMLError, UnicodeDecodeError):
        # Without the parser's words, which quote the file.
        raise ConfigError(asked, "it is not valid YAML", "write one '- KEY' a line") from None
    if not isinstance(content, list | None):
        raise ConfigError(asked, f"it holds a {type(content).__name__}, not a list", "write one '- KEY' a line")
    return [_entry(asked, place, entry) for place, entry in enumerate(content or [], 1)]


def _entry(asked: str, place: int, entry: Any) -> _Entry:
    fields: Mapping[Any, Any] = entry if isinstance(entry, Mapping) else {"key": entry}
    if strange := [str(name)[:32] for name in fields if name not in _FIELDS]:
        found = f"entry {place} has the field {strange[0]!r}" if isinstance(entry, Mapping) else f"entry {place}"
        raise ConfigError(asked, found, f"the fields are {', '.join(_FIELDS)}")
    key, name = fields.get("key"), fields.get("name")
    if not isinstance(key, str) or not key.strip():
        raise ConfigError(asked, f"entry {place} has no key that is a text", "write the key in quotation marks")
    if name is not None and not isinstance(name, str):
        raise ConfigError(asked, f"the name of entry {place} is no text", "write it in quotation marks")
    for field in _FIELDS[2:]:
        value = fields.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(asked, f"{field} of entry {place} is {value!r}", "write a whole number from 1 on")
    return _Entry(key.strip(), name, fields.get("requests_per_minute"), fields.get("max_concurrent_requests"))


def _sent(authorization: bytes, x_api_key: bytes | None) -> bytes:
    """The digest of the key that a request brings; one that no key has where it brings none."""
    if x_api_key is not None:
        return _digest(x_api_key.strip())
    scheme, _, key = authorization.partition(b" ")
    return _digest(key.strip()) if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

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
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.types.errors import ConfigError
from engine_server.errors import APIError, refuse
from engine_server.middleware import is_for_admin, is_open

log = logging.getLogger("engine.server")

LOOK_SECONDS = 2.0
"""How often it is looked whether the file has changed."""
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

    def enter(self) -> APIError | Awaitable[APIError | None] | None:
        """Count a request in; where it is one too many, a 429 APIError."""
        ...

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer: `leave` is called once more."""
        ...

    def leave(self) -> None:
        """A request that was counted in has ended."""
        ...


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
            return _refusal(
                f"{self.active} requests with this API key are in progress, and no more than {most} may be",
                BUSY_RETRY_SECONDS,
            )
        rate = self.limits.requests_per_minute
        if rate is not None:
            now = self._clock()
            self._left = min(rate, self._left + (now - self._looked) * rate / 60)
            self._looked = now
            if self._left < 1:
                wait = math.ceil((1 - self._left) * 60 / rate)
                return _refusal(f"this API key may send {rate} requests a minute", wait)
            self._left -= 1
        self.active += 1
        return None

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer: `leave` is called once more."""
        self.active += 1

    def leave(self) -> None:
        """A request that was counted in has ended."""
        self.active -= 1


def _refusal(why: str, seconds: int) -> APIError:
    return APIError(
        429, f"{why}; try again in {seconds} s", code="rate_limit_exceeded", headers={"Retry-After": str(seconds)}
    )


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


class AdminKey:
    """The key of the routes for administrators.

    Args:
        key: None where there is none; then no key fits.

    Raises:
        ConfigError: it is blank.
    """

    def __init__(self, key: str | None = None) -> None:
        if key is not None and not key.strip():
            raise ConfigError("set --admin-key", "it is blank", "make a long random one")
        self.digest = None if key is None else _digest(key.strip().encode())

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.digest is not None

    def fits(self, authorization: bytes, x_api_key: bytes | None = None) -> bool:
        """Whether these headers bring it; see `KeyRing.find`."""
        return self.digest is not None and hmac.compare_digest(_sent(authorization, x_api_key), self.digest)


class KeyRing:
    """The keys of a server.

    Args:
        keys: without a file.
        path: of the file, see `read_key_file`; None for none.
        limits: of every key for which the file does not say otherwise.
        admin: the administrator's key, which must be none of these.

    Attributes:
        on_change: called when the file was read again.

    Raises:
        ConfigError: the file cannot be read, or is no file of keys; or the administrator's key is among them.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: str | None = None,
        limits: KeyLimits | None = None,
        admin: AdminKey | None = None,
    ) -> None:
        self._path = path
        self._limits = limits or KeyLimits()
        self._admin = admin
        self._given = [_Entry(key) for key in keys]
        self.on_change: list[Callable[[], None]] = []
        self._keys: dict[bytes, ApiKey] = {}
        self._usages: dict[bytes, OwnUsage] = {}
        self._seen = self._state()
        self._take(read_key_file(path) if path is not None else [])

    def __bool__(self) -> bool:
        """Whether a key is asked for. A file without any key lets nobody in."""
        return bool(self._given) or self._path is not None

    def find(self, authorization: bytes, x_api_key: bytes | None = None) -> ApiKey | None:
        """Whose headers these are; `x_api_key`, as Anthropic's clients send it, counts where there is one. Compared by
        digest, with every key, in constant time: the time tells nothing of any."""
        digest = _sent(authorization, x_api_key)
        found = [known for known in self._keys.values() if hmac.compare_digest(digest, known.digest)]
        return found[0] if found else None

    def known(self) -> Iterator[tuple[ApiKey, OwnUsage]]:
        """Every key, and what it has used."""
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
        if self._path is None or ((state := self._state()) == self._seen and not changed):
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
        entries = list(entries)
        if self._admin and any(self._admin.digest == _digest(entry.key.encode()) for entry in (*self._given, *entries)):
            raise ConfigError(
                "use one key for both --admin-key and the API",
                "whoever has it could administer the server",
                "make another for administrators",
            )
        keys: dict[bytes, ApiKey] = {}
        usages: dict[bytes, OwnUsage] = {}
        for entry in (*self._given, *entries):
            digest = _digest(entry.key.encode())
            limits = KeyLimits(
                entry.requests_per_minute or self._limits.requests_per_minute,
                entry.max_concurrent_requests or self._limits.max_concurrent_requests,
            )
            usage = usages[digest] = self._usages.get(digest) or OwnUsage(limits)
            usage.limits = limits
            keys[digest] = ApiKey(digest, entry.name or digest.hex()[:8], usage)
        self._keys = keys
        self._usages = usages

    def _state(self) -> tuple[int, int, int] | None:
        """What changes with the file; also where it is exchanged by a link, as mounted secrets are."""
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class Keys:
    """ASGI middleware: nobody is let in without a key that fits, and with each key no more than it may ask for.

    Args:
        app: what comes after.
        keys: those that fit; an empty ring lets everybody in.
        admin: the administrator's key; without one, nobody may administer.
        pages: paths that everybody may get.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, admin: AdminKey, pages: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._admin = admin
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve; see ASGI."""
        if scope["type"] != "http" or is_open(scope, self._pages):
            return await self._app(scope, receive, send)
        administers = is_for_admin(scope["path"])
        key: ApiKey | None = None
        if self._keys or administers:
            headers = dict(reversed(scope["headers"]))  # of several with one name the first counts
            sent = headers.get(b"authorization", b""), headers.get(b"x-api-key")
            key = self._keys.find(*sent)
            error = self._no_administrator(sent, key) if administers else _no_key(key)
            if error is None and key is not None and not administers:
                entered = key.usage.enter()
                error = entered if entered is None or isinstance(entered, APIError) else await entered
            if error is not None:
                return await refuse(scope, receive, send, error, close=True)
        state = scope.setdefault("state", {})
        if administers or key is None:
            state["administers"] = administers
            return await self._app(scope, receive, send)
        state.update(api_key=key.name, cache_salt=key.cache_salt, key_usage=key.usage)
        try:
            await self._app(scope, receive, send)
        finally:
            key.usage.leave()

    def _no_administrator(self, sent: tuple[bytes, bytes | None], key: ApiKey | None) -> APIError | None:
        if not self._admin:
            found = "this server has no routes for administrators; start it with --admin-key to have them"
            return APIError(403, found, code="admin_disabled")
        if self._admin.fits(*sent):
            return None
        if key is not None:
            return APIError(403, "an API key does not open this; send the administrator's", code="admin_key_required")
        return _unknown("the administrator's key was not sent")


def _no_key(key: ApiKey | None) -> APIError | None:
    return _unknown("no valid API key was sent") if key is None else None


def _unknown(why: str) -> APIError:
    return APIError(
        401,
        f"{why}; send one as 'Authorization: Bearer <key>'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


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

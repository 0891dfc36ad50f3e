"""API keys in an API process: the first process reads them and counts what each has used, over all processes."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from engine_server.errors import APIError
from engine_server.keys import AdminKey, ApiKey, KeyRing
from engine_server.processes.channel import Channel


class SharedUsage:
    """See `engine_server.keys.OwnUsage`, which the first process has.

    Args:
        digest: of the key.
        limited: whether there is a limit; without one nobody is asked.
        channel: to the first process.
    """

    def __init__(self, digest: bytes, limited: bool, channel: Channel) -> None:
        self._digest, self._channel = digest, channel
        self.limited = limited
        self._uncounted = 0  # let in while there was no limit

    def enter(self) -> Awaitable[APIError | None] | None:
        """Count a request in; the error where it is one too many."""
        if self.limited:
            return self._ask()
        self._uncounted += 1
        return None

    async def _ask(self) -> APIError | None:
        refused = await self._channel.ask("enter", self._digest)
        if refused is None:
            return None
        status, message, code, headers = refused
        return APIError(status, message, code=code, headers=headers)

    def hold(self) -> None:
        """A request that was counted in goes on beyond its answer."""
        if self._uncounted:
            self._uncounted += 1
        else:
            self._channel.tell("hold", self._digest)

    def leave(self) -> None:
        """A request that was counted in has ended."""
        if self._uncounted:
            self._uncounted -= 1
        else:
            self._channel.tell("leave", self._digest)


class SharedKeys(KeyRing):
    """The keys that the first process told of last.

    Args:
        asked: whether any key is asked for.
        admin: the administrator's key.
        channel: to the first process.
    """

    def __init__(self, asked: bool, admin: AdminKey, channel: Channel) -> None:
        super().__init__(admin=admin)
        self._asked, self._channel = asked, channel
        self._shared: dict[bytes, SharedUsage] = {}

    def __bool__(self) -> bool:
        return self._asked

    def replace(self, table: Sequence[tuple[bytes, str, bool]]) -> None:
        """From now on these: digest (SHA-256; the key itself does not travel), name for logs, and whether anything has
        to be counted."""
        keys: dict[bytes, ApiKey] = {}
        for digest, name, limited in table:
            usage = self._shared.setdefault(digest, SharedUsage(digest, limited, self._channel))
            usage.limited = limited
            keys[digest] = ApiKey(digest, name, usage)
        self._keys = keys

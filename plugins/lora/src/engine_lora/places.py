"""The half of LoRA adapters in the core: who is loaded, who lies on the device, and which requests wait.

An adapter is *known* once a request names it, is read into the host's memory by the workers as soon as there is room,
and gets a *place* on the device for its first request. It keeps the place while any request that was let through has
not ended; of those that nobody uses the one that was used longest ago makes way, on the device and in the host's
memory alike.

A request passes at once where its adapter has a place. Else it waits, and others go on; but after so many of these that
a place or room could have come free (`MOST_PASSED`) new ones wait behind it, so that adapters in use cannot keep others
out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.interfaces.adapter import Adapted
from engine.types.errors import EngineError, InvalidRequestError, rebuild_error
from engine.types.request import Adapter
from engine_lora.card import LoRAOptions
from engine_lora.peft_folder import refusal

if TYPE_CHECKING:
    from engine.interfaces.context import Answers, CoreContext

MOST_PASSED = 256
"""Requests that may overtake one that waits for a place."""
LOOK_SECONDS = (0.01, 0.16)
"""How soon the workers are asked whether they have read what they are reading, and at most how seldom: each time that
they have not it is asked half as often. They answer between two steps; nobody waits for that."""


class Known:
    """An adapter that requests have named.

    Attributes:
        ahead: it is to be read though no request waits for it.
        asked: the workers read it, or have read it: it is in the host's memory.
        read: the workers have it. error: why it cannot be loaded.
        place: on the device, from 1; 0: it has none. placing: what the workers have not yet answered about it.
        users: requests that were let through and have not ended.
        waiting: requests that wait for it, in the order in which they came.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.ahead = False
        self.asked = False
        self.read = False
        self.error: EngineError | None = None
        self.place = 0
        self.placing: Answers | None = None
        self.users = 0
        self.waiting: dict[str, Adapted] = {}


class Places:
    """See `engine.interfaces.adapter.AdapterCore`."""

    def __init__(self, context: CoreContext) -> None:
        assert context.tell is not None
        options: LoRAOptions = context.options
        self._tell = context.tell
        self._told: list[Answers] = []  # that have not been taken
        self._question: tuple[list[Known], Answers] | None = None  # what was asked about whom, and not answered yet
        self._now = context.clock.monotonic
        self._max_loras = options.max_loras
        self._most_on_host = options.most_on_host
        self._known: OrderedDict[str, Known] = OrderedDict()  # the one that was used last stands last
        self._waiting: OrderedDict[str, Known] = OrderedDict()  # by request, in the order in which they came
        self._short = False  # some are not read yet, for there is no room
        self._passed = 0  # by others since the first of those that wait for a place, or for room, came to be the first
        self._look_at = 0.0
        self._pause = LOOK_SECONDS[0]

    # -- the gate ------------------------------------------------------------------------------------------------------
    def begin(self, request: Adapted, wake: Callable[[], None]) -> bool:
        """See `AdapterCore`; nobody is woken, for `ready` looks by itself."""
        if request.adapter is None:
            return False
        known = self._know(request.adapter)
        behind = bool(self._waiting) or self._short
        if known.place and known.placing is None and not (behind and self._passed >= MOST_PASSED):
            self._let(known, request)
            self._passed += behind
            return False
        known.waiting[request.request_id] = request
        self._waiting[request.request_id] = known
        if not known.asked:
            self._ask()
        return True

    def ready(self) -> list[tuple[Adapted, EngineError | None]]:
        """See `AdapterCore`."""
        if not (self._known or self._told or self._question):
            return []
        self._look()
        through: list[tuple[Adapted, EngineError | None]] = []
        blocked = any(not (known.asked or known.waiting) for known in self._known.values())
        for known in list(dict.fromkeys(self._waiting.values())):
            if known.error is None and not (known.place or (known.read and self._give_place(known))):
                blocked = blocked or known.read or not known.asked
                continue
            if known.placing is not None:
                if known.placing() is None:  # raises, where it does not lie there as it should
                    continue
                known.placing = None
            if blocked and self._passed >= MOST_PASSED and known.error is None:
                continue  # who came before waits for a place or for room: those that have both let nobody else in
            for request in known.waiting.values():
                del self._waiting[request.request_id]
                if known.error is None:
                    self._let(known, request)
                    self._passed += blocked
                through.append((request, known.error))
            known.waiting.clear()
            if known.error is not None:
                self._forget(known)
        if not blocked:
            self._passed = 0
        return through

    def forget(self, request: Adapted) -> None:
        """See `AdapterCore`."""
        known = self._waiting.pop(request.request_id)
        known.waiting.pop(request.request_id)
        if not (known.asked or known.ahead or known.waiting):
            self._forget(known)

    def ended(self, request: Adapted) -> None:
        """See `AdapterCore`."""
        if request.place and request.adapter is not None:
            request.place = 0
            if (known := self._known.get(request.adapter.identity)) is not None:  # none is, once it was shut down
                known.users -= 1

    def shutdown(self) -> None:
        """See `AdapterCore`: what workers have goes with them."""
        self._known.clear()
        self._waiting.clear()
        self._told.clear()
        self._question = None

    # -- what frontends may call ---------------------------------------------------------------------------------------
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """`load_adapter`, `adapter_state`, `unload_adapter`."""
        return {one.__name__: one for one in (self.load_adapter, self.adapter_state, self.unload_adapter)}

    def load_adapter(self, name: str, path: str, revision: str) -> None:
        """Begin to read an adapter that nobody has named yet; `adapter_state` tells how it goes."""
        self._know(Adapter(name=name, path=path, revision=revision)).ahead = True
        self._ask()

    def adapter_state(self, identity: str) -> tuple[bool, tuple[str, str, str, str] | None]:
        """Whether an adapter is read, and the error where it cannot be, which is told once."""
        self._look()
        known = self._known.get(identity)
        if known is None:
            return True, None
        if known.error is not None and not known.waiting:
            self._forget(known)
        return known.read, None if known.error is None else known.error.parts

    def unload_adapter(self, identity: str) -> bool:
        """Forget an adapter; False where requests use it, which go on: it makes way when they have ended."""
        known = self._known.get(identity)
        if known is None:
            return True
        if known.users or known.waiting:
            return False
        self._forget(known)
        return True

    # -- within --------------------------------------------------------------------------------------------------------
    def _know(self, adapter: Adapter) -> Known:
        """The adapter, as the one that was named last."""
        identity = adapter.identity
        if (known := self._known.get(identity)) is None:
            known = self._known[identity] = Known(adapter)
        self._known.move_to_end(identity)
        return known

    def _ask(self) -> None:
        """Have those read that are not, in the order in which they came, as far as there is room. Others make way in
        the host's memory where they can: those that are still being read do not, as somebody waits for their error."""
        order = list(dict.fromkeys(self._waiting.values()))
        ahead = [one for one in self._known.values() if one.ahead and not one.waiting]
        self._short = False
        for place, known in enumerate([*ahead, *order]):
            if known.asked:
                continue
            there = [one for one in self._known.values() if one.asked and one.error is None]
            if len(there) >= self._most_on_host and not self._make_room(there, order[max(0, place - len(ahead)) :]):
                self._short = True
                return
            known.asked = True
            self._say("load", known.adapter.identity, known.adapter.path, known.adapter.revision)
            self._pause = LOOK_SECONDS[0]
            self._look_at = self._now()

    def _make_room(self, there: list[Known], later: list[Known]) -> bool:
        """Whether one of these can go: one that nobody wants, or where others have waited too long one that those want
        who came later; it is read again for them."""
        idle = [one for one in there if one.read and not one.users]
        spare = next((one for one in idle if not one.waiting), None)
        if spare is None and self._passed >= MOST_PASSED:
            spare = next((one for one in idle if one in later), None)
        if spare is None:
            return False
        self._forget(spare)
        if spare.waiting:
            again = self._known[spare.adapter.identity] = Known(spare.adapter)
            again.waiting = spare.waiting
            self._waiting.update((request, again) for request in again.waiting)
        return True

    def _say(self, what: str, *args: Any) -> None:
        """Tell the workers, who do one thing after the other; what goes wrong there is raised by a later `_look`."""
        self._told.append(self._tell(what, *args))

    def _look(self) -> None:
        """Have those read that are not, and ask the workers about those that are being read, all at once; take in what
        they say, once they do."""
        self._ask()
        self._told = [answers for answers in self._told if answers() is None]
        if self._question is None:
            reading = [one for one in self._known.values() if one.asked and not one.read and one.error is None]
            if not reading or self._now() < self._look_at:
                return
            self._question = reading, self._tell("loaded", [known.adapter.identity for known in reading])
        asked, come = self._question
        if (answers := come()) is None:
            return
        self._question, found = None, False
        for known, of_ranks in zip(asked, zip(*answers, strict=True), strict=True):
            if self._known.get(known.adapter.identity) is known:  # else it was forgotten meanwhile
                found = self._take(known, of_ranks) or found
        self._pause = LOOK_SECONDS[0] if found else min(2 * self._pause, LOOK_SECONDS[1])
        self._look_at = self._now() + self._pause

    def _take(self, known: Known, answers: Sequence[Any]) -> bool:
        """What each rank says of an adapter, see `Worker.loaded`; whether it is read, or cannot be."""
        errors = [error for done, error, _ in answers if done and error is not None]
        if errors:
            known.error = rebuild_error(tuple(errors[0]))
        elif all(done for done, *_ in answers):
            nobodys = set.intersection(*(set(others) for *_, others in answers))
            if nobodys:
                known.error = _misfit(known.adapter, sorted(nobodys))
            known.read = known.error is None
        if known.error is not None:
            self._say("drop", known.adapter.identity)
        return known.read or known.error is not None

    def _give_place(self, known: Known) -> bool:
        """Whether there was one for it."""
        taken = {one.place: one for one in self._known.values() if one.place}
        free = next((place for place in range(1, self._max_loras + 1) if place not in taken), 0)
        if not free:
            used = (one.users or (one.placing is not None and one.waiting) for one in taken.values())
            idle = next((one for one, is_used in zip(taken.values(), used, strict=True) if not is_used), None)
            if idle is None:
                return False
            free = idle.place
            idle.place = 0
            idle.placing = None
        known.placing = self._tell("place", free, known.adapter.identity)
        known.place = free
        return True

    def _let(self, known: Known, request: Adapted) -> None:
        request.place = known.place
        known.users += 1

    def _forget(self, known: Known) -> None:
        identity = known.adapter.identity
        if known.place:
            self._say("place", known.place, None)
        if known.asked:
            self._say("drop", identity)
        del self._known[identity]


def _misfit(adapter: Adapter, modules: list[str]) -> InvalidRequestError:
    named = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    found = f"this model has no layer {named} that adapters may change"
    if any("experts" in module for module in modules):
        found += "; the experts of mixtures are left as they are unless the engine starts with --adapter.experts true"
    remedy = "name an adapter that was trained for this model, or merge it into the weights"
    return refusal(adapter.path, found, remedy)

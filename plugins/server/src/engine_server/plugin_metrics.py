"""The metrics of hook plugins, shown below the engine's own. One that fails takes nobody else's with it."""

from __future__ import annotations

import logging
import re

from prometheus_client import CollectorRegistry, generate_latest

from engine.plugin import HookRelay
from engine.plugin.hook_calls import Failures, Implementation
from engine_server.processes.gathering import OWN_PREFIX, Family, family_of

log = logging.getLogger("engine.server")

_FAMILY = re.compile(rb"^# TYPE (\S+) ", re.MULTILINE)


class PluginMetrics:
    """The registries that plugins filled, one each.

    Args:
        hooks: the frontend's.
    """

    def __init__(self, hooks: HookRelay) -> None:
        self._hooks = hooks
        self._registries: list[tuple[Implementation, CollectorRegistry]] = []
        for one in hooks.metrics.listening if hooks.metrics else ():
            registry = CollectorRegistry()
            try:
                one.call({"registry": registry})
            except Exception:
                one.count_failure()
                log.exception("%s raised, its metrics are not shown", one.who)
            else:
                self._registries.append((one, registry))

    @property
    def failures(self) -> Failures:
        """How often hooks of this process raised."""
        return self._hooks.failures

    def families(self) -> list[Family]:
        """All, as plain data. Those that cannot be read are left out, and that is counted."""
        found: list[Family] = []
        for one, registry in self._registries:
            try:
                families = [family_of(metric) for metric in registry.collect()]
                if twice := {f.name for f in found} & {f.name for f in families}:
                    raise ValueError(f"somebody has the metric {sorted(twice)[0]} already")
                if taken := next((f.name for f in families if f.name.startswith(OWN_PREFIX)), None):
                    raise ValueError(f"the name {taken} begins as the engine's own")
            except Exception:
                first = one.count_failure() == 1
                log.warning("%s: its metrics are left out of /metrics", one.who, exc_info=first)
            else:
                found += families
        return found

    def text(self, own: bytes) -> bytes:
        """What plugins add to the engine's own metrics, which are `own`."""
        if not self._registries:
            return b""
        seen = set(_FAMILY.findall(own))
        shown: list[bytes] = []
        for one, registry in self._registries:
            try:
                text = generate_latest(registry)
                families = set(_FAMILY.findall(text))
                if twice := seen & families:
                    raise ValueError(f"somebody has the metric {sorted(twice)[0].decode()} already")
            except Exception:
                first = one.count_failure() == 1
                log.warning("%s: its metrics are left out of /metrics", one.who, exc_info=first)
                continue
            seen |= families
            shown.append(text)
        return b"".join(shown)

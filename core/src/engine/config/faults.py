"""pydantic's complaints about settings, in the engine's own words."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from engine.config.declaration import SERVER_SETTINGS_BY_NAME, SETTINGS_BY_NAME
from engine.config.names import Key
from engine.types.errors import ConfigError


def config_error(error: ValidationError, section: str, origins: Mapping[Key, str]) -> ConfigError:
    """The first bad setting with where it was set, and what is wrong with all.

    Args:
        error: pydantic's.
        section: "settings" or "server": what the model's own fields are.
        origins: where each setting was set.
    """
    faults = error.errors()
    keys = [_key(section, fault["loc"]) for fault in faults]
    texts = []
    for fault in faults:
        cause = fault.get("ctx", {}).get("error")
        texts.append(cause.found if isinstance(cause, ConfigError) else fault["msg"])
    first = keys[0]
    origin = origins.get(first, "")
    table = {"settings": SETTINGS_BY_NAME, "server": SERVER_SETTINGS_BY_NAME}.get(first.section, {})
    setting = table.get(first.name)
    shown = "a value" if setting is not None and setting.secret else repr(faults[0]["input"])
    return ConfigError(
        f"set {first.name} to {shown}" + (f" ({origin})" if origin else ""),
        texts[0] if len(texts) == 1 else "; ".join(f"{k.name}: {text}" for k, text in zip(keys, texts, strict=True)),
        f"{first.name} is: {setting.help}" if setting else "name an installed driver; `engine plugins` lists them",
    )


def _key(section: str, location: tuple[int | str, ...]) -> Key:
    name, *rest = (str(part) for part in location)
    if name == "points" and rest:
        return Key("points", rest[0])
    return Key("server", name) if section == "server" else Key("settings", name)

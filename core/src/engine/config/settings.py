"""The validated settings of one engine, and pydantic's errors about them in the engine's own words. Imports
pydantic, so only a starting engine imports this."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, field_validator

from engine.config.declaration import EngineSettings, Setting, Settings, of_commands, settings_of_commands
from engine.config.sources import Key, Merged, fold, resolve
from engine.plugin.loading import brought
from engine.plugin.plugin_list import PluginList
from engine.plugin.points import HOOKS
from engine.types.errors import ConfigError, EngineError

DeclaredT = TypeVar("DeclaredT", bound=Settings)

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(?:([kmgt])(i)?)?b)?\s*", re.IGNORECASE)


class Config(BaseModel):
    """The base of models that `model_of` makes. Frozen.

    Keywords are settings, in the spellings that a config file may have.

    Raises ConfigError: a keyword is unknown (with near matches), or a value is of the wrong type or out of range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    declared: ClassVar[Mapping[str, Setting]] = {}

    def __init__(self, /, **keywords: Any) -> None:
        merged = Merged()
        for key, (value, _) in fold(keywords).items():
            self._check_owner(key)
            merged.set(key, value)
        self._build(merged)

    @classmethod
    def from_merged(cls, merged: Merged) -> Self:
        """Validate what `engine.config.sources.gather` merged; errors name the place where a value was set."""
        config = cls.__new__(cls)
        config._build(merged)
        return config

    def _build(self, merged: Merged) -> None:
        values = {name: value for name, value in merged.section("settings").items() if name in self.declared}
        if "points" in type(self).model_fields:
            values |= {"points": merged.section("points"), "options": merged.options()}
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(error, merged.origins) from error

    def _check_owner(self, key: Key) -> None:
        """Raise ConfigError for a setting of another than this model's."""
        if key.name in self.declared if key.section == "settings" else "points" in type(self).model_fields:
            return
        owner = next((name for name, one in of_commands().items() if key.name in one.declared), "engine")
        remedy = "pass it to EngineConfig" if owner == "engine" else "leave it out"
        raise ConfigError(f"set {key.name!r} with {type(self).__name__}", f"it is a setting of the {owner}", remedy)


def model_of(declared: type[Settings]) -> type[Config]:
    """The pydantic model of declared settings, with a field for each."""
    hints = get_type_hints(declared)
    fields: dict[str, Any] = {}
    for name, setting in declared.declared.items():
        hint = _annotated(setting, hints[name])
        fields[name] = (hint, Field(setting.default, repr=not setting.secret))
    model = create_model(declared.__name__, __base__=Config, **fields)
    model.declared = declared.declared
    return model


def validated(declared: type[DeclaredT], merged: Merged) -> DeclaredT:
    """What was set of declared settings, typed as declared. Raises ConfigError, which names the place."""
    return cast("DeclaredT", model_of(declared).from_merged(merged))


def _annotated(setting: Setting, hint: Any) -> Any:
    bounds = Field(ge=setting.least, gt=setting.above, le=setting.most)
    several = hint == tuple[str, ...] | None
    base: Any = {"integer": int, "number": float, "boolean": bool, "bytes": int, "text": str}[setting.type]
    if setting.choices:
        base = Literal[setting.choices]
    elif setting.type == "bytes":
        base = Annotated[int, BeforeValidator(_bytes_or_none if setting.least == 0 else parse_bytes)]
    elif setting.type == "integer":
        base = Annotated[int, bounds]
    elif setting.type == "number":
        base = Annotated[float, bounds, Field(allow_inf_nan=False)]
    elif several:
        base = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_several)]
    elif setting.type == "text":
        base = Annotated[
            str, Field(min_length=setting.least), BeforeValidator(_joined if setting.repeatable else _path)
        ]
    if setting.check is not None:
        base = Annotated[base, BeforeValidator(setting.check)]
    return base | None if setting.default is None else base


def parse_bytes(value: str | int) -> int:
    """Bytes from a number, or from text such as "512MiB" (1024s), "4GB" (1000s) or "0.5 GiB".

    Raises ConfigError: the text is not of this form, or the amount is not positive.
    """
    amount = -1
    if isinstance(value, int) and not isinstance(value, bool):
        amount = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        amount = int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index((match[2] or " ").lower()))
    if amount <= 0:
        asked, remedy = f"use {value!r} as an amount of memory", "write bytes, or e.g. 512MiB, 4GiB, 4GB"
        raise ConfigError(asked, "it is not an amount of memory", remedy)
    return amount


def _bytes_or_none(value: Any) -> int:
    return 0 if str(value) == "0" else parse_bytes(value)  # False is no amount


def _several(value: Any) -> Any:
    """One, or several with commas between, as the environment has them; a flag or a file has a list."""
    return tuple(part for text in value.split(",") if (part := text.strip())) if isinstance(value, str) else value


def _joined(value: Any) -> Any:
    """Several as one text, as a repeated flag and a file may have them."""
    several = isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
    return ",".join(value) if several else value


def _path(value: Any) -> Any:
    return str(value) if hasattr(value, "__fspath__") else value


@dataclass
class _Origins:
    """Where each setting was set; it does not count where two configs are compared."""

    of: Mapping[Key, str] = field(default_factory=dict, compare=False)


if TYPE_CHECKING:

    class _Model(Config, EngineSettings): ...

else:
    _Model = model_of(EngineSettings)


class EngineConfig(_Model):
    """What an engine is started with. Frozen; `EngineArgs` is the same class under vLLM's name.

        EngineConfig(model="/models/llama", max_num_seqs=64, attention="torch", **{"attention.num_splits": 4})

    Keywords are the settings (`engine.config.declaration.EngineSettings`), the points (by their flag's name:
    `attention`, `load_format`, ...) and the options of their drivers ("point.option"); `points` and `options` may also
    be given as mappings.

    Raises ConfigError: a keyword is unknown (with near matches), or a value is of the wrong type or out of range.
    """

    points: dict[str, str] = Field(default_factory=dict)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)

    _origins: _Origins = _Origins()  # pydantic gives each config a copy

    def __init__(self, /, **keywords: Any) -> None:
        super().__init__(**keywords)

    @property
    def plugin_list(self) -> PluginList:
        """Which of the installed plugins may be used."""
        return PluginList(self.plugins or "", self._origins.of.get(Key("settings", "plugins"), ""))

    def add_place(self, error: EngineError) -> None:
        """Say in an error about these settings where it was set what it is about, by a file or by the environment."""
        where = brought("setting_places")
        if where and (places := where(error, self._origins.of, resolve)):
            error.add_place(places)

    def asked(self, point: str) -> str | None:
        """The driver (or list, or kinds) that the user named for a point; None where it is left to the cards."""
        name = self.points.get(point, "auto")
        return None if name == "auto" else name

    def options_for(self, point: str) -> dict[str, Any]:
        """The options given for a point, not yet validated by its driver's card."""
        return dict(self.options.get(point, {}))

    @property
    def hook_options(self) -> dict[str, dict[str, Any]]:
        """The options given for hook plugins, by the plugin's name, not yet validated."""
        prefix = f"{HOOKS}."
        return {name.removeprefix(prefix): dict(o) for name, o in self.options.items() if name.startswith(prefix)}

    @field_validator("points")
    @classmethod
    def _strip(cls, points: dict[str, str]) -> dict[str, str]:
        return {point: name.strip() or "auto" for point, name in points.items()}

    def _build(self, merged: Merged) -> None:
        super()._build(merged)
        self._origins.of = merged.origins


EngineArgs = EngineConfig


# -- errors ------------------------------------------------------------------------------------------------------------
def _config_error(error: ValidationError, origins: Mapping[Key, str]) -> ConfigError:
    """The first bad setting with where it was set (`origins`), and what is wrong with all."""
    faults = error.errors()
    keys = []
    texts = []
    for fault in faults:
        name, *rest = map(str, fault["loc"])
        keys.append(Key("points", rest[0]) if name == "points" and rest else Key("settings", name))
        cause = fault.get("ctx", {}).get("error")
        texts.append(cause.found if isinstance(cause, ConfigError) else fault["msg"])
    first = keys[0]
    origin = origins.get(first, "")
    declared = {**settings_of_commands(), **EngineSettings.declared} if first.section == "settings" else {}
    setting = declared.get(first.name)
    shown = "a value" if setting is not None and setting.secret else repr(faults[0]["input"])
    return ConfigError(
        f"set {first} to {shown}" + (f" ({origin})" if origin else ""),
        texts[0] if len(texts) == 1 else "; ".join(f"{key}: {text}" for key, text in zip(keys, texts, strict=True)),
        f"{first} is: {setting.help}" if setting else "name an installed driver; `engine plugins` lists them",
    )

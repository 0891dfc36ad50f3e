"""The validated settings of one engine. Imports pydantic, so only a starting engine imports this."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from engine.config.faults import add_place, config_error
from engine.config.names import Key, fold
from engine.config.sizes import parse_bytes
from engine.config.sources import Merged
from engine.plugin.plugin_list import PluginList
from engine.plugin.points import HOOKS
from engine.types.errors import ConfigError, EngineError

EXAMPLES = {
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "override_generation_config": '{"temperature": 0.5}',
}
"""Of settings that are JSON."""
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Bytes = Annotated[int, BeforeValidator(lambda value: value if value is None else parse_bytes(value))]
BytesOrNone = Annotated[int, BeforeValidator(lambda value: 0 if str(value) == "0" else parse_bytes(value))]


class _Origins(dict[Key, str]):
    """Where each setting was set; it does not count where two configs are compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Origins)

    __hash__ = None


class EngineConfig(BaseModel):
    """What an engine is started with. Frozen; `EngineArgs` is the same class under vLLM's name.

        EngineConfig(model="/models/llama", max_num_seqs=64, attention="torch", **{"attention.num_splits": 4})

    Keywords are the settings, the points (by their flag's name: `attention`, `load_format`, ...) and the options of
    their drivers ("point.option"); `points` and `options` may also be given as mappings. `engine.config.declaration`
    says what each setting means.

    Raises:
        ConfigError: a keyword is unknown (with near matches), or a value is of the wrong type or out of range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: str | None = None
    generation_config: str = "auto"
    override_generation_config: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float64", "fp8", "fp8_e4m3"] = "auto"
    runner: Literal["auto", "generate", "pooling"] = "auto"
    max_model_len: Positive | None = None
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    long_prefill_token_threshold: NotNegative = 0
    block_size: Positive = 16
    tensor_parallel_size: Positive = 1
    data_parallel_size: Positive = 1
    data_parallel_restarts: NotNegative = 0
    kv_cache_memory: Bytes | None = None
    num_kv_pages: Positive | None = None
    swap_space: BytesOrNone = 0
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Literal["xxhash", "sha256"] = "xxhash"
    enable_jump_forward: bool = True
    in_flight: Positive | None = None
    grammar_warm_up: bool = False
    step_timeout: Annotated[float, Field(ge=2, allow_inf_nan=False)] | None = None
    log_format: Literal["text", "json"] = "text"
    profile_dir: str | None = None
    seed: int = 0
    plugins: str | None = None
    points: dict[str, str] = Field(default_factory=dict)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)

    _origins: _Origins = PrivateAttr(default_factory=lambda: _Origins())

    def __init__(self, /, **keywords: Any) -> None:
        values = fold(keywords)
        if strangers := [key for key in values if key.section == "server"]:
            name = strangers[0].name
            raise ConfigError(f"set {name!r} for an engine", "it is a setting of `engine serve`", "leave it out")
        self._validate(Merged(values, dict.fromkeys(values, "")), super().__init__)

    @classmethod
    def from_kwargs(cls, **keywords: Any) -> Self:
        """The same as the constructor, for callers who pass on what they were given."""
        return cls(**keywords)

    @classmethod
    def from_merged(cls, merged: Merged) -> Self:
        """Validate what `engine.config.sources.gather` merged; errors name the place where a value was set."""
        config = cls.__new__(cls)
        cls._validate(merged, lambda **values: BaseModel.__init__(config, **values))
        config._origins = _Origins(merged.origins)
        return config

    @property
    def plugin_list(self) -> PluginList:
        """Which of the installed plugins may be used."""
        return PluginList(self.plugins or "", self._origins.get(Key("settings", "plugins"), ""))

    def add_place(self, error: EngineError) -> None:
        """Say in an error about these settings where it was set what it is about, by a file or by the environment."""
        add_place(error, self._origins)

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

    @field_validator(*EXAMPLES, mode="before")
    @classmethod
    def _as_json(cls, value: Any, info: ValidationInfo) -> Any:
        """A JSON object as text; a file and Python may have it as a mapping."""
        example = EXAMPLES[str(info.field_name)]
        try:
            given = json.loads(value) if isinstance(value, str) else value
            if given is not None and not isinstance(given, dict):
                raise ValueError(f"it is no object; send one like {example}")
            return given if given is None else json.dumps(given)
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is no JSON ({error}); send an object like {example}") from error

    @field_validator("served_model_name")
    @classmethod
    def _each_a_name(cls, value: str | None) -> str | None:
        if value is not None and not all(name.strip() for name in value.split(",")):
            raise ValueError("one of the names is empty; send a name, or several with commas between")
        return value

    @field_validator("model", "tokenizer", "profile_dir", "chat_template", "generation_config", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if hasattr(value, "__fspath__") else value

    @field_validator("plugins", mode="before")
    @classmethod
    def _entries_as_text(cls, value: Any) -> Any:
        """The list as one text; a repeated flag and a file may have several."""
        several = isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
        return ",".join(value) if several else value

    @field_validator("points")
    @classmethod
    def _strip(cls, points: dict[str, str]) -> dict[str, str]:
        return {point: name.strip() or "auto" for point, name in points.items()}

    @staticmethod
    def _validate(merged: Merged, build: Any) -> None:
        values = merged.section("settings") | {"points": merged.section("points"), "options": merged.options()}
        try:
            build(**values)
        except ValidationError as error:
            raise config_error(error, "settings", merged.origins) from error


EngineArgs = EngineConfig

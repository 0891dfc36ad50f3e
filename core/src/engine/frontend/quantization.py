"""Which layers' weights are stored in fewer bits, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from engine.interfaces.model import ModelCard
from engine.interfaces.quantization import KINDS, QuantizationNeed
from engine.plugin import Registry, Selection, select_kinds
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig
    from engine.interfaces.platform import PlatformFacts
    from engine.types.model import ModelDescription


def quantization_needs(
    architecture: Selection, model: ModelDescription, dtype: str, facts: PlatformFacts
) -> dict[str, QuantizationNeed]:
    """What is asked of a driver, for each kind of layer that can be quantised.

    Args:
        architecture: the model's driver, whose card says which these are.
        dtype: of activations.
    """
    can = cast("type[ModelCard]", architecture.card).quantized
    return {
        kind: QuantizationNeed(
            kind=kind, dtype=dtype, stored_dtype=model.dtype, device=facts.device, framework=facts.framework
        )
        for kind in KINDS
        if kind in can and (kind != "head" or model.generates)
    }


def choose_quantization(
    config: EngineConfig,
    registry: Registry,
    architecture: Selection,
    model: ModelDescription,
    needs: Mapping[str, QuantizationNeed],
) -> list[Selection]:
    """A driver for each kind of layer that is to be quantised; none where the user names none.

    Args:
        architecture: the model's driver.
        needs: see `quantization_needs`.

    Raises:
        ConfigError: the model has no layer that could be; there are options and no driver to take them.
        PluginError: as `select_kinds`.
    """
    asked, options = config.asked("quantization"), config.options_for("quantization")
    flag = registry.points["quantization"].option_flag
    chosen: list[Selection] = []
    if asked is not None:
        if not needs:
            raise ConfigError(
                f"quantization={asked} with {model.architecture}",
                f"its driver '{architecture.candidate.name}' ({architecture.candidate.provenance}) has no layer whose "
                "weights another may store",
                f"leave {flag} out, or name another driver with --model-impl",
            )
        chosen = select_kinds(registry, "quantization", needs, asked, None if _all_auto(asked) else options)
    if options and not chosen:
        name, value = next(iter(options.items()))
        raise ConfigError(
            f"set quantization.{name} to {value!r}",
            "no quantization is chosen, and without one there is none",
            f"choose one with {flag} DRIVER, or leave the option out",
        )
    return chosen


def _all_auto(asked: str) -> bool:
    """Whether each kind of an exact list is left as it is."""
    return all(part.rpartition("=")[2].strip() == "auto" for part in asked.split(","))

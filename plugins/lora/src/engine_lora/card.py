"""The card of LoRA adapters."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.interfaces.adapter import OPERATIONS, AdapterCard

MOST_RANK = 256


class LoRAOptions(BaseModel):
    """Options of `lora`."""

    model_config = ConfigDict(extra="forbid")

    max_loras: int = Field(default=4, ge=1, le=1024, description="most adapters on the device, and so in one step")
    max_lora_rank: int = Field(default=64, ge=1, le=MOST_RANK, description="largest rank of an adapter")
    experts: bool = Field(
        default=False, description="adapters may change the experts of mixtures, which are then computed one by one"
    )
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="most adapters in the host's memory; others are read again (default: max_loras)"
    )

    @model_validator(mode="after")
    def _as_many_on_the_host(self) -> LoRAOptions:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras={self.max_cpu_loras} is less than max_loras={self.max_loras}")
        return self

    @property
    def most_on_host(self) -> int:
        """`max_cpu_loras`, or what it is by default."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class LoRA(AdapterCard):
    """Low-rank products beside linear layers (Hu et al. 2021), from folders of PEFT."""

    framework = "torch"
    batch_invariant = True
    Options = LoRAOptions
    operations = frozenset(OPERATIONS)
    bodies = {"core": "engine_lora.places:Places", "worker": "engine_lora.worker:Worker"}  # noqa: RUF012

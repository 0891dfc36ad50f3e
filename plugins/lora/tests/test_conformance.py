"""The driver put through the point's suite, and its operations through that of operations."""

from __future__ import annotations

from pathlib import Path

from engine_lora import LoRARequest
from engine_sdk.conformance import AdapterConformance, OpsConformance


class TestLoRA(AdapterConformance):
    driver = "lora"
    options = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}  # noqa: RUF012

    @classmethod
    def revision_of(cls, path: Path) -> str:
        return LoRARequest("", 0, path).revision


class TestLoRAOps(OpsConformance):
    driver = "lora"

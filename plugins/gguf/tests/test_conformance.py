"""The drivers of this package through the suites of engine-sdk."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from gguf_maker import byte_vocabulary, encoded, tiny_model, write

from engine_gguf.dequantize import dequantize
from engine_gguf.quantization import GGUFQuantizationBody, Stored
from engine_kit.ggml_blocks import METHOD, TYPES
from engine_sdk.conformance import CheckpointConformance, QuantizationConformance, TokenizerConformance


class _OfAFile:
    """Suites that read a file, which is written once."""

    model: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        def make() -> str:
            model = tiny_model("LlamaForCausalLM", layers=1)
            folder = tmp_path_factory.mktemp("gguf")
            template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            return str(write(folder / "model.gguf", model, "Q4_K", vocabulary=byte_vocabulary(template)))

        type(self).model = self.once("file", make)  # type: ignore[attr-defined]


class TestCheckpoint(_OfAFile, CheckpointConformance):
    driver = "gguf"


class TestTokenizer(_OfAFile, TokenizerConformance):
    driver = "gguf"


class TestQuantization(QuantizationConformance):
    driver = "gguf"
    kind: ClassVar[str] = "Q4_K"
    inputs: ClassVar[int] = 512
    stored: ClassVar[dict[str, Any]] = {
        "quant_method": METHOD,
        "types": dict.fromkeys(["layer", "layer.0", "layer.1", "layer.2"], "Q4_K"),
    }

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        data, _ = encoded(weight.numpy(), cls.kind, len(name) + len(weight))
        form = TYPES[cls.kind]
        blocks = torch.from_numpy(data).view(len(weight), -1, form.bytes)
        return {f"{name}.weight": blocks, f"{name}.bias": bias}, dequantize(blocks, cls.kind)


class RowsBeside(GGUFQuantizationBody):
    """an id gets the vector of the next one"""

    def embedding(self, ids: torch.Tensor, packed: Stored, first: int | None) -> torch.Tensor:
        return super().embedding((ids + 1) % 512, packed, first)


class OthersRowsToo(GGUFQuantizationBody):
    """an id that another rank has gets a vector of this one"""

    def embedding(self, ids: torch.Tensor, packed: Stored, first: int | None) -> torch.Tensor:
        ((_, blocks),) = packed.parts
        return super().embedding(ids if first is None else (ids - first) % len(blocks), packed, None)


class RoundedTwice(GGUFQuantizationBody):
    """vectors are rounded to float16 first"""

    def embedding(self, ids: torch.Tensor, packed: Stored, first: int | None) -> torch.Tensor:
        found = super().embedding(ids, packed, first)
        return found.half().to(found.dtype)


@pytest.mark.parametrize("faulty", [RowsBeside, OthersRowsToo, RoundedTwice, GGUFQuantizationBody])
def test_the_suite_finds_it(faulty: type) -> None:
    """And finds nothing in the body that is sound."""
    suite: Any = type("Suite", (TestQuantization,), {"body": classmethod(lambda cls: faulty), "__test__": False})()
    if faulty is GGUFQuantizationBody:
        return suite.test_looked_up_rows("float32")
    with pytest.raises(AssertionError, match="not what was stored|gives no zeros"):
        suite.test_looked_up_rows("float32")
    return None

"""An operation that the core does not know: a stranger's ops driver defines it, a stranger's model calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.launch import launch
from engine.interfaces.ops import OpsCard, OpsNeed
from engine.types.errors import ContractError, PluginError
from engine_reference.models.llama import LlamaModel
from engine_reference.models.llama_card import Llama

OPERATION = "toy_reverse"


class ToyOps(OpsCard):
    """The toy operation alone."""

    framework = "torch"
    operations = defines = frozenset({OPERATION})
    body = f"{__name__}:ToyBody"

    @classmethod
    def unsupported(cls, need: OpsNeed) -> list[str]:
        return [] if need.operation in cls.operations else [f"it computes no {need.operation}"]


class ToyBody:
    def __init__(self, context: object) -> None: ...

    def toy_reverse(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, V] -> the same with its last dimension reversed."""
        return x.flip(-1)


class ToyModel(LlamaModel):
    """Llama, whose logits stand for the vocabulary backwards."""

    def __init__(self, context: object) -> None:
        super().__init__(context)  # type: ignore[arg-type]
        self._reverse = context.ops.toy_reverse  # type: ignore[attr-defined]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        reversed_: torch.Tensor = self._reverse(super().logits(hidden))
        return reversed_


class Toy(Llama):
    """Names what its body calls."""

    priority = 50
    operations = Llama.operations | {OPERATION}
    body = f"{__name__}:ToyModel"


class Silent(Toy):
    """Does not."""

    operations = Llama.operations


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def written(*entries: str) -> None:
        info = tmp_path / "engine_toy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-toy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(entries))
        monkeypatch.syspath_prepend(str(tmp_path))

    return written


MODEL, OPS = "[engine.model.v0]\nLlamaForCausalLM = {}:{}\n", "[engine.ops.v0]\ntoy = {}:ToyOps\n"
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_it_is_defined_called_and_resolved(install) -> None:  # type: ignore[no-untyped-def]
    with LLM("tiny", dtype="float64", num_kv_pages=100) as llm:
        plain = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    install(MODEL.format(__name__, "Toy"), OPS.format(__name__))
    with LLM("tiny", dtype="float64", num_kv_pages=100) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == launch(EngineArgs(model="tiny")).model.vocab_size - 1 - plain[0]


def test_where_nobody_defines_it_the_start_says_so(install) -> None:  # type: ignore[no-untyped-def]
    install(MODEL.format(__name__, "Toy"))
    with pytest.raises(PluginError, match=r"toy_reverse"):
        LLM("tiny", dtype="float64")


def test_a_card_that_does_not_name_it(install) -> None:  # type: ignore[no-untyped-def]
    install(MODEL.format(__name__, "Silent"), OPS.format(__name__))
    with pytest.raises(ContractError, match=r"toy_reverse.*does not name it among its operations"):
        LLM("tiny", dtype="float64")

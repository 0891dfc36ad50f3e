"""An operation that the core does not know: a stranger's ops driver defines it, a stranger's model calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.launch import launch
from engine.types.errors import ContractError, DuplicateDriverError, PluginError
from engine_reference.models.llama import LlamaModel
from engine_reference.models.llama_card import Llama
from engine_sdk import toy_ops
from engine_sdk.toy_ops import OPERATION, ToyOps


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
    def written(*entries: str, name: str = "engine-toy") -> None:
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(entries))
        monkeypatch.syspath_prepend(str(tmp_path))

    return written


MODEL, OPS = "[engine.model.v0]\nLlamaForCausalLM = {}:{}\n", f"[engine.ops.v0]\ntoy = {toy_ops.__name__}:ToyOps\n"
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_it_is_defined_called_and_resolved(install) -> None:  # type: ignore[no-untyped-def]
    with LLM("tiny", dtype="float64", num_kv_pages=100) as llm:
        plain = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    install(MODEL.format(__name__, "Toy"), OPS)
    with LLM("tiny", dtype="float64", num_kv_pages=100) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == launch(EngineArgs(model="tiny")).model.vocab_size - 1 - plain[0]


def test_where_nobody_defines_it_the_start_says_so(install) -> None:  # type: ignore[no-untyped-def]
    install(MODEL.format(__name__, "Toy"))
    with pytest.raises(PluginError, match=r"toy_reverse"):
        LLM("tiny", dtype="float64")


def test_a_card_that_does_not_name_it(install) -> None:  # type: ignore[no-untyped-def]
    install(MODEL.format(__name__, "Silent"), OPS)
    with pytest.raises(ContractError, match=r"toy_reverse.*does not name it among its operations"):
        LLM("tiny", dtype="float64")


class OtherOps(ToyOps):
    """Defines it, too, and stands above."""

    priority = 90


def test_who_else_defines_it_has_to_be_told_apart(install) -> None:  # type: ignore[no-untyped-def]
    """Both distributions are named; a name, or the other's denial, settles it."""
    install(MODEL.format(__name__, "Toy"), OPS)
    install(f"[engine.ops.v0]\nother = {__name__}:OtherOps\n", name="engine-other")
    with pytest.raises(
        DuplicateDriverError, match=r"toy_reverse.*--ops.*by engine-other 1\.0 and .* by engine-toy 1\.0"
    ):
        launch(EngineArgs(model="tiny"))
    for settings in ({"ops": "toy"}, {"plugins": "-engine-other"}):
        plan = launch(EngineArgs(model="tiny", **settings))
        assert {one.candidate.name for one in plan.selections if one.kind == OPERATION} == {"toy"}
    assert launch(EngineArgs(model="tiny", model_impl="LlamaForCausalLM", plugins="-engine-toy")), "nobody calls it"

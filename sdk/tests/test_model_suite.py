"""How the suite of models finds out what it tests: the suite for encoders, and a checkpoint's tensors."""

from __future__ import annotations

import pytest
from broken_model_cards import Sound

from engine_sdk.conformance import ModelConformance
from engine_sdk.conformance.report import run_driver


@pytest.mark.parametrize(
    ("driver", "test"), [("BertModel", "test_it_is_an_encoder"), ("LlamaModel", "test_it_is_a_decoder")]
)
def test_the_command_finds_the_suite(driver: str, test: str) -> None:
    report = run_driver("model", driver, {}, select="test_it_is or test_describe")
    assert test in {result.test for result in report.of("passed")} and not report.of("failed")


def test_tensors_are_transformers_or_the_layers_own() -> None:
    """A card that transformers does not know has the slots of `engine.modeling`, which are the same."""
    known = type("Known", (ModelConformance,), {"card": Sound, "oracle": "LlamaForCausalLM"})
    own = type("Own", (ModelConformance,), {"card": Sound})
    assert dict(own.tensors()) == dict(known.tensors())


def test_tensors_that_nobody_knows() -> None:
    """A body that is not made of `engine.modeling` has to say them."""

    class Bare:
        def __init__(self, context: object) -> None:
            pass

    own = type("Own", (ModelConformance,), {"card": Sound, "body": classmethod(lambda cls: Bare)})
    with pytest.raises(pytest.fail.Exception, match="name the checkpoint's tensors: shapes = "):
        own.tensors()
    said = type("Said", (own,), {"shapes": {"weight": (3, 4)}})
    assert said.tensors() == {"weight": (3, 4)}

"""A model beside transformers' own: with the config as it is, and with others that its config class allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.interfaces.model import ModelNeed
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine_sdk.conformance.model.common import ModelSuite
from engine_sdk.conformance.model.example import draw
from engine_sdk.conformance.model.oracle import TOLERANCE, Oracle
from engine_sdk.conformance.model.session import Session
from engine_sdk.conformance.model.small import spellings, variants


class ParitySuite(ModelSuite):
    """A suite of models that transformers may have as well."""

    @classmethod
    def types(cls, length: int) -> list[int] | None:
        """The token types of a prompt; None for all 0."""
        return None

    @staticmethod
    def near_to(expected: torch.Tensor, found: torch.Tensor) -> None:
        """As near as float32 is, in which transformers computes some of it."""
        atol = TOLERANCE * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=atol)

    @pytest.mark.parametrize("length", [1, 6, None], ids=["1", "6", "whole"])
    def test_as_transformers_computes_it(self, length: int | None) -> None:
        """Logits of every token; the hidden states of a model that embeds; the pooled token's labels of a classifier.
        Of a token, a short prompt, and one as long as the description promises."""
        oracle, length = self.reference(), length or min(self.description().max_model_len, 320)
        ids, types = self.ids(length, seed=1), self.types(length)
        self.near_to(oracle(ids, types, self.read()), self.pooled(ids, types))

    def test_variants_of_the_config(self) -> None:
        """Another activation, a flag the other way, a number more or less: computed as transformers computes it, or
        refused with a reason. What transformers refuses itself, nobody has to know."""
        self.reference()
        self.servable()
        tried, faults = 0, []
        for key, value in variants(self.transformers_name(), self.whole_config()):
            try:
                config = self.config_with(**{key: value})
            except Exception:
                continue  # whatever it is that transformers' config class says to the value
            tried += 1
            if fault := self._fault(config):
                faults.append(f"{key} = {value!r}: {fault}")
        assert tried, f"the config class of {self.transformers_name()} takes no other value for any of its keys"
        assert not faults, "taken, and neither computed nor refused with a reason:\n" + "\n".join(faults)

    def test_spellings_of_the_config(self) -> None:
        """The same config as other versions of transformers write it is taken, and gives the same model."""
        name, reference, ids = self.transformers_name(), self.reference(), self.ids(12)
        self.servable()
        for what, config in spellings(name, self.whole_config()):
            expected = Oracle(name, config, like=reference)(ids, encoder=self.read())
            reasons = self._reasons(config)
            assert not reasons, f"{what}: {'; '.join(reasons)}"
            self.near_to(expected, self._session(self.described().describe(config), reference).pooled(ids))

    def _fault(self, config: dict[str, Any]) -> str:
        """What is wrong with the model of a variant; "" where it is refused, or right, or not known to transformers."""
        description, said = None, ""
        try:
            description = self._taken(config)
        except Exception as error:
            said = _line(error)
        if description is None and not said:
            return ""
        try:
            oracle = Oracle(self.transformers_name(), config, like=self.reference())
        except Exception:
            return ""
        return said if description is None else self._difference(description, oracle)

    def _taken(self, config: dict[str, Any]) -> ModelDescription | None:
        """The description of a variant; None where the card refuses it, or the suite cannot compute it."""
        if self._reasons(config):
            return None
        try:
            found = self.described().describe(config)
        except EngineError:
            return None
        return None if self.unserved(found) else found

    def _difference(self, description: ModelDescription, oracle: Oracle) -> str:
        """How the answers differ; "" where they do not, or where the model is refused as it is built or loaded."""
        ids = self.ids(min(12, description.max_model_len))
        try:
            expected = oracle(ids, encoder=self.read(description))
            self.near_to(expected, self._session(description, oracle).pooled(ids))
        except EngineError:
            return ""
        except Exception as error:
            return _line(error)
        return ""

    def _reasons(self, config: dict[str, Any]) -> list[str]:
        return self.described().unsupported(ModelNeed(architecture=config["architectures"][0], config=config))

    def _session(self, description: ModelDescription, oracle: Oracle) -> Session:
        context, attention = self.context("float64"), self.attention("float64")
        return Session(self.body(), description, context, attention, draw(oracle.shapes))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]

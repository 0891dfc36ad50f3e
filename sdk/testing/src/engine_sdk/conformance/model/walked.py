"""What the runner's walk may do with any model: look on between layers, and cut them into stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from engine.interfaces.model import ModelFeature, State
from engine.types.parallel import Stage
from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.model.common import NEAR
from engine_sdk.conformance.model.paged import Request
from engine_sdk.conformance.model.parity import ParitySuite
from engine_sdk.conformance.model.session import Part


class WalkedSuite(ParitySuite):
    """A suite of models whose layers run under the walk."""

    @staticmethod
    def near(found: torch.Tensor, expected: torch.Tensor) -> None:
        """Equal, but for the order of sums."""
        torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)

    def _needs(self, feature: ModelFeature) -> None:
        if feature in self.described().unsupported_features():
            not_served(f"its card says that it does not serve {feature}")

    def test_the_walk_owns_the_layers(self) -> None:
        """It sees each layer, with hidden states before it; what it is given are the layers of the description, and a
        state that it has looked at goes on."""
        self._needs("listeners")
        ids, seen = self.ids(6), []

        def watching(layers: Iterable[Any], state: State) -> Iterator[Any]:
            for layer in layers:
                assert tuple(state["hidden"].shape) == (6, self.description().hidden_size)
                seen.append(state["hidden"].clone())
                yield layer

        session = self.session()
        state = session.state([Part(Request(), ids)])
        before = {name: tensor.clone() for name, tensor in state.items()}
        self.near(session.heads(session.forward(state, watching)).double().cpu(), self.alone(ids))
        assert len(seen) == self.description().num_layers, f"the walk is given {len(seen)} layers"
        assert all(not torch.equal(a, b) for a, b in pairwise(seen)), "a layer changes nothing"
        for name, tensor in before.items():
            assert torch.equal(state[name], tensor), f"the step's {name} are changed, which the runner may read again"

    def test_the_walk_cuts_stages(self) -> None:
        """A body on one of several stages has its layers alone, takes its weights from the whole checkpoint, and leaves
        the tensors of `state_sizes`. Another stage goes on with these: what came is not embedded again."""
        self._needs("stages")
        ids, count = self.ids(6), self.description().num_layers
        whole = self.session().model.num_parameters()
        for cut in range(1, count):
            first = self.session(stage=Stage(index=0, count=2, start=0, stop=cut))
            last = self.session(stage=Stage(index=1, count=2, start=cut, stop=count))
            smaller = max(first.model.num_parameters(), last.model.num_parameters()) < whole
            assert smaller, "a stage holds the weights of the whole model"
            state = first.state([Part(Request(), ids)])
            assert first.leave(state) is None, "a stage that is not the last gives hidden states"
            sizes = first.model.state_sizes()
            left = {name: state[name].clone() for name in sizes}
            assert {name: tuple(tensor.shape) for name, tensor in left.items()} == {
                name: (len(ids), size) for name, size in sizes.items()
            }, "what a stage leaves has other sizes than state_sizes says"
            found = last.heads(last.forward(State(last.state([Part(Request(), ids)]) | left)))
            self.near(found.double().cpu(), self.alone(ids))

"""The suite of point `model`, for encoder-decoder models: decoders that see what an encoder made, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.model.paged import Request
from engine_sdk.conformance.model.session import Part
from engine_sdk.conformance.model.suite import ModelConformance


class EncoderDecoderConformance(ModelConformance):
    """An encoder-decoder model, in float64 on the reference operations and attention. Where no test says otherwise, all
    requests have one input to the encoder."""

    def test_it_has_an_encoder(self) -> None:
        """Each of the decoder's layers has its own attention and a view of the encoder; there is something to read."""
        model = self.description()
        assert model.encoder is not None and model.generates, "subclass ModelConformance, or EncoderModelConformance"
        assert model.encoder.decoder_prompt, "the decoder has nothing to begin with"
        for layer in range(model.num_layers):
            kinds = [site.kind for site in model.sites if site.layer == layer]
            assert sorted(kinds) == ["cross", "full"], f"layer {layer} has {kinds}"
        others = {site.kind for site in model.sites if (site.layer or 0) >= model.num_layers}
        assert others == {"encoder"}, "behind the decoder's layers stand the encoder's"

    def answers(self, source: int, ids: Sequence[int]) -> torch.Tensor:
        """Of a request with this input to the encoder, alone."""
        return self.session().step([Part(Request(source=source), ids)])[0]

    def test_inputs_of_encoders_are_apart(self) -> None:
        """Requests with inputs of several lengths in one step, two of them with the same: each as alone. They are
        encoded in any order, and once."""
        prompts = [self.ids(n, seed=n) for n in (4, 1, 9, 6)]
        sources = (2, 0, 1, 2)
        session, requests = self.session(), [Request(source=source) for source in sources]
        session.encode(3)
        found = session.step([Part(r, p) for r, p in zip(requests, prompts, strict=True)])
        again = session.step([Part(r, self.ids(1, seed=50)) for r in requests])
        for source, ids, first, second in zip(sources, prompts, found, again, strict=True):
            self.near(torch.cat([first, second]), self.answers(source, [*ids, *self.ids(1, seed=50)]))

    def test_what_the_encoder_reads_has_influence(self) -> None:
        """Another input, another answer, of every token."""
        ids = self.ids(5)
        moved = (self.answers(1, ids) - self.alone(ids)).abs().amax(dim=1)
        assert (moved > 1e-6).all(), f"token {int(moved.argmin())} does not see the encoder"

    def test_padding(self) -> None:
        """Nothing is captured."""
        not_served("what encoders left is planned for each step as it is: nothing fills it up")

"""Mamba and Mamba-2: norms and mixers, and nothing that attends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import Embedding, Module, RMSNorm
from engine_kit.model_config import number
from engine_models.decoder_card import tied
from engine_models.layers import DecoderModel
from engine_models.mamba_card import Mamba, Mamba2
from engine_states.layers import Mamba1Mixer, Mamba2Mixer


class MixerLayer(Module):
    """norm, mixer; its output is added to the residual by the norm that follows."""

    def __init__(self, norm: RMSNorm, mixer: Mamba1Mixer | Mamba2Mixer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, state["residual"] = self.norm.add(state["hidden"], state.get("residual"))
        state["hidden"] = self.mixer(hidden)


class _Mixers(DecoderModel):
    """Both. mixer: makes that of a layer, by its index and its name in the checkpoint."""

    def __init__(
        self, context: ModelContext, mixer: Callable[[ModelContext, int, str], Mamba1Mixer | Mamba2Mixer]
    ) -> None:
        model, config = context.description, context.description.config
        size, eps = model.hidden_size, number(config, "layer_norm_epsilon", 1e-5)

        def layer(context: ModelContext, index: int) -> Module:
            name = f"backbone.layers.{index}"
            norm = RMSNorm(context, size, eps, f"{name}.norm")
            return MixerLayer(norm, mixer(context, index, f"{name}.mixer"))

        embed = Embedding(context, model.vocab_size, size, "backbone.embeddings")
        norm = RMSNorm(context, size, eps, "backbone.norm_f")
        super().__init__(context, layer, norm, tied(config, self._tied), embed)

    _tied = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `DecoderModel.load_weights`; the authors' own files call the embedding `embedding`."""
        super().load_weights(self._named(weights))

    @staticmethod
    def _named(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            yield name.replace("backbone.embedding.", "backbone.embeddings."), tensor


class MambaModel(_Mixers):
    """MambaForCausalLM."""

    def __init__(self, context: ModelContext) -> None:
        form = Mamba.form(context.description.config)
        super().__init__(context, lambda context, index, name: Mamba1Mixer(context, index, form, name))


class Mamba2Model(_Mixers):
    """Mamba2ForCausalLM."""

    _tied = False

    def __init__(self, context: ModelContext) -> None:
        form = Mamba2.form(context.description.config)
        super().__init__(context, lambda context, index, name: Mamba2Mixer(context, index, form, name))

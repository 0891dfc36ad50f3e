"""transformers' class of an architecture, where there is one, as an oracle beside the self-consistency of a model."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from engine_kit.safetensors_files import read_safetensors
from engine_sdk.conformance.model.example import FIRST_TOKEN, Shapes, check_size, draw
from engine_sdk.conformance.model.small import class_of, quiet

TOLERANCE = 2e-5
"""How far from transformers' answers others may be, of the largest of them. It computes norms, routers and rotary
tables in float32, whatever the model's dtype: that of a small model in float32 is no further off than that."""

_PROBE = [FIRST_TOKEN] * 5
"""A prompt that shows whether a class computes at all."""


class Oracle:
    """transformers' model with the same config, with drawn weights; in float64, or in float32 where its class refuses
    that.

    Args:
        architecture: the name of transformers' class.
        config: config.json.
        like: of another config; its tensors are taken where the two models are of one form.

    Attributes:
        shapes: the tensors of a checkpoint, as the class's `save_pretrained` writes them: shared ones once.
        form: the tensors of the class itself, shared ones once, whose names may be others.
        dtype: that it computes in.

    Raises ValueError as `check_size`.
    """

    shapes: Shapes
    form: Shapes
    dtype: torch.dtype

    def __init__(self, architecture: str, config: dict[str, Any], like: Oracle | None = None) -> None:
        assert not why_none(architecture), why_none(architecture)
        self._class = cast("Any", class_of(architecture))
        self._config = {key: value for key, value in config.items() if key != "architectures"}
        if like is None:
            with torch.device("meta"), quiet():
                check_size(_form(self._class(self._made())))
        with quiet():
            model = self._class(self._made()).eval()
        self.form = _form(model)
        if like is not None and like.form == self.form:
            self.shapes = like.shapes
            self.dtype = like.dtype
            self._model = model.to(self.dtype)
            self._model.load_state_dict(like._model.state_dict())
            self(_PROBE)
            return
        self.shapes = _saved(model)
        for self.dtype in (torch.float64, torch.float32):
            try:
                self.load(draw(self.shapes))
                self(_PROBE)
                break
            except Exception:
                if self.dtype == torch.float32:
                    raise

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a checkpoint's tensors: all of them, under the names in which the class saves them."""
        tensors = {name: tensor.to(self.dtype) for name, tensor in weights}
        with quiet():
            model, said = self._class.from_pretrained(
                None, config=self._made(), state_dict=tensors, dtype=self.dtype, output_loading_info=True
            )
        lost = {what: names for what, names in said.items() if names}
        assert not lost, f"{self._class.__name__} does not load what it saves: {lost}"
        self._model = model.eval()

    @torch.no_grad()
    def __call__(
        self, ids: Sequence[int], token_types: Sequence[int] | None = None, encoder: np.ndarray | None = None
    ) -> torch.Tensor:
        """Of one prompt, in float64: logits [T, vocab_size]; [1, num_labels] of a classifier; else hidden states
        [T, H]. encoder: what the encoder of an encoder-decoder model reads; the prompt is its decoder's."""
        if self._model.config.is_encoder_decoder:
            return self._decoded(ids, encoder)
        inputs = {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if token_types is not None:
            inputs["token_type_ids"] = torch.tensor([list(token_types)])
        found = self._model(**inputs)
        answer: torch.Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state[0]
        return (answer[0] if answer.dim() == 3 else answer).double()

    @torch.no_grad()
    def of_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """As a call, of a prompt that is these vectors [T, H] in place of the embeddings of tokens."""
        found = self._model(inputs_embeds=vectors[None].to(self.dtype), use_cache=False)
        answer: torch.Tensor = found.logits[0]
        return answer.double()

    def _decoded(self, ids: Sequence[int], data: np.ndarray | None) -> torch.Tensor:
        config = self._model.config
        sound = self._model.main_input_name == "input_features"
        if data is None and sound:
            data = np.ones((2 * config.max_source_positions, config.num_mel_bins), np.float32)
        read = torch.tensor([_PROBE] if data is None else data[None])
        whole = {"attention_mask": torch.ones(1, read.shape[1], dtype=torch.long)}
        if sound:
            read, whole = read.transpose(1, 2).to(self.dtype), {}
        given = {self._model.main_input_name: read, "decoder_input_ids": torch.tensor([list(ids)])}
        answer: torch.Tensor = self._model(**given, **whole).logits[0]
        return answer.double()

    def _made(self) -> Any:
        config = self._class.config_class(**self._config)
        config._attn_implementation = config._experts_implementation = "eager"
        return config


def _form(model: Any) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _saved(model: Any) -> Shapes:
    with tempfile.TemporaryDirectory(prefix="engine-oracle-") as folder, quiet():
        model.save_pretrained(folder)
        tensors = read_safetensors([str(file) for file in sorted(Path(folder).glob("*.safetensors"))])
        return {name: tuple(tensor.shape) for name, tensor in tensors if tensor.is_floating_point()}


def why_none(architecture: str) -> str:
    """Why there is no oracle for this architecture; "" where there is one."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed, whose class of this architecture is the oracle"
    if class_of(architecture) is None:
        return (
            f"transformers has no class {architecture!r}: name one that computes the same, oracle = ..., or say that "
            "there is none, oracle = None"
        )
    return ""

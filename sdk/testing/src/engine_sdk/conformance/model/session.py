"""A model at work: requests of which some tokens are computed, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from engine.interfaces.communicator import Group
from engine.interfaces.context import WorkerContext
from engine.interfaces.model import LayerIterator, Model, ModelContext, State
from engine.types.model import ModelDescription
from engine.types.parallel import Stage
from engine_kit.dispatch_guard import DispatchGuard
from engine_sdk.conformance.model.example import encoder_input
from engine_sdk.conformance.model.operations import installed_experts
from engine_sdk.conformance.model.paged import Chunk, PagedLayers, Request


class Part(NamedTuple):
    """Some tokens of one request: the next ones.

    Args:
        request: whose; a new one for a prompt's beginning.
        ids: token ids.
        types: token types, for models that have them; None: all are 0.
    """

    request: Request
    ids: Sequence[int]
    types: Sequence[int] | None = None


class Padding(NamedTuple):
    """What stands behind a step's rows.

    Args:
        rows: of one token each; where all rows decode.
        tokens: behind all rows.
        token_id: of all of them.
    """

    rows: int = 0
    tokens: int = 0
    token_id: int = 0


class Session:
    """One rank's model, built and loaded, over caches of its own.

    Args:
        body: the class under test.
        description: the card's.
        context: of a worker, with the reference operations.
        backends: of the reference attention, by kind of layer.
        weights: the checkpoint's tensors.
        group: the ranks that share the layers.
        quantization: see `ModelContext`.
        keeps: keep what attention is given.
        guarded: compute under the dispatch guard.
    """

    def __init__(
        self,
        body: type,
        description: ModelDescription,
        context: WorkerContext,
        backends: Mapping[str, Any],
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        group: Group | None = None,
        quantization: Mapping[str, Any] | None = None,
        keeps: bool = False,
        guarded: bool = False,
        stage: Stage | None = None,
    ) -> None:
        assert context.ops is not None and context.dtype is not None and context.device is not None
        size = 1 if group is None else group.size
        description = description.computed_in(str(context.dtype).removeprefix("torch."))
        self.description = description
        self.layers = PagedLayers(description, context, backends, size, keeps)
        self._device = context.device
        self._guard = DispatchGuard() if guarded else None
        given = ModelContext(
            description=description,
            ops=context.ops,
            attention=self.layers,
            dtype=context.dtype,
            device=context.device,
            max_model_len=description.max_model_len,
            tp_rank=0 if group is None else group.rank,
            tp_size=size,
            group=group,
            quantization=quantization or {},
            latent_attention=self.layers.latent,
            cross_attention=self.layers.cross,
            state=self.layers.state,
            stage=stage or Stage(),
            experts=installed_experts(context, size),
        )
        self.model: Model = body(given if self._guard is None else self._guard.context(given))
        self.model.load_weights(weights)

    @torch.inference_mode()
    def encode(self, source: int) -> None:
        """Let the encoder compute the input of this number, see `encoder_input`, where it has not."""
        form = self.description.encoder
        if form is None or source in self.layers.lengths:
            return
        data = encoder_input(self.description, source)
        self.layers.begin_encoding(source, len(data) // form.stride)
        with self._guard or nullcontext():
            self.model.encode(torch.from_numpy(data).to(self._device))

    def state(self, parts: Sequence[Part], padding: Padding | None = None) -> State:
        """What the runner gives a model: ids, positions and, where it has them, token types. Prepares attention."""
        for part in parts:
            self.encode(part.request.source)
        extra = padding or Padding()
        behind = extra.rows + extra.tokens
        ids = [token for part in parts for token in part.ids] + [extra.token_id] * behind
        places = [part.request.computed + i for part in parts for i in range(len(part.ids))] + [0] * behind
        state = State(
            token_ids=torch.tensor(ids, dtype=torch.int32, device=self._device),
            positions=torch.tensor(places, dtype=torch.int64, device=self._device),
        )
        if self.description.num_token_types:
            types = [t for part in parts for t in (part.types or [0] * len(part.ids))] + [0] * behind
            state["token_type_ids"] = torch.tensor(types, dtype=torch.int32, device=self._device)
        self.layers.plan([Chunk(part.request, len(part.ids)) for part in parts], extra.rows, extra.tokens)
        return state

    @torch.inference_mode()
    def leave(self, state: State) -> torch.Tensor | None:
        """What a stage's body gives, which leaves what follows in the state."""
        with self._guard or nullcontext():
            return self.model.forward(state, every_layer)

    @torch.inference_mode()
    def forward(self, state: State, walk: LayerIterator | None = None) -> torch.Tensor:
        """The final hidden states [T, H]; where the model has taken `wanted` from the state, those of these tokens."""
        wanted = state.get("wanted")
        with self._guard or nullcontext():
            hidden = self.model.forward(state, walk or every_layer)
        tokens = state["token_ids"]  # a walk may have left out some
        rows = len(tokens) if wanted is None or "wanted" in state else len(wanted)
        model = self.description
        assert hidden is not None, "the whole model is one stage, and gives hidden states"
        assert tuple(hidden.shape) == (rows, model.hidden_size), f"hidden is {list(hidden.shape)}"
        assert hidden.dtype == self.layers.dtype, f"hidden is {hidden.dtype}"
        return hidden

    @torch.inference_mode()
    def heads(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model makes of hidden states [R, H]: logits, labels, or these states themselves."""
        model, width = self.description, self.description.vocab_size
        with self._guard or nullcontext():
            if model.generates:
                found = self.model.logits(hidden)
            elif model.pooler.num_labels:
                found, width = self.model.classify(hidden), model.pooler.num_labels
            else:
                return hidden
        assert tuple(found.shape) == (len(hidden), width), f"{len(hidden)} rows give {list(found.shape)}"
        assert found.dtype == self.layers.dtype, f"they are {found.dtype}"
        return found

    def step(self, parts: Sequence[Part], padding: Padding | None = None) -> list[torch.Tensor]:
        """One step: for each part what `heads` makes of all of its tokens, on the host."""
        found = self.heads(self.forward(self.state(parts, padding))).double().cpu()
        answers, start = [], 0
        for part in parts:
            answers.append(found[start : start + len(part.ids)])
            start += len(part.ids)
        return answers

    def whole(self, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """A new request, alone and at once."""
        request = Request()
        found = self.step([Part(request, ids, types)])[0]
        self.layers.release(request)
        return found

    def pooled(self, ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
        """The same, as transformers gives it: a classifier's labels are those of the pooled hidden state."""
        request, pooler = Request(), self.description.pooler
        hidden = self.forward(self.state([Part(request, ids, types)]))
        self.layers.release(request)
        if pooler.num_labels and not pooler.token_labels:
            of_type = {"last": hidden[-1:], "cls": hidden[:1], "mean": hidden.mean(dim=0, keepdim=True)}
            hidden = of_type[pooler.pooling_type]
        return self.heads(hidden).double().cpu()


def every_layer(layers: Iterable[Any], state: State) -> Iterator[Any]:
    """The plain walk."""
    return iter(layers)

"""Models with one planted fault each: Llamas, those that broken_encoders holds, and strangers'. A class a mutant."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from broken_encoder_decoders import ENCODER_DECODERS
from broken_encoders import ENCODERS
from broken_model_cards import CARDS, Sound
from broken_stranger_cards import GPT2_CARDS, MIXTRAL_CARDS
from broken_strangers import GPT2S, MIXTRALS
from engine_gpt2.card import GPT2Card
from engine_mixtral.card import MixtralCard
from mutant_suites import suites_of

from engine.interfaces.executor import Worker
from engine.interfaces.model import ModelContext, State
from engine.modeling import LMHead
from engine.types.errors import CheckpointError
from engine.types.parallel import Stage
from engine.types.start import CoreStart, WorkerStart
from engine_reference.models.llama import LlamaModel
from engine_sdk.conformance import (
    EncoderDecoderConformance,
    EncoderModelConformance,
    ModelConformance,
    ServedModelConformance,
)


class Instead:
    """Operations, attention or a group of which some methods are others."""

    def __init__(self, wrapped: Any, **methods: Any) -> None:
        self._wrapped = wrapped
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class Llama(LlamaModel):
    """A sound one, over operations that a mutant may exchange."""

    def __init__(self, context: ModelContext) -> None:
        ops = Instead(context.ops, **self.operations(context.ops))
        super().__init__(dataclasses.replace(context, ops=ops, **self.changes(context)))

    def operations(self, ops: Any) -> dict[str, Any]:
        return {}

    def changes(self, context: ModelContext) -> dict[str, Any]:
        return {}


class SeesOneMore(Llama):
    """off-by-one causality: a token's hidden state takes something of the token after it"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        return hidden + 0.1 * torch.cat((hidden[1:], hidden[-1:]))


class MixesWithTheStep(Llama):
    """a token takes something of the one before it in the step, not in the request"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        return hidden + 0.1 * torch.cat((hidden[:1], hidden[:-1]))


class RotatesNeighbours(Llama):
    """rotary pairs are neighbours (GPT-J's form), not two halves"""

    def operations(self, ops: Any) -> dict[str, Any]:
        def rope(q: Any, k: Any, positions: Any, table: Any) -> Any:
            def turn(x: torch.Tensor, back: bool) -> torch.Tensor:
                shape = (2, -1) if back else (-1, 2)
                return x.unflatten(-1, shape).transpose(-1, -2).flatten(-2).contiguous()

            q, k = ops.rope(turn(q, False), turn(k, False), positions, table)
            return turn(q, True), turn(k, True)

        return {"rope": rope}


class CountsForItself(Llama):
    """positions are taken to be 0, 1, 2, ... in each step"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {"rope": lambda q, k, positions, table: ops.rope(q, k, torch.arange(len(q)), table)}


class NoPositions(Llama):
    """rotary positions are left out"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {"rope": lambda q, k, positions, table: (q, k)}


class ShortTable(Llama):
    """the rotary table ends before the last position, which gets the one before it"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {"rope": lambda q, k, positions, table: ops.rope(q, k, positions.clamp(max=len(table) - 2), table)}


class ForgetsResidual(Llama):
    """the residual is forgotten where the feed-forward block begins"""

    def operations(self, ops: Any) -> dict[str, Any]:
        turns = [0]

        def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
            turns[0] += 1
            kept = torch.zeros_like(residual) if turns[0] % 4 == 1 else residual
            return ops.add_rms_norm(x, kept, weight, eps)

        return {"add_rms_norm": add_rms_norm}


class WrongEps(Llama):
    """norms have an eps of their own, not the config's"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {
            "rms_norm": lambda x, weight, eps: ops.rms_norm(x, weight, 1e-6),
            "add_rms_norm": lambda x, residual, weight, eps: ops.add_rms_norm(x, residual, weight, 1e-6),
        }


class SwapsGateAndUp(Llama):
    """gate and up are swapped"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {"silu_mul": lambda x: ops.silu_mul(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1))}


class _Attends(Llama):
    """Exchanges what attention is given."""

    def given(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return q, k, v

    def changes(self, context: ModelContext) -> dict[str, Any]:
        def attention(layer: int, scale: float, **more: Any) -> Any:
            attend = context.attention(layer, self.scale(scale), **more)
            return lambda q, k, v: attend(*self.given(q, k, v))

        return {"attention": attention}

    def scale(self, scale: float) -> float:
        return scale


class HeadsInTurn(_Attends):
    """query heads are dealt to KV heads in turn, not in groups"""

    def given(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return q.unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2), k, v


class ValuesBackwards(_Attends):
    """the KV heads of values come in reverse order"""

    def given(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return q, k, v.flip(1)


class NoRoot(_Attends):
    """scores are divided by the head size, not by its root"""

    def scale(self, scale: float) -> float:
        return scale**2


class RepeatsHeads(_Attends):
    """KV heads are repeated for each query head, though the cache has fewer"""

    def given(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        group = q.shape[1] // k.shape[1]
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


class SecondLayerForBoth(Llama):
    """every layer asks for the attention of the last one"""

    def changes(self, context: ModelContext) -> dict[str, Any]:
        return {"attention": lambda layer, scale, **more: context.attention(1, scale, **more)}


class _Loads(Llama):
    """Exchanges what is loaded."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights(self.loaded(list(weights)))

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return weights


class DropsBias(_Loads):
    """dropped tensor: the output projection's bias is read, and not added"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, tensor * 0 if name.endswith("o_proj.bias") else tensor) for name, tensor in weights]


class MakesUpBias(_Loads):
    """a bias that is missing is taken to be 0"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        there = {name for name, _ in weights}
        biases = [param for part in self.parts() for param in part.params() if param.name.endswith("bias")]
        return weights + [(param.name, torch.zeros(param.shape)) for param in biases if param.name not in there]


class IgnoresUnexpected(_Loads):
    """tensors that it does not know are silently ignored"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        known = {param.name for part in self.parts() for param in part.params()}
        return [(name, tensor) for name, tensor in weights if name in known]


class CutsToSize(_Loads):
    """a tensor that is too large is cut"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        shapes = {param.name: param.shape for part in self.parts() for param in part.params()}
        return [
            (name, tensor[tuple(slice(size) for size in shapes[name])] if name in shapes else tensor)
            for name, tensor in weights
        ]


class TakesTheLast(_Loads):
    """of a tensor that comes twice the last one is taken"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return list(dict(weights).items())


class Untyped(_Loads):
    """what is missing is a KeyError"""

    def load_weights(self, weights: Any) -> None:
        try:
            super().load_weights(weights)
        except CheckpointError as error:
            raise KeyError(str(error)) from None


class TransposesSquares(_Loads):
    """square matrices are read transposed"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        def square(tensor: Any) -> bool:
            return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]

        return [(name, tensor.T if square(tensor) else tensor) for name, tensor in weights]


class RoundsOnce(_Loads):
    """weights are rounded to bfloat16 on the way, whatever the model's dtype"""

    def loaded(self, weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, t.bfloat16().to(t.dtype) if t.is_floating_point() else t) for name, t in weights]


class TiesAlways(Llama):
    """the head is the embedding's matrix, though the config unties them"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model = context.description
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", self.embed)


class Unties(Llama):
    """tied embeddings are untied: the head asks for a matrix of its own"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model = context.description
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head")


class CountsTiedTwice(Llama):
    """a matrix that is shared is counted twice"""

    def num_parameters(self) -> int:
        return super().num_parameters() + self.embed.num_elements()


class KeepsState(Llama):
    """state kept between calls: the first request's hidden states are added to all others"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        self.first = getattr(self, "first", hidden[:1].clone())
        return hidden + 0.01 * self.first


class ChangesPositions(Llama):
    """the step's positions are changed in place"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        state["positions"] += 1
        return hidden


class FirstPositions(Llama):
    """all layers are given the positions that the first one had, whichever tokens are left"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        positions = state["positions"]

        def fixed(layers: Any, state: State) -> Any:
            for layer in walk(layers, state):
                state["positions"] = positions
                yield layer

        return super().forward(state, fixed)


class EmbedsAgain(Llama):
    """hidden states that come from another stage are not looked at"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        state.pop("hidden", None)
        return super().forward(state, walk)


class ScalesVectors(Llama):
    """vectors in place of tokens are scaled by the root of their size, as some models scale embeddings"""

    def embed_vectors(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return vectors * vectors.shape[1] ** 0.5


class HasEveryLayer(Llama):
    """every layer is built, whichever the stage has"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(replace(context, stage=Stage()))
        self.context = context


class RunsAllLayers(Llama):
    """layers run whether the walk asks for them or not"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        return super().forward(state, lambda layers, state: iter(self.layers))


class NormsTheBatch(Llama):
    """hidden states are centred over the tokens of the step, padding included"""

    def forward(self, state: State, walk: Any) -> torch.Tensor:
        hidden = super().forward(state, walk)
        return hidden - 0.1 * hidden.mean(0, keepdim=True)


class LogitsOfTheBatch(Llama):
    """logits are centred over the rows"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        return logits - 0.1 * logits.mean(0, keepdim=True)


class ComputesItself(Llama):
    """the activation is computed by torch, beside the operations"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self.layers:
            layer.mlp._ops = Instead(context.ops, silu_mul=lambda x: _silu(*x.chunk(2, dim=-1)))


def _silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


class AnswersInFloat32(Llama):
    """logits are float32, whatever the model's dtype"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden).float()


class HeadIsNotQuantised(Llama):
    """the head is never packed by the quantization driver, which the card says it is"""

    def changes(self, context: ModelContext) -> dict[str, Any]:
        return {"quantization": {k: v for k, v in context.quantization.items() if k != "head"}}


class EmbeddingIsNotQuantised(Llama):
    """the embedding is never packed by the quantization driver, which the card says it is"""

    def changes(self, context: ModelContext) -> dict[str, Any]:
        return {"quantization": {k: v for k, v in context.quantization.items() if k != "embedding"}}


class _Shared(Llama):
    """Exchanges what ranks do."""

    def collectives(self, group: Any) -> dict[str, Any]:
        return {}

    def changes(self, context: ModelContext) -> dict[str, Any]:
        if context.group is None:
            return {}
        return {"group": Instead(context.group, size=context.tp_size, **self.collectives(context.group))}


class ShiftsShards(_Shared):
    """a rank's part of the vocabulary is taken to begin one row too early"""

    def operations(self, ops: Any) -> dict[str, Any]:
        return {"embedding_part": lambda ids, weight, start: ops.embedding_part(ids, weight, max(start - 1, 0))}


class GathersBackwards(_Shared):
    """the ranks' logits are joined in reverse order"""

    def collectives(self, group: Any) -> dict[str, Any]:
        def all_gather(x: Any, dim: int = 0, sizes: Any = None) -> Any:
            return torch.cat(group.all_gather(x, dim, sizes).split(list(sizes), dim)[::-1], dim)

        return {"all_gather": all_gather}


class SumsNothing(_Shared):
    """a rank goes on with its own part of a sum"""

    def collectives(self, group: Any) -> dict[str, Any]:
        return {"all_reduce": lambda x: x}


class OneRankMore(_Shared):
    """the last rank makes a call that the others do not make"""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.context.tp_size > 1 and self.context.tp_rank == self.context.tp_size - 1:
            self.context.group.all_reduce(hidden[:1].clone())
        return super().logits(hidden)


class AddsBiasEverywhere(_Shared):
    """every rank adds the bias of a layer whose outputs are summed"""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        for layer in self.layers:
            for linear in (layer.attention.o, layer.mlp.down):
                linear.shape = linear.shape._replace(bias=True)
                linear._passed_over = frozenset()


class ReadsOn(_Shared):
    """every rank reads the rows of the first one's KV heads"""

    def load_weights(self, weights: Any) -> None:
        for layer in self.layers:
            qkv = layer.attention.qkv
            queries, *others = qkv.shape.outputs
            qkv.shape = qkv.shape._replace(outputs=(queries, *(shard._replace(start=0) for shard in others)))
        super().load_weights(weights)


class Whole(ModelConformance):
    """Beside transformers' Llama."""

    oracle = "LlamaForCausalLM"


class Plain(Whole):
    """Mutants compute what they do wrong with torch: the test that forbids this would catch every one of them."""

    test_computes_through_operations_alone = None


class Tied(Plain):
    """With one matrix at both ends."""

    config: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True}


class Biased(Plain):
    """With biases."""

    config: ClassVar[dict[str, Any]] = {"attention_bias": True, "mlp_bias": True}


class StrangersGPT2(Plain):
    """Beside transformers' GPT-2."""

    architecture, oracle = "GPT2LMHeadModel", ""


class StrangersMixtral(Whole):
    """Beside transformers' Mixtral."""

    architecture, oracle = "MixtralForCausalLM", ""


class Encoders(EncoderModelConformance):
    """As `Plain`."""

    test_computes_through_operations_alone = None


class EncoderDecoders(EncoderDecoderConformance):
    """Two small stacks."""

    unused = ("final_logits_bias",)
    config: ClassVar[dict[str, Any]] = {
        "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "decoder_start_token_id": 2,
    }  # fmt: skip


class InAWorker(ServedModelConformance):
    """In the core's own worker, whose model's body is the mutant's."""

    config: ClassVar[dict[str, Any]] = {"attention_bias": True, "mlp_bias": True}
    platform = "host"

    @classmethod
    def worker_class(cls, start: CoreStart) -> Any:
        def made(message: WorkerStart) -> Worker:
            body = f"{cls.body().__module__}:{cls.body().__qualname__}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cls.described(), "body", body)
                worker = super(InAWorker, cls).worker_class(start)(message)
                ready = worker.start()
            worker.start = lambda: ready  # type: ignore[method-assign]
            return worker

        return made


def _served(mutant: type) -> type:
    """The same body, in a worker."""
    words = {"__doc__": f"in a worker: {mutant.__doc__}", "__module__": __name__}
    return type(f"Served{mutant.__name__}", (mutant,), words)


PLAIN = [
    SeesOneMore, MixesWithTheStep, RotatesNeighbours, CountsForItself, NoPositions, ShortTable, ForgetsResidual,
    WrongEps, SwapsGateAndUp, HeadsInTurn, ValuesBackwards, NoRoot, RepeatsHeads, SecondLayerForBoth,
    IgnoresUnexpected, CutsToSize, TakesTheLast, Untyped, TransposesSquares, RoundsOnce, TiesAlways, KeepsState,
    ChangesPositions, FirstPositions, EmbedsAgain, ScalesVectors, HasEveryLayer, RunsAllLayers, NormsTheBatch,
    LogitsOfTheBatch, AnswersInFloat32, HeadIsNotQuantised, EmbeddingIsNotQuantised, ShiftsShards, GathersBackwards,
    SumsNothing, OneRankMore, ReadsOn,
]  # fmt: skip
WHOLE = [ComputesItself, *CARDS]
BIASES = [DropsBias, MakesUpBias, AddsBiasEverywhere]
TIED = [Unties, CountsTiedTwice]
STRANGERS = [*GPT2S, *GPT2_CARDS, *MIXTRALS, *MIXTRAL_CARDS]
SERVED = [
    _served(mutant)
    for mutant in (
        SeesOneMore, MixesWithTheStep, CountsForItself, NoPositions, ShortTable, WrongEps, HeadsInTurn, NormsTheBatch,
        KeepsState, TiesAlways, DropsBias, MakesUpBias, IgnoresUnexpected, CutsToSize, TransposesSquares, Untyped,
        RoundsOnce,
    )
]  # fmt: skip
MUTANTS = [*PLAIN, *WHOLE, *BIASES, *TIED, *STRANGERS, *ENCODERS, *ENCODER_DECODERS, *SERVED]

globals().update(suites_of(Plain, Sound, PLAIN))
globals().update(suites_of(Whole, Sound, WHOLE))
globals().update(suites_of(Biased, Sound, BIASES))
globals().update(suites_of(Tied, Sound, TIED))
globals().update(suites_of(StrangersGPT2, GPT2Card, [*GPT2S, *GPT2_CARDS]))
globals().update(suites_of(StrangersMixtral, MixtralCard, [*MIXTRALS, *MIXTRAL_CARDS]))
globals().update(suites_of(Encoders, "BertForSequenceClassification", ENCODERS))
globals().update(suites_of(EncoderDecoders, "BartForConditionalGeneration", ENCODER_DECODERS))
globals().update({mutant.__name__: mutant for mutant in SERVED})  # a worker finds them by name
globals().update(suites_of(InAWorker, "engine-reference:LlamaForCausalLM", SERVED))


class TestUnbrokenInAWorker(InAWorker):
    """What the last mutants are made of passes."""

    driver = "engine-reference:LlamaForCausalLM"

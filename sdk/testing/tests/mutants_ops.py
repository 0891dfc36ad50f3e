"""Operations with one planted fault each, in the reference driver's place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mutant_suites import suites_of

from engine.interfaces.ops import SamplingRows, StepInputs, StepTables
from engine_moe.ops_moe.body import MoeOpsBody
from engine_reference.ops_torch.drawing import Drawing, kept_weights
from engine_reference.ops_torch.ops import TorchOpsBody
from engine_sdk.conformance import OpsAround, OpsConformance
from engine_states.ops_states.body import StateOpsBody


class NormWithoutEps(TorchOpsBody):
    """norm without eps"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.0)


class NormOfOneRow(TorchOpsBody):
    """the norm of a row that is alone has other last bits"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        found = super().rms_norm(x, weight, eps)
        return found * (1 + 2**-22) if len(x) == 1 and found.dtype == torch.float32 else found


class NormInOwnDtype(TorchOpsBody):
    """the mean of squares is taken in the activations' dtype"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class NormOfTheFirst(TorchOpsBody):
    """add_rms_norm norms x alone, and adds afterwards"""

    def add_rms_norm(self, x: Any, residual: Any, weight: Any, eps: float) -> Any:
        return self.rms_norm(x, weight, eps), x + residual


class SampleVariance(TorchOpsBody):
    """layer norm with the variance of a sample (n - 1)"""

    def layer_norm(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        wide = x.double()
        normed = (wide - wide.mean(-1, keepdim=True)) / torch.sqrt(wide.var(-1, keepdim=True) + eps)
        return (normed * weight.double() + bias.double()).to(x.dtype)


class InfinityIsBroken(TorchOpsBody):
    """check_logits takes an infinity for a NaN"""

    def check_logits(self, logits: torch.Tensor) -> Any:
        wide, _ = super().check_logits(logits)
        return wide, ~wide.isfinite().all(dim=-1)


class DrawsUnchecked(TorchOpsBody):
    """draw says of no row that it holds a NaN"""

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> Any:
        tokens, broken = super().draw(logits, rows)
        return tokens, broken & False


class BrokenStays(TorchOpsBody):
    """place_tokens leaves a broken row's place as it was"""

    def place_tokens(self, tokens: Any, broken: Any, table: Any, slot: Any, place: Any) -> Any:
        table[slot[~broken], place[~broken]] = tokens[~broken]
        return torch.where(broken, -2, tokens)


class RopeInterleaved(TorchOpsBody):
    """rotary pairs are neighbours (GPT-J's form), not two halves"""

    def rope(self, q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
        cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, dim=-1)

        def turned(x: torch.Tensor) -> torch.Tensor:
            out, size = x.clone(), 2 * cos.shape[-1]
            first, second = x[..., 0:size:2].double(), x[..., 1:size:2].double()
            out[..., 0:size:2] = (first * cos - second * sin).to(x.dtype)
            out[..., 1:size:2] = (second * cos + first * sin).to(x.dtype)
            return out

        return turned(q), turned(k)


class RopeBackwards(TorchOpsBody):
    """rotary embedding turns the other way"""

    def rope(self, q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
        cos, sin = cos_sin.chunk(2, dim=-1)
        return super().rope(q, k, positions, torch.cat([cos, -sin], dim=-1))


class RopeByPlace(TorchOpsBody):
    """rotary positions are taken to be 0, 1, 2, ..."""

    def rope(self, q: Any, k: Any, positions: Any, cos_sin: Any) -> Any:
        return super().rope(q, k, torch.arange(len(q)), cos_sin)


class RotatesBeforeNorm(TorchOpsBody):
    """queries and keys are rotated first, and normed then"""

    def qk_norm_rope(
        self, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, positions: Any, cos_sin: Any
    ) -> Any:
        q, k = self.rope(q, k, positions, cos_sin)
        return self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)


class OneNormForBoth(TorchOpsBody):
    """keys are normed with the weight of queries"""

    def qk_norm_rope(
        self, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, positions: Any, cos_sin: Any
    ) -> Any:
        return super().qk_norm_rope(q, k, q_weight, q_weight, eps, positions, cos_sin)


class NormsTheWholeRow(TorchOpsBody):
    """queries are normed by the mean over all heads"""

    def qk_norm_rope(
        self, q: Any, k: Any, q_weight: Any, k_weight: Any, eps: float, positions: Any, cos_sin: Any
    ) -> Any:
        wide = q.double()
        normed = wide * torch.rsqrt(wide.square().mean((-2, -1), keepdim=True) + eps) * q_weight.double()
        return self.rope(normed.to(q.dtype), self.rms_norm(k, k_weight, eps), positions, cos_sin)


class GatesWrongHalf(TorchOpsBody):
    """the second half is the gate"""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gate_up.roll(gate_up.shape[1] // 2, dims=1))


class SiluOverflows(TorchOpsBody):
    """silu by exponentials that overflow"""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        grown = torch.exp(gate)
        return gate * grown / (1 + grown) * up


class GatesByUp(TorchOpsBody):
    """gelu of what it should multiply"""

    def gelu_mul(self, gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
        return super().gelu_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1), tanh)


class ReluUnsquared(TorchOpsBody):
    """relu is never squared"""

    def relu(self, x: torch.Tensor, squared: bool) -> torch.Tensor:
        return super().relu(x, False)


class GeluByTanh(TorchOpsBody):
    """gelu by its approximation always"""

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        return super().gelu(x, True)


class CapForgotten(TorchOpsBody):
    """soft cap without the factor behind tanh"""

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap)


class MasksByProduct(TorchOpsBody):
    """ids of other parts are masked by multiplying with 0, which NaN survives"""

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        local = ids - first
        inside = (local >= 0) & (local < len(weight))
        return F.embedding(local.clamp(0, len(weight) - 1), weight) * inside[:, None].to(weight.dtype)


class BiasForgotten(TorchOpsBody):
    """linear without its bias"""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return F.linear(x, packed.weight)


class NarrowSums(TorchOpsBody):
    """sums of products are rounded to the activations' dtype on the way"""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        out = torch.zeros(len(x), len(packed.weight), dtype=x.dtype)
        for start in range(0, x.shape[1], 2):
            part = slice(start, start + 2)
            out = out + F.linear(x[:, part], packed.weight[:, part])
        return out if packed.bias is None else out + packed.bias


class TailDropped(TorchOpsBody):
    """columns that fill no register of 16 are left out"""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        whole = max(1, x.shape[1] // 16 * 16)
        return F.linear(x[:, :whole], packed.weight[:, :whole], packed.bias)


class IgnoresStrides(TorchOpsBody):
    """rows are taken to lie one after the other"""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return super().linear(x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()), packed)


class PaddingForgotten(TorchOpsBody):
    """the slot mapping of padding is the last row's"""

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        super().prepare_inputs(tables, inputs)
        real = int(inputs.query_start_loc[-1])
        for mapping in inputs.slot_mappings:
            mapping[real:] = mapping[real - 1]


class OneBlockSize(TorchOpsBody):
    """every KV table is taken to have the first one's tokens per block"""

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        super().prepare_inputs(tables._replace(tokens_per_block=(tables.tokens_per_block[0],) * 2), inputs)


class PromptCounts(TorchOpsBody):
    """frequency and presence count the prompt too"""

    def penalties(
        self, logits: Any, rows: Any, tokens: Any, num_prompt: Any, num_tokens: Any, presence: Any, frequency: Any,
        repetition: Any,
    ) -> None:  # fmt: skip
        none = torch.zeros_like(num_prompt)
        super().penalties(logits, rows, tokens, none, num_tokens, presence, frequency, repetition)


class DividesAlways(TorchOpsBody):
    """repetition divides negative logits as well"""

    def penalties(
        self, logits: Any, rows: Any, tokens: Any, num_prompt: Any, num_tokens: Any, presence: Any, frequency: Any,
        repetition: Any,
    ) -> None:  # fmt: skip
        for i, row in enumerate(rows.tolist()):
            logits[row, tokens[i, : num_tokens[i]].long().unique()] /= repetition[i]
        one = torch.ones_like(repetition)
        super().penalties(logits, rows, tokens, num_prompt, num_tokens, presence, frequency, one)


class BitsBackwards(TorchOpsBody):
    """the mask's bits are read from the other end"""

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        place = torch.arange(32, dtype=torch.int32)
        turned = (((bits.unsqueeze(2) >> place) & 1).flip(2).long() << place).sum(2)
        super().apply_bitmask(logits, rows, (turned - (turned >> 31 << 32)).int())


class StuckRows(TorchOpsBody):
    """a row that its mask leaves nothing stays all -inf"""

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        allowed = (bits.unsqueeze(2) >> torch.arange(32, dtype=torch.int32)) & 1
        logits[rows] = logits[rows].masked_fill(allowed.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


class WrongStream(TorchOpsBody):
    """tokens are drawn with the numbers of the position after"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return super().sample(logits, rows._replace(position=rows.position + 1))


class HalfASeed(TorchOpsBody):
    """the upper half of the seed is ignored"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return super().sample(logits, rows._replace(seed=rows.seed & 0xFFFFFFFF))


class SharedNumber(TorchOpsBody):
    """all rows of a batch draw with the first one's number"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return super().sample(logits, rows._replace(seed=rows.seed[:1].expand_as(rows.seed)))


class TieToLast(TorchOpsBody):
    """greedy takes the highest id among equals"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        last = logits.shape[1] - 1 - torch.argmax(logits.flip(1), dim=-1)
        return torch.where(rows.temperature > 0, super().sample(logits, rows), last.int())


class TopKExactly(TorchOpsBody):
    """top_k drops what equals the k-th"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        logits = logits.clone()
        for i, k in enumerate(rows.top_k.tolist()):
            if 0 < k < logits.shape[1]:
                order = torch.sort(logits[i], descending=True, stable=True).indices
                logits[i, order[k:]] = -torch.inf
        return super().sample(logits, rows)


class TopPOneShort(TorchOpsBody):
    """top_p leaves out the token that reaches it"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        logits = logits.clone()
        for i, top_p in enumerate(rows.top_p.tolist()):
            if top_p < 1 and rows.temperature[i] > 0:
                p, order = torch.sort(torch.softmax(logits[i] / rows.temperature[i], 0), descending=True, stable=True)
                keep = max(1, int((p.cumsum(0) < top_p).sum()))
                logits[i, order[keep:]] = -torch.inf
        return super().sample(logits, rows._replace(top_p=torch.ones_like(rows.top_p)))


class MinPOfAll(TorchOpsBody):
    """min_p is compared with the probability itself, not with its share of the largest"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        p = torch.softmax(logits / rows.temperature.clamp(min=1e-6).unsqueeze(1), -1)
        drop = (p < rows.min_p.unsqueeze(1)) & (p < p.amax(-1, keepdim=True))
        return super().sample(logits.masked_fill(drop, -torch.inf), rows._replace(min_p=torch.zeros_like(rows.min_p)))


class WarmsLate(TorchOpsBody):
    """filters look at probabilities before the temperature"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        cold = SamplingRows(torch.ones_like(rows.temperature), *rows[1:])
        dropped = (kept_weights(logits, cold) == 0) & (rows.temperature > 0).unsqueeze(1)
        free = rows._replace(
            top_k=torch.zeros_like(rows.top_k), top_p=torch.ones_like(rows.top_p), min_p=torch.zeros_like(rows.min_p)
        )
        return super().sample(logits.masked_fill(dropped, -torch.inf), free)


class SpoiltBatch(TorchOpsBody):
    """a row that is not a number spoils the others"""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return super().sample(logits + 0 * logits.sum(), rows).clamp(0, logits.shape[1] - 1)


class RankWithEquals(TorchOpsBody):
    """ranks count equal logits as larger"""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Any:
        chosen, _, ids, values = super().logprobs(logits, tokens, k)
        return chosen, (logits >= logits.gather(1, tokens.long()[:, None])).sum(-1).int(), ids, values


class CountsOnlyKept(TorchOpsBody):
    """a row gives the drafts that were kept, without the token after them"""

    def verify(self, tokens: torch.Tensor, drafts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return (super().verify(tokens, drafts, start) - 1).clamp(min=1)


class TreeParentOffByOne(TorchOpsBody):
    """drafts of a tree are taken to follow the position behind their parent"""

    def verify_tree(self, tokens: Any, drafts: Any, parents: torch.Tensor, start: Any, depth: int) -> Any:
        behind = torch.minimum(parents + 1, torch.arange(len(parents), device=parents.device) - 1)
        return super().verify_tree(tokens, drafts, torch.where(parents < 0, parents, behind), start, depth)


class TakesTheLastBranch(TorchOpsBody):
    """of drafts that follow one token and are alike, the last is gone on to"""

    def verify_tree(self, tokens: Any, drafts: Any, parents: torch.Tensor, start: torch.Tensor, depth: int) -> Any:
        counts, paths = torch.ones(len(start) - 1, dtype=torch.int32), start[:-1, None].repeat(1, depth + 1)
        for row, path in enumerate(paths):
            for step in range(depth):
                follow = torch.nonzero((parents == path[step]) & (drafts == tokens[path[step]])).flatten()
                if not len(follow):
                    break
                path[step + 1 :] = follow[-1]
                counts[row] += 1
        return counts, paths


class KeepsEverything(TorchOpsBody):
    """every draft is kept"""

    def reject(self, logits: Any, rows: SamplingRows, drafts: Any, draft_probs: Any) -> torch.Tensor:
        return torch.where(drafts >= 0, drafts, Drawing().sample(logits, rows))


class UnnormalisedDraft(TorchOpsBody):
    """drafts' probabilities are doubled before they are compared"""

    def reject(self, logits: Any, rows: SamplingRows, drafts: Any, draft_probs: Any) -> torch.Tensor:
        return super().reject(logits, rows, drafts, None if draft_probs is None else draft_probs * 2)


class NoResidual(TorchOpsBody):
    """a draft that is not kept is replaced by a draw from the target, not from the residual"""

    def reject(self, logits: Any, rows: SamplingRows, drafts: Any, draft_probs: Any) -> torch.Tensor:
        found = super().reject(logits, rows, drafts, draft_probs)
        other = Drawing().sample(logits, rows._replace(position=rows.position + 1000))
        return torch.where((drafts >= 0) & (found != drafts) & (rows.temperature > 0), other, found)


class CertainAlways(TorchOpsBody):
    """drafts are taken to be certain, whatever their probabilities"""

    def reject(self, logits: Any, rows: SamplingRows, drafts: Any, draft_probs: Any) -> torch.Tensor:
        return super().reject(logits, rows, drafts, None)


class _Site:
    """A layer's states as a mutant sees them: what it does not say otherwise is the site's."""

    def __init__(self, site: Any) -> None:
        self._site = site
        self.pool = site.pool
        self.batch = site.batch

    def load(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._site.load(name)
        return found

    def save(self, name: str, states: torch.Tensor) -> None:
        self._site.save(name, states)


class GoesOnWithAnother(StateOpsBody):
    """a sequence that begins goes on with what lies in the pool's last page"""

    class Site(_Site):
        def load(self, name: str) -> torch.Tensor:
            return self.pool[name][self.batch.read]

    def selective_scan(self, *inputs: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        return super().selective_scan(*inputs[:-2], self.Site(inputs[-2]), inputs[-1])


class DraftsLost(StateOpsBody):
    """after drafts the row's last state is kept for each of them"""

    class Site(_Site):
        def save(self, name: str, states: torch.Tensor) -> None:
            count = len(self.batch.write)
            super().save(name, torch.cat([states[:count], states[-1:].expand_as(states[count:])]))

    def gated_delta(self, *inputs: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        return super().gated_delta(*inputs[:-2], self.Site(inputs[-2]), inputs[-1])


class LeavesOutputs(StateOpsBody):
    """a convolution's state is of what it gave, and not of what it read"""

    class Site(_Site):
        def save(self, name: str, states: torch.Tensor) -> None:
            super().save(name, F.silu(states))

    def causal_conv(self, x: Any, weight: Any, bias: Any, site: Any, name: str) -> torch.Tensor:
        """As it is defined, but for the fault."""
        return super().causal_conv(x, weight, bias, self.Site(site), name)


class StepsWithoutLimits(StateOpsBody):
    """steps are not held between their limits"""

    def ssd(self, *inputs: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        return super().ssd(*inputs[:7], (0.0, float("inf")), *inputs[8:])


class GroupsByTurns(StateOpsBody):
    """heads take groups by turns, and not one after the other"""

    def ssd(self, x: Any, dt: Any, a: Any, b: Any, c: Any, *more: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        turns = x.shape[1] // b.shape[1]
        return super().ssd(x, dt, a, b.repeat(1, turns, 1), c.repeat(1, turns, 1), *more)


class NormOfTheRank(StateOpsBody):
    """over ranks, each norms its own part"""

    def gated_norm(self, *inputs: Any, **more: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        more.pop("ranks", None)
        return super().gated_norm(*inputs[:4], min(inputs[4], inputs[0].shape[1]), None, *inputs[6:], **more)


class JoinsByTurns(StateOpsBody):
    """parts are taken apart in the order of memory"""

    def join(self, parts: Any) -> torch.Tensor:
        """As it is defined, but for the fault."""
        return torch.cat([part.transpose(1, -1).flatten(1) for part in parts], dim=-1)


class Around(OpsAround, OpsConformance):
    """The suite of drivers whose matrices take in what lies around them."""


class PlainAround(NamedTuple):
    """A matrix that does so by the reference's operations."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def fits(self, rows: int, normed: bool) -> bool:
        return rows < 3

    def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
        ops: Any = TorchOpsBody(None)  # type: ignore[arg-type]
        y = ops.linear(ops.rms_norm(x, norm, eps), self)
        return ops.silu_mul(y) if gated else y

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + residual


class GatesBehindTheMatrix(TorchOpsBody):
    """a matrix that takes in the activation multiplies neighbours, not halves"""

    class Matrix(PlainAround):
        def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
            y = super().normed(x, norm, eps, False)
            return F.silu(y[:, ::2]) * y[:, 1::2] if gated else y

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return self.Matrix(weight, bias)


class BiasBehindTheSum(GatesBehindTheMatrix):
    """a matrix that takes in the sum forgets its bias"""

    class Matrix(PlainAround):
        def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight) + residual


class AddsIntoTheResidual(GatesBehindTheMatrix):
    """a matrix that takes in the sum writes it into the residual"""

    class Matrix(PlainAround):
        def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return residual.add_(F.linear(x, self.weight, self.bias))


class NormsWithoutEpsAround(GatesBehindTheMatrix):
    """a matrix that takes in the norm leaves out its eps"""

    class Matrix(PlainAround):
        def normed(self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool) -> torch.Tensor:
            return super().normed(x, norm, 0.0, gated)


class NobodyIsTheLast(MoeOpsBody):
    """what other ranks compute goes to the last expert that is here"""

    def experts(self, x: torch.Tensor, packed: Any, ids: torch.Tensor, weights: torch.Tensor, act: Any) -> torch.Tensor:
        return super().experts(x, packed, ids.clamp(max=len(packed.first) - 1), weights, act)


class TakesNoTurns(MoeOpsBody):
    """the first copy of an expert gets all of its tokens"""

    def place_experts(self, ids: torch.Tensor, table: torch.Tensor, first: int, load: torch.Tensor) -> torch.Tensor:
        return super().place_experts(ids, table[:, :1], first, load)


class CountsOverAgain(MoeOpsBody):
    """the tokens of the last step are counted, and those before it forgotten"""

    def place_experts(self, ids: torch.Tensor, table: torch.Tensor, first: int, load: torch.Tensor) -> torch.Tensor:
        load.zero_()
        return super().place_experts(ids, table, first, load)


EXPERT_MUTANTS = [NobodyIsTheLast, TakesNoTurns, CountsOverAgain]
AROUND_MUTANTS = [GatesBehindTheMatrix, BiasBehindTheSum, AddsIntoTheResidual, NormsWithoutEpsAround]
STATE_MUTANTS = [
    GoesOnWithAnother, DraftsLost, LeavesOutputs, StepsWithoutLimits, GroupsByTurns, NormOfTheRank, JoinsByTurns,
]  # fmt: skip
MUTANTS = [
    NormWithoutEps, NormOfOneRow, NormInOwnDtype, NormOfTheFirst, SampleVariance, InfinityIsBroken,
    DrawsUnchecked, BrokenStays, RopeInterleaved, RopeBackwards, RopeByPlace, RotatesBeforeNorm, OneNormForBoth,
    NormsTheWholeRow,
    GatesWrongHalf, SiluOverflows, GatesByUp, ReluUnsquared, GeluByTanh, CapForgotten, MasksByProduct, BiasForgotten,
    NarrowSums, TailDropped,
    IgnoresStrides, PaddingForgotten, OneBlockSize, PromptCounts, DividesAlways, BitsBackwards, StuckRows, WrongStream,
    HalfASeed, SharedNumber, TieToLast, TopKExactly, TopPOneShort, MinPOfAll, WarmsLate, SpoiltBatch, RankWithEquals,
    CountsOnlyKept, TreeParentOffByOne, TakesTheLastBranch, KeepsEverything, UnnormalisedDraft, NoResidual,
    CertainAlways, *STATE_MUTANTS, *EXPERT_MUTANTS, *AROUND_MUTANTS,
]  # fmt: skip

plain = [mutant for mutant in MUTANTS if mutant not in (*STATE_MUTANTS, *EXPERT_MUTANTS, *AROUND_MUTANTS)]
globals().update(suites_of(OpsConformance, "torch", plain) | suites_of(OpsConformance, "states", STATE_MUTANTS))
globals().update(suites_of(OpsConformance, "moe", EXPERT_MUTANTS) | suites_of(Around, "torch", AROUND_MUTANTS))

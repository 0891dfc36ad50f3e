"""Point `ops`: the operations that models, the runner and the sampler compute with, beside attention.

A driver provides some of `OPERATIONS`; each operation is taken from the first driver that is fit for it, once, at
start. The reference driver provides them all and defines their meaning. There may be others: an operation exists where
a driver's card `defines` it, whose body is then what faster drivers of it are held against, and is taken where the
model's card names it among its `operations`.

Minor version 2 added `gelu_mul` and `relu`, 3 `draw`.

Random numbers. Every number is f(seed, output position, purpose), so that a request draws the same tokens alone or
batched, in flight or not. The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) with

    key     = (seed & 0xffffffff, seed >> 32)                       seed: uint64
    counter = (position, purpose, 0, 0)                              position: of the token in the output, from 0
    uniform = ((x0 >> 5) * 2**26 + (x1 >> 6)) / 2**53                from output words x0, x1: in [0, 1), 53 bits

`engine_kit.philox` computes it with numpy for tests and for drivers to compare with.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.interfaces.platform import STREAM
from engine.plugin import Card

if TYPE_CHECKING:
    import torch

PURPOSE_SAMPLE = 0
"""The draw of a token from the target's distribution."""
PURPOSE_ACCEPT = 1
"""Rejection sampling: whether a draft is kept."""
PURPOSE_RESIDUAL = 2
"""Rejection sampling: the draw from the residual that replaces a draft."""

OPERATIONS: tuple[str, ...] = (
    "embedding",
    "embedding_part",
    "gather_rows",
    "add",
    "scale",
    "soft_cap",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "rope",
    "qk_norm_rope",
    "silu_mul",
    "gelu_mul",
    "gelu",
    "relu",
    "pack_linear",
    "linear",
    "linear_heads",
    "check_logits",
    "prepare_inputs",
    "penalties",
    "mask_tokens",
    "apply_bitmask",
    "draw",
    "sample",
    "reject",
    "verify",
    "verify_tree",
    "place_tokens",
    "logprobs",
)
"""Every operation, by the name of its method in `Ops`. `pack_linear` and `linear` are taken from one driver."""

MODEL_OPERATIONS: tuple[str, ...] = (
    *("embedding", "embedding_part", "gather_rows", "add", "scale", "soft_cap"),
    *("rms_norm", "add_rms_norm", "layer_norm", "rope", "qk_norm_rope", "silu_mul", "gelu", "linear"),
)
"""Those that a model's forward pass and its logits are made of: what is captured of a step."""

FURTHER_OPERATIONS: tuple[str, ...] = ("gelu_mul", "relu", "linear_heads")
"""Those that only some models call, beside `MODEL_OPERATIONS`: their cards name them."""


@dataclass(frozen=True, kw_only=True)
class OpsNeed:
    """What the engine asks of one operation.

    Args:
        operation: one of `OPERATIONS`, or one that a driver's card defines.
        dtype: of activations, e.g. "bfloat16".
        device: torch's device string.
        framework: "torch" or "jax".
        batch_invariant: a row's results have to have the same bits in every batch, see `engine.plugin.Card`.
    """

    operation: str
    dtype: str
    device: str
    framework: str = "torch"
    batch_invariant: bool = False


def ops_needs(called: Collection[str], **facts: Any) -> dict[str, OpsNeed]:
    """What is asked of each operation that the runner, the sampler and the model call.

    Args:
        called: by the model, as its card says.
        facts: the other attributes of `OpsNeed`.
    """
    common = [name for name in OPERATIONS if name not in FURTHER_OPERATIONS or name in called]
    return {name: OpsNeed(operation=name, **facts) for name in dict.fromkeys((*common, *sorted(called)))}


class OpsCard(Card):
    """Describes a set of operations.

    Attributes:
        operations: those that it provides.
        defines: those of them that are none of `OPERATIONS`, and whose meaning its own body is. Where a model calls
            what two define, the start fails until the user names one.
        captured_by: the recorders (`engine.interfaces.platform.PlatformCard.recorder`) that see all that operations
            called by models launch on decode steps. Steps are captured only where the driver of every operation that
            the model calls names the platform's recorder.
    """

    operations: frozenset[str] = frozenset()
    defines: frozenset[str] = frozenset()
    captured_by: frozenset[str] = STREAM


class StepTables(NamedTuple):
    """The state that lies on the device for each slot; row `max_num_seqs` is the padding rows' scratch slot.

    Args:
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the ids of each slot's tokens.
        blocks: for each KV table int32 [max_num_seqs + 1, max_blocks]; its block tables.
        tokens_per_block: for each KV table.
    """

    tokens: torch.Tensor
    blocks: tuple[torch.Tensor, ...]
    tokens_per_block: tuple[int, ...]


class StepInputs(NamedTuple):
    """The inputs of one step, in fixed buffers cut to R rows and T tokens (both padded to the bucket).

    Args:
        slot_of_row: int32 [R].
        num_computed: int32 [R].
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R]; num_computed + num_tokens.
        token_ids: int32 [T]; filled by `prepare_inputs`, as are those below.
        positions: int64 [T].
        block_tables: for each table int32 [R, max_blocks], in row order; of each row the entries of its blocks, the
            others may be what a step before left.
        slot_mappings: for each table int64 [T]: page * tokens_per_block + offset in the page.
    """

    slot_of_row: torch.Tensor
    num_computed: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]


class SamplingRows(NamedTuple):
    """Sampling parameters of R rows, as device tensors.

    Args:
        temperature: float32 [R]; 0 is greedy.
        top_k: int32 [R]; 0 keeps all.
        top_p, min_p: float32 [R].
        seed: int64 [R]; the bits of the uint64.
        position: int64 [R]; of the token to draw in the output, from 0.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


class Ops(Protocol):
    """The operations at work. T tokens, H hidden size, V vocabulary, R rows. Nothing is modified unless said so.

    A driver's body has the methods that its card names, and is built with a `WorkerContext`, which names this class;
    the engine sees one object with all of them.
    """

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int [T], weight [V, H] -> [T, H]."""

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        """ids int [T], weight [V', H] -> [T, H], where the weight holds the vocabulary's rows from `first` on.

        An id outside first .. first + V' - 1 gives zeros.
        """

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [T, H], index int [R] -> [R, H]."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a + b, equal shapes."""

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x * factor."""

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] / sqrt(mean(x^2) + eps) * weight [H]; the mean in float32 at least (Zhang, Sennrich 2019)."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual). A driver may write both into its inputs' memory."""

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; x [..., H], weight and bias [H].

        Mean and (biased) variance in float32 at least (Ba, Kiros, Hinton 2016).
        """

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first `rotary_dim` elements of each head, in two halves (Su et al. 2021, GPT-NeoX's form).

        q [T, Hq, D], k [T, Hkv, D], positions int64 [T], cos_sin [max_position, rotary_dim] (cosines, then sines) in
        float32 or float64. A driver may rotate in place.
        """

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """rope(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), positions, cos_sin): what models that norm each
        head of queries and keys (Qwen3) do between the projection and the attention.

        q [T, Hq, D], k [T, Hkv, D], q_weight, k_weight [D]; the others are `rope`'s. A driver may do it in place.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""

    def gelu_mul(self, gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
        """gate_up [T, 2 * I] -> gelu(gate, tanh) * up, [T, I]; rounded once (GEGLU, Shazeer 2020)."""

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        """x * Phi(x), with the normal distribution's Phi; with `tanh` by its approximation (Hendrycks, Gimpel 2016)."""

    def relu(self, x: torch.Tensor, squared: bool) -> torch.Tensor:
        """max(x, 0); with `squared` its square (So et al. 2021)."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """weight [O, I], bias [O] -> what `linear` of the same driver takes; once, after loading.

        That may be an `engine_kit.few_rows.AroundMatrix`, which layers then use where a step has few rows.
        """

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""

    def linear_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Each head by a matrix of its own: out[t, h] = weight[h] @ x[t, h].

        x [T, H, I], weight [H, O, I] -> [T, H, O], a tensor of its own. Both may be views of any strides: heads of a
        wider projection, matrices that are transposed.
        """

    def check_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the logits in float32 at least, which rows of them hold a NaN): logits [R, V] -> [R, V], bool [R].

        Logits of float32 and float64 are given back themselves, others as a new tensor.
        """

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        """Fill `token_ids`, `positions`, `block_tables` and `slot_mappings` from the tables, in place.

        Where R is T every row has one token. Tokens at or past query_start_loc[R] are padding: id 0, position 0, slot 0
        of the null page. The last rows of a captured step may have none.
        """

    def penalties(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_prompt: torch.Tensor,
        num_tokens: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        """Apply penalties to `logits[rows]` in place.

        logits [R, V]; rows int64 [m]; tokens int32 [m, L], row i's ids of which the first num_tokens[i] count and the
        first num_prompt[i] are prompt; presence, frequency, repetition float32 [m]. Repetition (prompt and output)
        comes first, then frequency and presence (output only), as OpenAI's and CTRL's definitions have it.
        """

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Set logits[rows[i], tokens[i]] to -inf, in place. rows, tokens int64 [m]."""

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is 0.

        A row that is left without a finite logit gets 0 at the ids that its mask forbids: one of them is then drawn,
        by which the core sees that nothing was left, and ends the request with an error.

        logits [R, V]; rows int64 [m]; bits int32 [m, ceil(V / 32)], whose bits past V are not read.
        """

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits that nothing edits or reports, [R, V] as the model leaves them: what `sample` draws from those that
        `check_logits` gives, and which rows hold a NaN: int32 [R], bool [R]."""

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Draw one token for each row: int32 [R].

        logits [R, V] float32 or float64. temperature 0: the most likely token, the lowest id among equals. Otherwise
        p = softmax(logits / temperature); drop p < min_p * max(p); keep the top_k most likely (those equal to the
        k-th stay); of these, renormalised and sorted by falling probability, lower ids first among equals, keep the
        shortest prefix that reaches top_p, at least one. The token is the first in order of id at which the running
        sum of the kept probabilities exceeds u * their sum, with u = philox(seed, position, PURPOSE_SAMPLE). A row with
        a NaN among its logits, or nothing but -inf, gives any token of the vocabulary; nobody will see it.
        """

    def reject(
        self, logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> torch.Tensor:
        """As `sample`, but a row with a draft gives the draft, or a token that replaces it: int32 [R].

        Rejection sampling (Leviathan et al., ICML 2023; Chen et al. 2023), so that the token has the distribution that
        `sample` draws from, whatever the draft's was. With p that distribution (temperature, min_p, top_k and top_p
        applied; at temperature 0 all of it on the most likely token) and q the draft's: the draft d is given where
        philox(seed, position, PURPOSE_ACCEPT) * q(d) < p(d). Otherwise the token is drawn from max(p - q, 0), which has
        no d, with philox(seed, position, PURPOSE_RESIDUAL) as `sample` draws.

        logits [R, V] float32 or float64; drafts int32 [R], -1 where a row has none (it is then drawn as by `sample`);
        draft_probs: q, float [R, V], rows without a draft not read; None: q is 1 at the draft.
        """

    def verify(self, tokens: torch.Tensor, drafts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """How many tokens each row gives: int32 [R], at least 1.

        tokens int32 [n]; what was drawn at each position. drafts int32 [n]; the draft that was computed at the next
        position, -1 at each row's last. start int64 [R + 1]; row r's positions are start[r] .. start[r + 1] - 1. A row
        gives its tokens up to and with the first that is not the draft after it.
        """

    def verify_tree(
        self, tokens: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, start: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The path of each row through its tree of drafts that agrees with what was drawn.

        Where drafts are certain and those that follow one token differ, drawing from the target at each node and going
        on to the draft that was drawn is rejection sampling over all of them (SpecInfer, Miao et al. 2024, with q = 1).

        tokens int32 [n]; what was drawn at each position. drafts int32 [n]; the draft that was computed there, not read
        at each row's first. parents int64 [n]; the position, of all n, that each follows: one of its row before it, -1
        at each row's first. start int64 [R + 1], as in `verify`. depth: the most drafts that follow one another.

        Returns (counts int32 [R], path int64 [R, depth + 1]): from its first position a row goes on to the first of
        those that follow and whose draft is the token drawn, as long as there is one. counts says how many positions
        that are, path which; past its count it repeats the last.
        """

    def place_tokens(
        self, tokens: torch.Tensor, broken: torch.Tensor, table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """Write drawn tokens int32 [R] where the next step reads them, table[slot[i], place[i]], and give them back as
        the host is to see them: a new tensor int32 [R], with `engine.types.plan.BROKEN` where broken[i].

        table int32 [slots, L]; slot, place int64 [R]; of a place that is there twice any; broken bool [R].
        """

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities under softmax(logits).

        logits [m, V], tokens int [m] -> (chosen float32 [m], rank int32 [m], top_ids int32 [m, k], top_values
        float32 [m, k]); rank counts the tokens with a larger logit, plus 1.
        """

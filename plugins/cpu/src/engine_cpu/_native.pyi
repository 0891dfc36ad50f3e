"""The native module, as Python sees it. Addresses are `Tensor.data_ptr()`; sizes are in bytes unless said so."""

from collections.abc import Sequence
from typing import Self

class Tape:
    """Native calls, recorded once and run again without Python. `with tape:` records what this thread computes.

    Every call of this module that computes runs at once as ever, and is kept as well; its addresses must stay valid.
    """

    def __init__(self, rows: int = 0) -> None:
        """rows: of what is recorded, so that fewer can be replayed."""

    def __enter__(self) -> Self:
        """Raises RuntimeError where a tape records on this thread already, and where this one has recorded."""

    def __exit__(self, *error: object) -> None: ...
    def replay(self, rows: int = 0) -> None:
        """Run the calls in order, for the first `rows` rows (0: for all), without the GIL. What one raises ends it.

        Raises RuntimeError while it records, ValueError where it has not so many rows.
        """

    def __len__(self) -> int:
        """How many calls there are."""

    @property
    def names(self) -> list[str]:
        """What they are, for people."""

def levels() -> list[str]:
    """The levels of processor features that are compiled in and run here, lowest first."""

def sum(level: str, dtype: int, out: int, sources: Sequence[int], count: int) -> None:
    """out[i] = sources[0][i] + sources[1][i] + ..., `count` elements of a dtype (`engine_cpu.dtypes`)."""

def shm_bytes(size: int) -> int:
    """Shared memory that a group of `size` ranks needs."""

class ShmGroup:
    """Collectives over shared memory. Calls raise RuntimeError where a rank has gone."""

    def __init__(
        self, memory: int, rank: int, size: int, peers: Sequence[int], timeout: float, level: str = "auto"
    ) -> None:
        """memory: a descriptor, not kept. peers: by rank a descriptor that hangs up with it, -1 for ours; owned."""

    def barrier(self) -> None: ...
    def all_reduce(self, x: int, count: int, dtype: int) -> None: ...
    def all_gather(self, x: int, out: int, outer: int, inner: int, lengths: Sequence[int]) -> None: ...
    def reduce_scatter(self, x: int, out: int, outer: int, inner: int, lengths: Sequence[int], dtype: int) -> None: ...
    def all_to_all(self, x: int, out: int, send: Sequence[int], recv: Sequence[int]) -> None: ...
    def broadcast(self, x: int, size: int, root: int) -> None: ...
    def send(self, x: int, size: int, to: int) -> None: ...
    def recv(self, x: int, size: int, source: int) -> None: ...
    def close(self) -> None: ...

def keep_freed_memory() -> bool:
    """Let the process keep up to 512 MiB that are freed, for its next steps; whether the C library does (GNU's)."""

class Ops:
    """Kernels of one level, in float32 and bfloat16. Strides and sizes count elements; see native/kernels.h."""

    def __init__(self, level: str, threads: int) -> None:
        """level: one of `levels()`, or "auto" for the highest. Raises ValueError."""

    def norm(
        self,
        dtype: int,
        x: int,
        row_stride: int,
        head_stride: int,
        rows: int,
        heads: int,
        size: int,
        weight: int,
        out: int,
        eps: float,
    ) -> None: ...
    def add_norm(self, dtype: int, x: int, residual: int, rows: int, size: int, weight: int, eps: float) -> None: ...
    def rope(
        self,
        dtype: int,
        x: int,
        row_stride: int,
        head_stride: int,
        rows: int,
        heads: int,
        rotary_dim: int,
        positions: int,
        cos_sin: int,
    ) -> None: ...
    def silu_mul(self, dtype: int, gate_up: int, row_stride: int, rows: int, size: int, out: int) -> None: ...
    def elementwise(self, dtype: int, what: int, x: int, y: int, factor: float, count: int, out: int) -> None:
        """what: see native/elementwise.h. y: 0 where there is none."""

    def check_logits(self, dtype: int, x: int, row_stride: int, rows: int, size: int, out: int, broken: int) -> None:
        """out: float32 [rows, size], or 0 where no copy is wanted. broken: bool [rows]."""

    def layer_norm(
        self, dtype: int, x: int, rows: int, size: int, weight: int, bias: int, out: int, eps: float
    ) -> None: ...

class StatePlaces:
    """Where a step's rows find and leave one state, by addresses: native/states.h."""

def state_places(
    pool: int,
    pool_stride: int,
    read: int,
    rows: int,
    query_start_loc: int,
    kept: int,
    kept_stride: int,
    kept_at: int,
    kept_to: int,
    count: int,
) -> StatePlaces: ...

class StateKernels:
    """Kernels of one level for layers that keep states, in float32 and bfloat16: native/states.h."""

    def __init__(self, level: str, threads: int) -> None:
        """level: one of `levels()`, or "auto" for the highest. Raises ValueError."""

    def causal_conv(self, dtype: int, *places: int | StatePlaces) -> None: ...
    def ssd(self, dtype: int, *places: float | StatePlaces) -> None: ...
    def selective_scan(self, dtype: int, *places: int | StatePlaces) -> None: ...
    def gated_delta(self, dtype: int, *places: int | StatePlaces) -> None: ...
    def gated_norm(
        self,
        dtype: int,
        x: int,
        x_stride: int,
        gate: int,
        gate_stride: int,
        rows: int,
        channels: int,
        size: int,
        weight: int,
        eps: float,
        gate_last: bool,
        given: bool,
        squares: int,
        out: int,
    ) -> None: ...
    def gate_by(
        self, dtype: int, what: int, x: int, x_stride: int, gate: int, gate_stride: int, rows: int, size: int, out: int
    ) -> None: ...
    def copy(
        self, x: int, row_stride: int, stride: int, rows: int, parts: int, part_bytes: int, out: int, out_stride: int
    ) -> None:
        """Strides in bytes."""

def gather_rows(
    threads: int,
    x: int,
    stride: int,
    rows: int,
    row_bytes: int,
    index: int,
    wide: bool,
    count: int,
    first: int,
    part: bool,
    out: int,
) -> None:
    """out [count, row_bytes] = x[index[i] - first], of `rows` that lie `stride` bytes apart.

    wide: indices are int64, not int32. part: an index outside gives zeros; else it raises IndexError.
    """

def prepare_inputs(
    tokens: int,
    tokens_stride: int,
    rows: int,
    num_tokens: int,
    slot_of_row: int,
    num_computed: int,
    query_start_loc: int,
    token_ids: int,
    positions: int,
    groups: Sequence[tuple[int, int, int, int, int, int, int]],
) -> None:
    """See `engine.interfaces.ops.Ops`. Strides count elements. Of each group: the slots' block table, its stride and
    width, tokens of a block, the rows' block table, its stride, and their slot mapping."""

def experts_scratch_bytes(first: Layout, last: Layout, experts: int, rows: int, per_token: int, dtype: int) -> int:
    """Of the memory that `ExpertOps.experts` computes in."""

class LoraOps:
    """Kernels of one level for adapters, see native/lora.h. Strides and sizes count elements."""

    def __init__(self, level: str, threads: int) -> None:
        """level: one of `levels()`, or "auto" for the highest. Raises ValueError."""

    def add(
        self,
        dtype: int,
        x: int,
        x_stride: int,
        inputs: int,
        y: int,
        y_stride: int,
        table: int,
        outputs: int,
        places: int,
        parts: int,
        tokens: int,
        starts: int,
        inner: int,
        most_rank: int,
    ) -> None:
        """table: int64 [places + 1, 2 + 3 * parts]; outputs: int64 [parts]; tokens, starts: int32; y is changed."""

class ExpertOps:
    """Kernels of one level for mixtures of experts, see native/experts.h. Strides and sizes count elements."""

    def __init__(self, level: str, threads: int) -> None:
        """level: one of `levels()`, or "auto" for the highest. Raises ValueError."""

    def router_logits(
        self, dtype: int, x: int, x_stride: int, rows: int, size: int, experts: int, weight: int, out: int
    ) -> None:
        """weight: float32 [experts, size]. out: float32 [rows, experts]."""

    def route(
        self,
        logits: int,
        rows: int,
        experts: int,
        bias: int,
        top_k: int,
        groups: int,
        top_groups: int,
        sigmoid: bool,
        renormalise: bool,
        pairs: bool,
        one_by_one: bool,
        biased_logits: bool,
        scale: float,
        jitter: float,
        ids: int,
        weights: int,
    ) -> None:
        """logits: float32 [rows, experts]; bias: likewise [experts], or 0. ids int32, weights float32 [rows, top_k]."""

    def gated_act(
        self,
        dtype: int,
        act: int,
        gated: bool,
        alpha: float,
        limit: float,
        x: int,
        x_stride: int,
        rows: int,
        size: int,
        out: int,
    ) -> None: ...
    def place_experts(
        self,
        ids: int,
        rows: int,
        per_token: int,
        table: int,
        experts: int,
        replicas: int,
        first: int,
        count: int,
        load: int,
        out: int,
    ) -> None: ...
    def row_gate(
        self, dtype: int, x: int, x_stride: int, gate: int, gate_stride: int, rows: int, size: int, out: int
    ) -> None: ...
    def experts(
        self,
        dtype: int,
        first: Layout,
        last: Layout,
        table: int,
        experts: int,
        act: int,
        gated: bool,
        alpha: float,
        limit: float,
        x: int,
        x_stride: int,
        rows: int,
        per_token: int,
        ids: int,
        weights: int,
        out: int,
        scratch: int,
    ) -> None:
        """table: int64 [8, experts]; addresses of weights, scales, biases and orders of the first projections, then of
        the last ones, 0 where there are none. Raises IndexError for an id that is no expert's."""

def place_tokens(
    tokens: int, broken: int, count: int, table: int, stride: int, slot: int, place: int, mark: int, out: int
) -> None:
    """See `engine.interfaces.ops.Ops`; `mark` is what `out` holds where a row is broken."""

def regions(threads: int, count: int, total: int, piece: int, fails_at: int = -1) -> tuple[float, bool]:
    """Run `count` parallel regions over `total` indices in pieces, for tests and benchmarks.

    fails_at: the index that raises RuntimeError. Returns the seconds of each region, and whether each index was come by
    once in each.
    """

def pool_size() -> int:
    """How many threads the module has of its own."""

class PagedCache:
    """One layer's pages, in the layout of native/attention.h."""

    def __init__(self, dtype: int, base: int, page_stride: int, heads: int, size: int, block: int) -> None:
        """base: address of the first page; page_stride: bytes."""

class Attention:
    """Attention of layers of one form: kernels of one level, threads, and the memory that they compute in."""

    def __init__(self, level: str, threads: int, size: int, group: int, divides: bool = True) -> None:
        """size: of a head; group: query heads of a KV head; divides: whether the keys of rows with few queries may be
        divided among threads. Raises ValueError where there is no such level."""

    def write(
        self,
        dtype: int,
        k: int,
        k_stride: int,
        k_head_stride: int,
        v: int,
        v_stride: int,
        v_head_stride: int,
        slots: int,
        tokens: int,
        cache: PagedCache,
    ) -> None:
        """slots: int64 [tokens]."""

    def forward(
        self,
        dtype: int,
        q: int,
        q_stride: int,
        q_head_stride: int,
        out: int,
        lse: int,
        query_start_loc: int,
        block_table: int,
        table_stride: int,
        kv_index: int,
        rows: int,
        tokens: int,
        cache: PagedCache,
        scale: float,
        soft_cap: float,
        window: int,
        sinks: int,
        slopes: int,
        hidden: int = 0,
        biases: int = 0,
        span: int = 0,
    ) -> None:
        """lse, kv_index, sinks, slopes, hidden, biases: 0 for none; soft_cap, window: 0 for none."""

    @staticmethod
    def move(cache: PagedCache, source: int, destination: int, count: int) -> None:
        """source, destination: int64 [count]."""

def uniform(seed: int, position: int, purpose: int) -> float:
    """The engine's random number in [0, 1), see `engine.interfaces.ops`. seed: the bits of the uint64."""

class Sampling:
    """Kernels of one level, threads, and the memory that they compute in. Logits are [rows, vocab], float32 but for
    `sample`; strides count elements. Tensors have the dtypes of `engine.interfaces.ops`; indices are int64, counts
    int32."""

    def __init__(self, level: str, threads: int) -> None:
        """Raises ValueError where there is no such level."""

    def sample(
        self,
        dtype: int,
        logits: int,
        stride: int,
        rows: int,
        vocab: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        seed: int,
        position: int,
        out: int,
        broken: int,
    ) -> None: ...
    def logprobs(
        self,
        logits: int,
        stride: int,
        rows: int,
        vocab: int,
        tokens: int,
        k: int,
        chosen: int,
        rank: int,
        top_ids: int,
        top_values: int,
    ) -> None: ...
    def penalties(
        self,
        logits: int,
        stride: int,
        rows: int,
        vocab: int,
        row: int,
        count: int,
        tokens: int,
        tokens_stride: int,
        num_prompt: int,
        num_tokens: int,
        presence: int,
        frequency: int,
        repetition: int,
    ) -> None: ...
    def apply_bitmask(
        self, logits: int, stride: int, rows: int, vocab: int, row: int, count: int, bits: int, bits_stride: int
    ) -> None: ...

class Layout:
    """How a linear layer's packed weights lie; see native/layout.h."""

    def __init__(self, format: str, outputs: int, inputs: int, group_size: int = 0, scale: str = "float32") -> None:
        """format: "float32", "bfloat16", "float16", "int8", "int4"; of stored codes "codes4", "codes8", "values4",
        "values8"; or one of native/blocks.h, e.g. "q4_k". group_size: int4's and that of stored codes, whose scales are
        of dtype `scale`. Raises ValueError."""

    @property
    def panels(self) -> int:
        """Of 32 outputs each."""

    @property
    def bytes(self) -> int:
        """Of the packed weights."""

    def scratch_bytes(self, rows: int) -> int:
        """Memory that a product of so many rows needs beside them."""

    def pack(self, dtype: int, weight: int, stride: int, packed: int, scales: int, threads: int) -> None:
        """weight [outputs, inputs] of dtype, rows `stride` elements apart -> packed, and scales of int8 (else 0)."""

    def pack_blocks(self, weight: int, stride: int, packed: int, threads: int) -> None:
        """weight [outputs] rows of blocks, `stride` bytes apart -> packed. Raises ValueError where `inputs` are no
        whole blocks."""

    def pack_codes(self, codes: int, scales: int, zeros: int, packed: int, threads: int) -> None:
        """codes uint8 [outputs, inputs], scales and zeros (uint8) [outputs, groups], all dense -> packed. zeros of
        whole numbers, else 0; of int8 neither is read."""

def look_up(
    layout: Layout,
    dtype: int,
    weight: int,
    index: int,
    wide: bool,
    count: int,
    first: int,
    part: bool,
    out: int,
    threads: int,
) -> None:
    """out [count, inputs], of float32 or bfloat16, = rows index[i] - first of a packed layer of blocks or of floats.

    wide: indices are int64, not int32. part: an index outside gives zeros; else it raises IndexError. Raises ValueError
    for another format or dtype.
    """

class PackedOps:
    """Products with packed weights, at one level."""

    def __init__(self, level: str, threads: int) -> None:
        """level: one of `levels()`, or "auto" for the highest. Raises ValueError."""

    def linear(
        self,
        layout: Layout,
        dtype: int,
        x: int,
        x_stride: int,
        rows: int,
        weight: int,
        scales: int,
        bias: int,
        out: int,
        out_stride: int,
        scratch: int,
        order: int = 0,
    ) -> None:
        """out [rows, outputs] = x [rows, inputs] @ weight.T + bias; scales of int8, or the table of stored codes, bias
        float32, and the order of the inputs, int32; 0 for none."""

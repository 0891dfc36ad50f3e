"""What each implementation takes, as its source says, and which one serves a need."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interfaces.attention import AttentionNeed
from engine_flashattn.installed import Facts

DTYPES = ("bfloat16", "float16")
FEATURES = frozenset({"sinks", "alibi", "two_sided", "lse"})
KINDS = frozenset({"full", "sliding", "encoder"})
NO_BLOCK_TABLE = "this torch's varlen_attn takes no block table; torch 2.12's does"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One library, or one generation of it.

    Args:
        name: in `--attention.implementation`.
        title: for people.
        pip: the line that installs it; "" where it comes with torch.
        majors: of the compute capabilities that it has kernels for.
        kinds: of layers.
        page_multiple: pages hold a whole multiple of so many tokens.
        largest_head: elements of a head, a multiple of 8.
        few_heads: of the compute capabilities on which heads have 128 elements at most, or 256.
        soft_cap, alibi: whether it computes them.
        reads_past_end: it may read entries of the block table after a row's last page.
    """

    name: str
    title: str
    pip: str
    majors: frozenset[int]
    kinds: frozenset[str] = frozenset({"full", "sliding"})
    page_multiple: int = 1
    largest_head: int = 256
    few_heads: frozenset[int] = frozenset()
    soft_cap: bool = True
    alibi: bool = False
    reads_past_end: bool = False

    @property
    def module(self) -> str:
        """The module that binds it: it has `load()`."""
        return f"engine_flashattn.implementations.{self.name}"

    def gpu_reasons(self, facts: Facts) -> list[str]:
        """Why it has no kernels for this GPU; empty where it has, or where there is none."""
        major, minor = max(facts.capabilities, default=(0, 0))
        if not facts.capabilities or major in self.majors:
            return []
        wanted = ", ".join(f"{each}.x" for each in sorted(self.majors))
        return [f"it has kernels for compute capability {wanted}, not {major}.{minor}"]

    def reasons(self, need: AttentionNeed, facts: Facts) -> list[str]:
        """Why it cannot serve a need here; empty where it can."""
        if self.name not in facts.versions:
            return [f"it is not installed ({self.pip})" if self.pip else NO_BLOCK_TABLE]
        if not facts.capabilities:
            return machine_reasons(facts)
        found, major = self.gpu_reasons(facts), max(facts.capabilities)[0]
        if need.kind not in self.kinds:
            found.append(f"layers of kind '{need.kind}' are not served: a tile of values may reach into the next row")
        if need.head_size % 8 or need.head_size > self.largest_head:
            found.append(f"heads have a multiple of 8 elements, {self.largest_head} at most, not {need.head_size}")
        elif major in self.few_heads and need.head_size > 128 and need.head_size != 256:
            found.append(
                f"on {major}.x it has kernels for heads of up to 128 elements, and of 256, not {need.head_size}"
            )
        if need.soft_cap is not None and not self.soft_cap:
            found.append("it has no soft cap")
        if self is FA3:
            found.extend(_left_out(need, facts))
        if "alibi" in need.features and not self.alibi:
            found.append("it has no ALiBi")
        return found


def _left_out(need: AttentionNeed, facts: Facts) -> list[str]:
    """What a need takes that the installed FlashAttention 3 was built without. A head may take kernels of larger
    ones."""
    sizes = [size for size in FA3_HEADS if f"HDIM{size}" not in facts.fa3_without]
    wanted = {
        "PAGEDKV": ("pages", True),
        "VARLEN": ("rows of different lengths", True),
        "LOCAL": ("sliding windows", need.sliding_window is not None),
        "SOFTCAP": ("a soft cap", need.soft_cap is not None),
        "FP16": ("float16", need.dtype == "float16"),
    }
    found = [what for flag, (what, asked) in wanted.items() if asked and flag in facts.fa3_without]
    if need.head_size > max(sizes, default=0):
        found.append(f"heads of {need.head_size} elements")
    return [f"this build ({facts.versions['fa3']}) has no kernels for {what}" for what in found]


FA3_HEADS = (64, 96, 128, 192, 256)
"""Elements that FlashAttention 3 has kernels for, each left out by a flag of its own."""
FA3 = Implementation(
    name="fa3",
    title="FlashAttention 3",
    pip="pip install flash-attn-3 --find-links https://download.pytorch.org/whl/flash-attn-3/",
    majors=frozenset({9}),
)
FA4 = Implementation(
    name="fa4",
    title="FlashAttention 4",
    pip="pip install --pre flash-attn-4",
    majors=frozenset({9, 10, 11}),
    few_heads=frozenset({10, 11}),
    reads_past_end=True,
)
FA2 = Implementation(
    name="fa2",
    title="FlashAttention 2",
    pip="pip install flash-attn --no-build-isolation",
    majors=frozenset({8, 9, 10, 11, 12}),
    kinds=KINDS,
    page_multiple=256,
    alibi=True,
)
TORCH = Implementation(
    name="torch",
    title="torch's varlen_attn",
    pip="",
    majors=frozenset({8, 9, 10, 11, 12}),
    kinds=KINDS,
    page_multiple=256,
    soft_cap=False,
)
IMPLEMENTATIONS = {one.name: one for one in (FA3, FA4, FA2, TORCH)}
"""In the order in which "auto" takes them."""


def common_reasons(need: AttentionNeed) -> list[str]:
    """What none of them can do, whatever is installed."""
    found = []
    if need.kind not in KINDS:
        found.append(f"layers of kind '{need.kind}' are not served, only {', '.join(sorted(KINDS))}")
    if need.device.partition(":")[0] != "cuda":
        found.append(f"it needs an NVIDIA GPU, not device {need.device}")
    if need.dtype not in DTYPES:
        found.append(f"dtype {need.dtype} is not one of {', '.join(DTYPES)}")
    if need.kind != "encoder" and need.kv_dtype != need.dtype:
        found.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} is not served: they must be the same")
    if "kv_index" in need.features:
        found.append("feature 'kv_index' is not served: a row's queries must be its last tokens")
    unknown = sorted(need.features - FEATURES - {"kv_index"})
    found.extend(f"feature '{feature}' is not served" for feature in unknown)
    return found


def machine_reasons(facts: Facts) -> list[str]:
    """What is wrong with the machine for all of them."""
    if facts.rocm:
        return ["this torch is built for ROCm; only the CUDA builds of these libraries are known to take our pages"]
    if not facts.capabilities:
        return ["no NVIDIA GPU was found: the driver's NVML does not answer"]
    if not facts.triton:
        return ["Triton is not installed, in which keys and values are written (pip install triton)"]
    return []


def choose(need: AttentionNeed, facts: Facts) -> Implementation | None:
    """The first one that serves a need here."""
    return next((one for one in IMPLEMENTATIONS.values() if not one.reasons(need, facts)), None)

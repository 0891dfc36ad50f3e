"""The sizes of Mamba's mixers, and what they keep for a sequence: what a card needs to know of them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from engine.types.model import KVSpec, StateTensor


class Mamba1Form(NamedTuple):
    """Sizes of a mixer of the first kind.

    Args:
        hidden_size: of what it reads and gives.
        inner: channels.
        state: elements of the state of one channel.
        kernel: tokens that the convolution sees.
        dt_rank: from so many elements each channel's step is made.
        bias: of the projections; conv_bias: of the convolution.
        norm_eps: of norms of the steps, B and C, as Jamba has them; None: there are none.
    """

    hidden_size: int
    inner: int
    state: int
    kernel: int
    dt_rank: int
    bias: bool
    conv_bias: bool
    norm_eps: float | None = None

    def spec(self, dtype: str, **more: Any) -> KVSpec:
        """What a layer keeps; dtype: of the scan's state, see `StateTensor`."""
        states = (
            StateTensor(name="conv", shape=(self.kernel - 1, self.inner), dtype="model", divided_dim=1),
            StateTensor(name="ssm", shape=(self.state, self.inner), dtype=dtype, divided_dim=1),
        )
        return KVSpec(kind="state", num_kv_heads=0, head_size=0, states=states, **more)

    def unsupported_ranks(self, ranks: int) -> list[str]:
        """Why it cannot be divided over so many ranks."""
        return [f"{self.inner} channels cannot be divided over {ranks} ranks"] if self.inner % ranks else []


class Mamba2Form(NamedTuple):
    """Sizes of a mixer of the second kind.

    Args:
        hidden_size, state, kernel, conv_bias: as in `Mamba1Form`.
        heads, head_size: its channels.
        groups: so many heads follow one another that share their inputs and outputs of states.
        eps: of the norm behind the scan.
        dt_limit: between which steps are held.
        bias: of the first projection, and of the last where `out_bias` says nothing else.
        norm: of what the scan gives, before it is multiplied by silu(gate), or behind that; "none": there is none.
        factors: by which the gate, the scan's input, B, C and the steps are multiplied; empty for nothing.
    """

    hidden_size: int
    heads: int
    head_size: int
    groups: int
    state: int
    kernel: int
    eps: float
    dt_limit: tuple[float, float]
    bias: bool
    conv_bias: bool
    out_bias: bool | None = None
    norm: Literal["behind_gate", "before_gate", "none"] = "behind_gate"
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Channels."""
        return self.heads * self.head_size

    def spec(self, dtype: str, **more: Any) -> KVSpec:
        """What a layer keeps; dtype: of the scan's state, see `StateTensor`."""
        past, divided = self.kernel - 1, None if self.groups == 1 else 1
        of_group = (past, self.groups * self.state)
        states = (
            StateTensor(name="conv_x", shape=(past, self.inner), dtype="model", divided_dim=1),
            StateTensor(name="conv_b", shape=of_group, dtype="model", divided_dim=divided),
            StateTensor(name="conv_c", shape=of_group, dtype="model", divided_dim=divided),
            StateTensor(name="ssm", shape=(self.heads, self.state, self.head_size), dtype=dtype, divided_dim=0),
        )
        return KVSpec(kind="state", num_kv_heads=0, head_size=0, states=states, **more)

    def unsupported_ranks(self, ranks: int) -> list[str]:
        """Why it cannot be divided over so many ranks."""
        if self.heads % ranks == 0 and (self.groups == 1 or self.groups % ranks == 0):
            return []
        return [f"{self.heads} heads in {self.groups} groups cannot be divided over {ranks} ranks"]

"""A device that computes nothing and sees everything: torch's "meta", whose tensors have shapes and no values.

Whoever asks such a tensor for a value would make the host wait for a real device, and is refused: `item`, `tolist`,
`bool(tensor)`, indexing by a mask, `nonzero`, `unique`, `repeat_interleave` by a tensor. Nothing passes between the
host's tensors and the device's but through the platform, which counts; torch's own ways of doing so are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.interfaces.attention import AttentionBatch
from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftRows, Drafts, DraftSession
from engine.types.kv import KVGroup
from engine.types.plan import NewSlot
from engine_reference.attention_torch.attention import TorchAttentionBody
from engine_reference.attention_torch.card import TorchAttention
from engine_reference.attention_torch.plan import TorchPlan
from engine_reference.platform_host.card import HostPlatform
from engine_reference.platform_host.platform import HostPlatformBody


class Upload(NamedTuple):
    """One copy to the device."""

    bytes: int
    dtype: torch.dtype


class RemotePlatform(HostPlatform):
    """Torch's device "meta"."""

    body = "remote:RemotePlatformBody"


class RemoteFetch:
    """A copy that never ends."""

    def done(self) -> bool:
        return False

    def wait(self) -> tuple[torch.Tensor, ...]:
        raise AssertionError("the host waits for the device")


class RemotePlatformBody(HostPlatformBody):
    """What went to the device stands in `uploads`, how many tensors came back in `fetched`."""

    uploads: ClassVar[list[Upload]] = []
    fetched: ClassVar[list[int]] = []

    def allocate_pool(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=self.device)

    def to_device(self, host: torch.Tensor, out: torch.Tensor) -> None:
        assert host.device.type == "cpu" and out.is_meta
        assert host.shape == out.shape and host.dtype == out.dtype and host.is_contiguous() and out.is_contiguous()
        self.uploads.append(Upload(host.numel() * host.element_size(), host.dtype))

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        assert all(tensor.is_meta for tensor in tensors)
        self.fetched.append(len(tensors))
        return RemoteFetch()


class RemoteAttention(TorchAttention):
    """The reference's decodes. What it does for longer rows asks for values: drivers for GPUs have their own."""

    body = "remote:RemoteAttentionBody"


class RemoteAttentionBody(TorchAttentionBody):
    def plan(self, batch: AttentionBatch, group: KVGroup, out: TorchPlan | None = None) -> TorchPlan:
        plan = super().plan(batch, group, out)
        plan.prefills = []
        return plan


class Branching(DrafterCard):
    """Proposes trees of which it knows the form alone."""

    body = "remote:BranchingBody"

    @classmethod
    def branches(cls, options: DrafterOptions) -> int:
        return options.num_tokens


class BranchingBody:
    """Draft i follows draft i - 2."""

    def __init__(self, context: WorkerContext) -> None:
        pass

    def enter(self, new: NewSlot) -> None:
        pass

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        shape = len(rows.slot), int(rows.num_drafts.max())
        parents = (np.arange(shape[1], dtype=np.int32) - 2).clip(-1)
        return Drafts(torch.zeros(shape, dtype=torch.int32, device=session.tokens.device), parents=parents)


class Waited(Exception):
    """The host would wait for the device."""


_WAITING = (
    *("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "repeat_interleave", "is_nonzero", "equal"),
    *("unique_dim", "unique_consecutive", "_unique", "_unique2", "bincount", "histc"),
)
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class _Watch(TorchDispatchMode):
    """Refuses operations whose answer needs values, and those on tensors of both sides."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            name = func.overloadpacket.__name__
            masks = name in _INDEXING and any(
                t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if t is not None
            )
            if masks or (name in _WAITING and func is not torch.ops.aten.repeat_interleave.self_int):
                raise Waited(f"{func} needs values")
            if any(not tensor.is_meta and tensor.dim() for tensor in tensors):
                raise Waited(f"{func} takes tensors of the host and of the device")
        elif torch.device("meta") in tree_leaves((args, kwargs)) and tensors:
            raise Waited(f"{func} copies to the device")
        return func(*args, **kwargs)


@contextmanager
def serving() -> Iterator[None]:
    """Within, nothing but the platform copies between host and device, and nobody waits."""

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Waited(f"{name} copies between host and device: use the platform")

        return call

    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        devices = [torch.device(x) for x in (*args, kwargs.get("device")) if isinstance(x, (str, torch.device))]
        if any(device != tensor.device for device in devices):
            raise Waited("Tensor.to copies between host and device: use the platform")
        return moved(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Watch():
        for name in ("tensor", "as_tensor", "asarray"):
            patch.setattr(torch, name, refused(f"torch.{name}"))
        for name in ("cpu", "cuda", "numpy", "tolist", "item", "pin_memory"):
            patch.setattr(torch.Tensor, name, refused(f"Tensor.{name}"))
        patch.setattr(torch.Tensor, "to", to)
        yield

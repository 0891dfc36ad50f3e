"""FlashInfer's wrappers: the objects that hold a plan and run it.

There are two sorts. A fixed one ("CUDA graph" in FlashInfer's words) is made for a number of rows, always divides them,
and its plans fill the same buffers, so that what was captured stays right. A free one plans each step anew.

FlashInfer's public functions are used but for four attributes, for which it has none; `check` finds out whether they
are there. Only the backend "fa2" is used, on Hopper too: the others copy lengths from the host when they plan, and
these are bounds here. The wrapper for decodes is not used either: where a bound is too long, a piece that begins after
the row's end has a negative length there.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from engine.types.errors import ConfigError
from engine_flashinfer.staging import Staging

BACKEND = "fa2"
UPGRADE = "pip install --upgrade 'flashinfer-python>=0.7'"
SMALL_PLAN = 1 << 20
"""Bytes of a fixed wrapper's plan: some 20 for each tile and row."""
LARGE_PLAN = 8 << 20
"""What FlashInfer itself gives a plan."""
ARGUMENTS = frozenset({"causal", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "disable_split_kv"})
"""Of `plan`, beside those that all versions have."""
HINT = "uniform_q_len"
"""An argument of later versions, by which plans fit rows of equally many queries better."""
ATTRIBUTES = (
    "_pin_memory_int_workspace_buffer",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
    "_qo_indptr_buf",
    "_sm_scale",
)


def load() -> type[Any]:
    """FlashInfer's class of paged prefills. Raises ConfigError where it cannot be imported."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, OSError) as error:
        raise ConfigError(
            "attention flashinfer",
            f"flashinfer-python is installed and cannot be imported: {error}",
            UPGRADE,
        ) from error
    missing = ARGUMENTS - set(inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan).parameters)
    if missing:
        raise ConfigError(
            "attention flashinfer", f"this FlashInfer's plan takes no {', '.join(sorted(missing))}", UPGRADE
        )
    made: type[Any] = BatchPrefillWithPagedKVCacheWrapper
    return made


class Wrappers:
    """Makes wrappers over one workspace, and plans with them.

    Args:
        make: FlashInfer's class.
        workspace: uint8, on the device; for partial results. Steps run one after another, so all share it.
        staging: for buffers of `LARGE_PLAN` bytes.
    """

    def __init__(self, make: type[Any], workspace: torch.Tensor, staging: Staging) -> None:
        self._make = make
        self._workspace = workspace
        self._staging = staging
        self._takes_hint = HINT in inspect.signature(make.plan).parameters

    def fixed(
        self, queries: torch.Tensor, row_start: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> Any:
        """A wrapper whose kernels read these."""
        wrapper = self._make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=queries,
            paged_kv_indptr_buf=row_start,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last_page_len,
            backend=BACKEND,
        )
        small = torch.empty(SMALL_PLAN, dtype=torch.uint8, device=self._workspace.device)
        wrapper.reset_workspace_buffer(self._workspace, small)
        return check(wrapper)

    def free(self) -> Any:
        """A wrapper that is told anew what to read."""
        return check(self._make(self._workspace, "NHD", backend=BACKEND))

    @staticmethod
    def is_fixed(wrapper: Any) -> bool:
        """Whether `fixed` made it."""
        return bool(wrapper.is_cuda_graph_enabled)

    def plan(self, wrapper: Any, *arguments: Any, **keywords: Any) -> None:
        """FlashInfer's `plan`, through memory that no other plan is on its way in."""
        if not self._takes_hint:
            keywords.pop(HINT, None)
        buffer = self._staging.take()
        wrapper._pin_memory_int_workspace_buffer = buffer
        wrapper.plan(*arguments, **keywords)
        self._staging.sent(buffer)

    @staticmethod
    def point(
        wrapper: Any, queries: torch.Tensor, row_start: torch.Tensor, indices: torch.Tensor, last: torch.Tensor
    ) -> None:
        """Let a free wrapper's kernels read these, in place of what the plan was made of."""
        wrapper._qo_indptr_buf = queries
        wrapper._paged_kv_indptr_buf = row_start
        wrapper._paged_kv_indices_buf = indices
        wrapper._paged_kv_last_page_len_buf = last


def check(wrapper: Any) -> Any:
    """The wrapper. Raises ConfigError where it is not built as this package takes it to be."""
    missing = [name for name in ATTRIBUTES[:-1] if not hasattr(wrapper, name)]
    if missing:
        raise ConfigError(
            "attention flashinfer",
            f"this FlashInfer's wrapper has no {', '.join(missing)}",
            UPGRADE,
        )
    return wrapper

"""FlashInfer's wrapper with its own signatures and rules, computed in double precision: what plans run on in tests.

It follows flashinfer-python 0.7.2: `plan` divides rows by the lengths that the host gave it, and sends these lengths to
the device; `run` computes the pieces of that plan, with the lengths, pages and queries that it then reads from its
buffers. A piece that begins after the row's end is empty; a key that no piece covers is left out, as it would be. Of
rows of several queries the kernel counts pieces by the exact length, and the plan by the host's: they have to agree.
"""

from __future__ import annotations

import math

import torch

TILE = 128
"""Queries of a tile, for the keys that a window lets it see."""


def check(condition: bool, rule: str) -> None:
    assert condition, f"FlashInfer's rule is broken: {rule}"


class BatchPrefillWithPagedKVCacheWrapper:
    """See `flashinfer.BatchPrefillWithPagedKVCacheWrapper`; of the backend "fa2"."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        check(kv_layout == "NHD" and backend == "fa2", "the double knows NHD and fa2 alone")
        check(float_workspace_buffer.dtype == torch.uint8, "a workspace of bytes")
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf = qo_indptr_buf
        self._paged_kv_indptr_buf = paged_kv_indptr_buf
        self._paged_kv_indices_buf = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buf
        self._pin_memory_int_workspace_buffer = torch.empty(0)
        self._rows = None if qo_indptr_buf is None else len(qo_indptr_buf) - 1
        if use_cuda_graph:
            check(len(paged_kv_indptr_buf) == self._rows + 1, "buffers fit the rows")
            check(len(paged_kv_last_page_len_buf) == self._rows, "buffers fit the rows")

    @property
    def is_cuda_graph_enabled(self):
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self._pin_memory_int_workspace_buffer = torch.empty(0)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ):
        for array in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            check(array.dtype == torch.int32 and array.device.type == "cpu", "the host's arrays, in int32")
        check(bool((paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()), "last pages")
        rows = len(qo_indptr) - 1
        pages = paged_kv_indptr.diff().tolist()
        queries = qo_indptr.diff()
        if self._use_cuda_graph:
            check(rows == self._rows, "a fixed wrapper has a fixed number of rows")
            check(uniform_q_len is None or bool((queries == uniform_q_len).all()), "the hint is true")
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._qo_indptr_buf = qo_indptr.clone()
            self._paged_kv_indptr_buf = paged_kv_indptr.clone()
            self._paged_kv_indices_buf = paged_kv_indices.clone()
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len.clone()
        reach = pages if window_left < 0 else [min(n, -(-(window_left + TILE) // page_size)) for n in pages]
        # Pieces of two pages: what the planner makes depends on the GPU.
        plan = {
            "chunk": None if disable_split_kv else 2 * page_size,
            "pieces": [1 if disable_split_kv else -(-n // 2) for n in reach],
            "queries": queries.tolist(),
        }
        if self._use_cuda_graph and hasattr(self, "_plan"):
            self._plan.update(plan)  # a captured launch reads the plan's memory, not this object
        else:
            self._plan = plan
        self._last = int(qo_indptr[-1])
        self._page_size = page_size
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self._window_left = window_left
        self._cap = logits_soft_cap or 0.0
        self._sm_scale = sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        self._causal = causal

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False, lse_base="log2", lse_layout="NH"):
        k, v = paged_kv_cache
        check((q.dtype, k.dtype) == self._dtypes, "the planned dtypes")
        check(q.shape == (self._last, self._heads[0], self._heads[2]), "q is as planned")
        check(k.shape[1:] == (self._page_size, *self._heads[1:]) and k.stride() == v.stride(), "pages are as planned")
        check(out.shape == q.shape and out.is_contiguous(), "out is dense")
        sums = torch.full(q.shape[:2], torch.nan, dtype=torch.promote_types(q.dtype, torch.float32))
        bounds, starts = self._qo_indptr_buf.tolist(), self._paged_kv_indptr_buf.tolist()
        last = self._paged_kv_last_page_len_buf.tolist()
        for row in range(len(bounds) - 1):
            length = ((starts[row + 1] - starts[row] - 1) * self._page_size + last[row]) % (1 << 32)
            check(self._plan["queries"][row] == bounds[row + 1] - bounds[row], "queries are as planned")
            rows = slice(bounds[row], bounds[row + 1])
            out[rows], sums[rows] = self._row(q[rows], k, v, starts[row], length, self._plan["pieces"][row])
        if lse_base == "ln":
            sums *= math.log(2)
        return (out, sums) if return_lse else out

    def _row(self, q, k, v, start, length, pieces):
        place = torch.arange(len(q)) + length - len(q)
        left = length if self._window_left < 0 else self._window_left
        if len(q) > 1 and self._plan["chunk"] is not None:
            exact = max(1, -(-min(length, left + TILE) // self._plan["chunk"]))
            check(exact == pieces, "partial results of several queries lie where they are looked for")
        first = max(0, int(place[0]) - left)  # keys before the window of the first query are not read
        chunk = length if self._plan["chunk"] is None else self._plan["chunk"]
        key = torch.arange(first, min(length, first + pieces * chunk))  # what no piece covers is left out
        pages = self._paged_kv_indices_buf.long()[start + key // self._page_size]
        groups = q.shape[1] // k.shape[2]
        where = (pages, key % self._page_size)
        keys, values = (_read(x, where).repeat_interleave(groups, dim=1) for x in (k, v))
        scores = torch.einsum("nhd,shd->nhs", q.double(), keys) * (self._sm_scale or q.shape[-1] ** -0.5)
        scores = self._cap * torch.tanh(scores / self._cap) if self._cap else scores
        seen = (key <= place[:, None]) if self._causal else torch.ones(len(q), len(key), dtype=torch.bool)
        seen = seen & (key >= place[:, None] - left)
        scores = torch.where(seen[:, None], scores, -torch.inf)
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.where(seen[:, None], torch.exp(scores - total[..., None]), 0.0)
        sums = total.to(torch.promote_types(q.dtype, torch.float32)) / math.log(2)
        return torch.einsum("nhs,shd->nhd", weights, values).to(q.dtype), sums


def _read(pages: torch.Tensor, where: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if pages.dtype.itemsize == 1:
        return pages.view(torch.uint8)[where].view(pages.dtype).double()
    return pages[where].double()

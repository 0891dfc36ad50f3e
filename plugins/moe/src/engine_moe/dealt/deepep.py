"""As `all_to_all`, by the kernels of the DeepEP library (github.com/deepseek-ai/DeepEP, `deep_ep.Buffer` of 1.x).

Written by the library's documentation, and tested with a stand-in of it: no machine of ours has run it on GPUs. The
library finds its ranks through torch.distributed, of which a worker has no group otherwise: this driver makes the one.
"""

from __future__ import annotations

import importlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from engine.interfaces.model import ModelContext
from engine.types.errors import ConfigError
from engine_kit.routing import ExpertSpec
from engine_moe.dealt.all_to_all import ShufflingLayer
from engine_moe.dealt.body import DealtBody

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_moe.dealt.card import DeepEPOptions


dist: Any = torch.distributed  # its stubs do not know its stores


class DeepEPLayer(ShufflingLayer):
    """See `engine.interfaces.experts.ExpertLayer`."""

    def __init__(self, body: DeepEPBody, context: ModelContext, spec: ExpertSpec) -> None:
        super().__init__(body, context, spec)
        asked = f"deal {spec.num_experts} experts ({spec.last}) by DeepEP"
        ranks, places = len(self.starts) - 1, int(self.starts[-1])
        if places % ranks:
            found = f"their places are {places}, which {ranks} ranks do not have evenly"
            least = -spec.num_experts % ranks
            raise ConfigError(asked, found, f"set experts.redundant={least}, or that plus a multiple of {ranks}")
        if context.dtype != torch.bfloat16:
            raise ConfigError(asked, f"the library moves bfloat16, not {context.dtype}", "set --dtype bfloat16")
        self._places = places
        self._body = body
        body.sized(spec.hidden_size, places)

    def shuffle(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [T, H], ids int32 [T, k], weights [T, k] -> [T, H]."""
        turn = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self.table.shape[1]
        places, by = self.table[ids.long(), turn].long(), weights.float()
        return self._for_few(x, places, by) if self._body.options.low_latency else self._for_many(x, places, by)

    def _for_many(self, x: torch.Tensor, places: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """The library sends each token once to a rank, with what it asks of that rank, and adds up what comes back."""
        buffer = self._body.buffer
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(places, self._places)
        x_there, local, by_there, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=places,
            topk_weights=by,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        here = torch.where(local < 0, len(self.loads), local).int()  # -1: of another rank
        self.loads += torch.bincount(here.flatten(), minlength=len(self.loads) + 1)[:-1]
        out: torch.Tensor = buffer.combine(self.weights(x_there, here, by_there), handle)[0]
        return out

    def _for_few(self, x: torch.Tensor, places: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """The library sends each token to each of its experts, into rows of their own of which the first are there, and
        adds up by the weights what comes back."""
        buffer, most = self._body.buffer, self._body.most_tokens
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, places, most, self._places, use_fp8=False)
        count, each, size = rows.shape
        expert = torch.arange(count, device=rows.device, dtype=torch.int32).unsqueeze(1).expand(count, each)
        here = torch.where(torch.arange(each, device=rows.device) < counts.unsqueeze(1), expert, count).int()
        self.loads += counts
        once = torch.ones(count * each, 1, dtype=torch.float32, device=rows.device)
        made = self.weights(rows.view(-1, size), here.reshape(-1, 1), once).view(rows.shape)
        out: torch.Tensor = buffer.low_latency_combine(made, places, by, handle)[0]
        return out


class DeepEPBody(DealtBody):
    """See `engine.interfaces.experts.Experts`. The library's buffer is one of all layers, made for the largest.

    Attributes:
        most_tokens: that a rank sends in a step.
    """

    layer_class = DeepEPLayer
    options: DeepEPOptions

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        start = context.start
        self.most_tokens = -(-max(start.max_num_batched_tokens, start.max_num_seqs) // start.parallel.tp)
        self._hidden = self._places = 0

    def sized(self, hidden: int, places: int) -> None:
        """A layer has rows of so many elements, and so many places on all ranks together."""
        self._hidden = max(self._hidden, hidden)
        self._places = max(self._places, places)

    @cached_property
    def buffer(self) -> Any:
        """The library's. Made in the first step, on all ranks at once."""
        place = self.start.place.groups["ep"]
        if not dist.is_initialized():
            folder = os.path.join(self.start.rendezvous, place.rendezvous)
            os.makedirs(folder, mode=0o700, exist_ok=True)  # a group of the members of another has none of its own
            store = dist.FileStore(os.path.join(folder, "deepep"), place.size)
            dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
        group, made = dist.group.WORLD, importlib.import_module("deep_ep").Buffer
        if self.options.low_latency:
            size = made.get_low_latency_rdma_size_hint(self.most_tokens, self._hidden, place.size, self._places)
            return made(group, 0, size, low_latency_mode=True, num_qps_per_rank=self._places // place.size)
        wide = self._hidden * 2
        configs = made.get_dispatch_config(place.size), made.get_combine_config(place.size)
        nvlink = max(config.get_nvl_buffer_size_hint(wide, place.size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(wide, place.size) for config in configs)
        return made(group, nvlink, rdma)

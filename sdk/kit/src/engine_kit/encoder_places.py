"""How large the places are in which what encoders make is kept, and whether they fit. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.types.errors import ConfigError
from engine.types.kv import ALIGNMENT, KVGroup
from engine.types.model import EncoderForm
from engine_kit.draft_memory import ITEM_SIZES, stored_bytes


def form_of_place(groups: Sequence[KVGroup], form: EncoderForm) -> tuple[int, int, int]:
    """What one request has beside the pool: (tokens of a page, pages, bytes of a page).

    groups: those of kind "cross".
    """
    per_block = max(group.tokens_per_block for group in groups)
    page_bytes = max(group.offset + len(group.sites) * group.layer_bytes for group in groups)
    return per_block, -(-form.max_tokens // per_block), -(-page_bytes // ALIGNMENT) * ALIGNMENT


def check_places(config: Any, start: Any, memory: int | None) -> None:
    """Raise ConfigError where a place for each request that may run, and the weights, are more than the device has.

    Args:
        start: the `WorkerStart`.
        memory: of the device, in bytes; None: it is not known, and nothing is checked.
    """
    groups = [group for group in start.layout.groups if group.kind == "cross"]
    if start.model.encoder is None or not groups or memory is None:
        return
    _, pages, page_bytes = form_of_place(groups, start.model.encoder)
    each = pages * page_bytes
    share = 1.0 if config.memory_utilization is None else config.memory_utilization
    quantised = config.asked("quantization") is not None
    weights = stored_bytes(start.files.weights, 0.5 if quantised else ITEM_SIZES[start.dtype])
    room = int(memory * share) - weights // start.parallel.world
    if start.max_num_seqs * each <= room:
        return
    half = max(1, room // 2 // each)  # the other half is for the decoder's pages and for steps
    raise ConfigError(
        f"max_num_seqs={start.max_num_seqs} with {start.model.architecture}",
        f"each request has a place of {each:,} bytes for what the encoder made, {start.max_num_seqs * each:,} in all, "
        f"and beside the weights the device has {max(0, room):,}",
        f"set max_num_seqs to {half} or less (--max-num-seqs {half})",
    )

"""How layers divide over ranks (tensor parallelism; Shoeybi et al., "Megatron-LM", 2019).

Column-parallel layers hold some of the outputs, row-parallel ones the inputs that belong to them, and a sum over ranks
follows. Attention is divided by heads, the vocabulary by rows. Torch-free, so that a card can ask the same questions
before anything is built.
"""

from __future__ import annotations

from engine.interfaces.communicator import Group
from engine.interfaces.model import ModelContext
from engine.types.errors import ConfigError
from engine.types.kv import kv_heads_on_rank
from engine.types.parallel import Shard


def even(total: int, context: ModelContext, what: str) -> Shard:
    """This rank's part where all ranks hold equally many of `total` heads, rows or columns.

    Raises ConfigError: `total` does not divide, or there is no such rank; `what` begins the message.
    """
    _check_rank(context, what)
    if total % context.tp_size:
        raise ConfigError(
            f"divide {what} over {context.tp_size} ranks",
            f"{total} does not divide evenly",
            "choose a --tensor-parallel-size that divides it",
        )
    length = total // context.tp_size
    return Shard(total, context.tp_rank * length, length)


def vocabulary(total: int, size: int) -> tuple[Shard, ...]:
    """Every rank's rows of a vocabulary; the first ranks hold one more where it does not divide evenly."""
    least, more = divmod(total, size)
    return tuple(
        Shard(total, rank * least + min(rank, more), least + (1 if rank < more else 0)) for rank in range(size)
    )


def kv_heads(total: int, context: ModelContext, what: str) -> Shard:
    """This rank's KV heads. Where there are fewer than ranks, neighbouring ranks hold a copy of the same one.

    Raises ConfigError as `engine.types.kv.kv_heads_on_rank`.
    """
    _check_rank(context, what)
    length = kv_heads_on_rank(total, context.tp_size)
    return Shard(total, context.tp_rank * total // context.tp_size, length)


def group_of(context: ModelContext) -> Group | None:
    """The ranks to compute with; None for one rank, which asks nobody. Raises ConfigError for a rank that is none."""
    _check_rank(context, "build a model")
    if context.tp_size == 1:
        return None
    assert context.group is not None, f"{context.tp_size} ranks were given no process group"
    return context.group


def _check_rank(context: ModelContext, what: str) -> None:
    if not 0 <= context.tp_rank < context.tp_size:
        raise ConfigError(f"{what} on rank {context.tp_rank} of {context.tp_size}", "there is no such rank")

"""How workers divide a model: into stages of layers, the tokens of a sequence over ranks, and each layer over ranks.

Ranks of an engine core count through the first stage, then through the second: rank = (stage * cp + cp_rank) * tp +
tp_rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.types.errors import ConfigError


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Over how many workers a model is divided.

    Args:
        tp: ranks that share each layer (tensor parallel).
        pp: stages, each with some of the layers, one after the other (pipeline parallel).
        split: layers of each stage; empty: as even as it goes.
        cp: ranks that share the tokens of each sequence, all of them with all weights (context parallel).
        dp: engine cores that share routed experts, and step together for that; 1 where each has its own.
        ep: routed experts are dealt whole over ranks (expert parallel), and not each of them divided.
    """

    tp: int = 1
    pp: int = 1
    split: tuple[int, ...] = ()
    cp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def world(self) -> int:
        """Workers of one engine core."""
        return self.tp * self.pp * self.cp

    @property
    def of_stage(self) -> Parallel:
        """The same, of one stage: the last one has draft models."""
        return msgspec.structs.replace(self, pp=1, split=())

    @property
    def ep_size(self) -> int:
        """Ranks over which a layer's experts are dealt."""
        return self.tp * self.dp if self.ep else 1


class Shard(NamedTuple):
    """One rank's part of a dimension.

    Args:
        total: elements of the whole.
        start, length: this rank's.
    """

    total: int
    start: int
    length: int

    @classmethod
    def of(cls, size: int | Shard) -> Shard:
        """A plain number is a dimension that every rank holds in full."""
        return size if isinstance(size, Shard) else cls(size, 0, size)

    @property
    def part(self) -> slice:
        """Where it stands in the whole."""
        return slice(self.start, self.start + self.length)

    def of_units(self, width: int) -> Shard:
        """The same part where each element is `width` wide: heads to rows."""
        return Shard(self.total * width, self.start * width, self.length * width)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a model's layers, one after the other. The default is the whole model.

    Args:
        index, count: which of how many stages.
        start, stop: its layers are `start .. stop - 1`; `stop` is None for all that follow.
    """

    index: int = 0
    count: int = 1
    start: int = 0
    stop: int | None = None

    @property
    def first(self) -> bool:
        """It embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """It has the final norm and the head, and draws."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Its layers, of so many of the model."""
        return range(self.start, num_layers if self.stop is None else self.stop)


class GroupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's place in a group of workers that speak to each other.

    Args:
        name: what for: "tp", the ranks that share layers; "cp", that share sequences; "pp", of all stages with the same
            place in theirs; "dp", of all engine cores that share experts, with the same rank in each; "ep", those of
            "tp" in all of these cores, over which experts are dealt.
        rank, size: in the group, from 0.
        members: the ranks of all of them, in the order of the group. Those of several cores count on: dp_rank * world +
            rank.
        rendezvous: a private directory, empty at first, where the members meet; as `places` gives it, of one core's
            its name within `WorkerStart.rendezvous`.
    """

    name: str
    rank: int
    size: int
    members: tuple[int, ...]
    rendezvous: str


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands.

    Args:
        rank: among all workers of its engine core.
        stage: which layers it has.
        groups: those that it is in, by name; none of one member.
    """

    rank: int = 0
    stage: Stage = Stage()
    groups: dict[str, GroupPlace] = msgspec.field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Its model has logits, and it draws tokens."""
        return self.stage.last

    @property
    def tp_rank(self) -> int:
        """Among the ranks that share its layers."""
        return self.groups["tp"].rank if "tp" in self.groups else 0

    @property
    def cp_rank(self) -> int:
        """Among the ranks that share its sequences."""
        return self.groups["cp"].rank if "cp" in self.groups else 0

    @property
    def cp_size(self) -> int:
        """How many share its sequences."""
        return self.groups["cp"].size if "cp" in self.groups else 1


def split_layers(parallel: Parallel, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage. What does not divide evenly goes to the stages before the last, which has the head too.

    Raises ConfigError where the split does not fit, or a stage would have no layer.
    """
    least, more = divmod(num_layers, parallel.pp)
    split = parallel.split or tuple(
        least + (parallel.pp - 2 - stage < more and stage < parallel.pp - 1) for stage in range(parallel.pp)
    )
    if len(split) != parallel.pp or sum(split) != num_layers or min(split) < 1:
        asked = ",".join(map(str, parallel.split))
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pp}" + (f" with pipeline_parallel_split={asked}" if asked else ""),
            f"the model has {num_layers} layers",
            "give each stage at least one layer, and all together as many as the model has",
        )
    return split


def places(parallel: Parallel, num_layers: int, dp_rank: int = 0, meeting: str = "") -> tuple[Place, ...]:
    """Every worker's place, by rank. Raises ConfigError as `split_layers`.

    Args:
        dp_rank, meeting: of this engine core, see `WorkerStart`; of those that share experts.
    """
    found: list[Place] = []
    start, tp, width = 0, parallel.tp, parallel.cp * parallel.tp
    for index, count in enumerate(split_layers(parallel, num_layers)):
        stage = Stage(index=index, count=parallel.pp, start=start, stop=start + count)
        start += count
        for at in range(width):
            rank, (cp_rank, tp_rank), core = len(found), divmod(at, tp), dp_rank % parallel.dp
            first, row = rank - at, range(rank - tp_rank, rank - tp_rank + tp)
            cores = range(0, parallel.dp * parallel.world, parallel.world)
            dealt = [other + one for other in cores for one in row] if parallel.ep else [rank]
            groups = (
                _group("tp", tp_rank, row, f"tp-{row.start}"),
                _group("cp", cp_rank, range(first + tp_rank, first + width, tp), f"cp-{first + tp_rank}"),
                _group("pp", index, range(at, parallel.world, width), f"pp-{at}"),
                _group("dp", core, [other + rank for other in cores], os.path.join(meeting, f"dp-{rank}")),
                _group("ep", core * tp + tp_rank, dealt, os.path.join(meeting, f"ep-{row.start}")),
            )
            found.append(Place(rank=rank, stage=stage, groups={one.name: one for one in groups if one.size > 1}))
    return tuple(found)


def _group(name: str, rank: int, members: Sequence[int], rendezvous: str) -> GroupPlace:
    return GroupPlace(name=name, rank=rank, size=len(members), members=tuple(members), rendezvous=rendezvous)

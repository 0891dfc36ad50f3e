"""A drafter's models in the launcher: what its card names, resolved and checked as the target is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from engine.frontend.needs import Facts, model_needs, quantization_needs, reads_stored
from engine.interfaces.model import ModelNeed
from engine.plugin import Registry, Selection, choose, choose_one, points
from engine.types.errors import ConfigError, UnfitDriverError, placed
from engine.types.model import CheckpointFiles, ModelDescription
from engine.types.parallel import Parallel
from engine.types.start import DraftStart

if TYPE_CHECKING:
    from engine.interfaces.checkpoint import CheckpointCard
    from engine.interfaces.drafter import DrafterCard, DrafterOptions, DraftModel
    from engine.interfaces.model import ModelCard


class Target(NamedTuple):
    """What the drafts are for: where its weights are from, its driver's card and description, and what that was asked,
    of whatever architecture."""

    checkpoint: Selection[CheckpointCard]
    files: CheckpointFiles
    card: type[ModelCard]
    model: ModelDescription
    need: ModelNeed


class ResolvedDraft(NamedTuple):
    """A draft model: what workers are told, but for who reads stored weights; and the model's driver."""

    start: DraftStart
    implementation: Selection[ModelCard]

    def of(self, model: ModelDescription) -> ResolvedDraft:
        """With another description."""
        return self._replace(start=msgspec.structs.replace(self.start, model=model))

    def with_stored(self, facts: Facts, registry: Registry) -> DraftStart:
        """Its weights are read as they are stored: nothing is quantised that is not. Raises UnsupportedModelError where
        nobody reads them."""
        facts = replace(facts, implementation=self.implementation, model=self.start.model)
        asks = quantization_needs(facts)
        with placed(f"draft model {self.start.files.name}"):
            found = reads_stored(facts, asks, registry)
        stored = [] if found is None else choose(registry, points.QUANTIZATION, asks, found)
        choices = (*self.start.choices, *(one.choice() for one in stored))
        return msgspec.structs.replace(self.start, choices=choices)


def resolve_drafts(registry: Registry, drafter: Selection[DrafterCard], target: Target) -> list[ResolvedDraft]:
    """The models of a drafter. Nothing is read but their config.json.

    Raises:
        ModelNotFoundError, CheckpointError, UnsupportedModelError, PluginError: as of the target.
        ConfigError: what the card says of its options, or why these models cannot draft for this one.
    """
    options = cast("DrafterOptions", drafter.options)
    asked = drafter.card.models(target.model, options) if "models" in drafter.card.needs else ()
    found = [_resolved(registry, one, target, index) for index, one in enumerate(asked, 1)]
    if reasons := drafter.card.misfits(target.model, tuple(one.start.model for one in found)):
        names = ", ".join(one.start.files.name for one in found)
        raise ConfigError(
            f"draft for {target.files.name}" + (f" with {names}" if names else ""),
            f"driver '{drafter.candidate.name}': " + "; ".join(reasons),
            "name a draft model that was made for this one",
        )
    if "listeners" in target.card.unsupported_features() and drafter.card.streams(target.model, options):
        reads = f"it reads streams between the layers of {target.files.name}, and nobody can look on there"
        raise drafter.candidate.error(UnfitDriverError, reads, "name another drafter, or one that does not read them")
    return found


def with_trees(model: ModelDescription, options: DrafterOptions) -> ModelDescription:
    """The model, asking attention for trees. Raises ConfigError where a path may be longer than a layer's window."""
    window = min((site.sliding_window or 1 << 30 for site in model.sites), default=1 << 30)
    if window <= options.num_tokens:
        raise ConfigError(
            f"propose trees of up to {options.num_tokens} drafts for {model.architecture}",
            f"it has layers that see {window} tokens: fewer than may follow one another",
            f"set --drafter.num_tokens to {window - 1} or less",
        )
    return msgspec.structs.replace(model, attention_features=(*model.attention_features, "tree"))


def _resolved(registry: Registry, asked: DraftModel, target: Target, index: int) -> ResolvedDraft:
    checkpoint, files, parallel = target.checkpoint, target.files, target.need.parallel
    if asked.path:
        checkpoint = choose_one(registry, points.CHECKPOINT, asked.path, asked.load_format)
        files = checkpoint.card.resolve(asked.path)
    if (ranks := asked.tensor_parallel_size) is not None and ranks not in (1, parallel.tp):
        raise ConfigError(
            f"divide draft model {files.name} over {ranks} ranks",
            f"the model that it drafts for is divided over {parallel.tp}",
            f"1 lets every rank hold it whole; leave it out, and it is divided over {parallel.tp}",
        )
    named = {} if asked.architecture is None else {"architectures": [asked.architecture]}
    files = msgspec.structs.replace(files, config={**files.config, **asked.config, **named})
    own = Parallel() if ranks == 1 else parallel.of_stage
    with placed(f"draft model {files.name} on {own.tp} ranks" if own.tp > 1 else f"draft model {files.name}"):
        need = replace(target.need, parallel=own, features=target.need.features - {"stages"})
        asks = model_needs(need, files.config)
        (implementation,) = choose(registry, points.MODEL, asks)
        model = implementation.card.describe(files.config)
    if any(site.kind in ("state", "cross") for site in model.sites):
        raise ConfigError(
            f"draft with {model.architecture}",
            "nobody puts a draft model's states back where drafts do not count, nor gives it what an encoder reads",
            "name a draft model whose layers all attend to its tokens alone",
        )
    specs = tuple(msgspec.structs.replace(spec, model=index, divided=own.tp == parallel.tp) for spec in model.kv_specs)
    start = DraftStart(
        choices=(checkpoint.choice(), implementation.choice()),
        model=msgspec.structs.replace(model, kv_specs=specs),
        files=files,
        parallel=own,
        shares=asked.shares,
        features=asked.features,
    )
    return ResolvedDraft(start, implementation)

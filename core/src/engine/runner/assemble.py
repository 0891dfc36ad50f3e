"""The only place in a worker that builds drivers.

Platform, communicators, ops, attention, quantization, model, checkpoint, drafter, logits processors, connectors, in
that order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import torch

from engine.distributed.group import ProcessGroup
from engine.interfaces.attention import AttentionNeed
from engine.interfaces.checkpoint import Checkpoint
from engine.interfaces.communicator import Communicator, CommunicatorNeed
from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import Drafter, DrafterNeed, DrafterOptions
from engine.interfaces.kv_connector import KVConnectorNeed, KVConnectorWorker
from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsProcessorNeed
from engine.interfaces.model import NOT_CAPTURED, Model, ModelCard, ModelContext, ModelNeed
from engine.interfaces.ops import Ops, ops_needs
from engine.interfaces.platform import CapturesDrafts, Platform, PlatformCard, PlatformNeed
from engine.interfaces.quantization import KINDS, Quantization, QuantizationNeed
from engine.plugin import Manifest, Registry, Selection
from engine.plugin.selection import judge
from engine.runner.attention import AttentionLayers, Backend
from engine.runner.capture import why_not_captured
from engine.runner.drafting import ChosenDrafter
from engine.sampling.processors import Processor
from engine.types.errors import ContractError, ManifestError, UnfitDriverError
from engine.types.start import WorkerStart

_POINTS = (
    *("platform", "communicator", "ops", "attention", "quantization", "model", "checkpoint", "drafter"),
    *("logits_processor", "kv_connector"),
)
"""Whose bodies are built here."""


class ResolvedOps:
    """One object with all operations, each from the driver that was chosen for it. Implements `Ops`."""

    def __init__(self, operations: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(operations)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise ContractError(
            f"call operation '{name}'",
            "the card of the model does not name it among its operations, so no driver was chosen for it",
            "add it to `operations` of the card",
            point="model",
        )


@dataclass(frozen=True)
class Assembly:
    """What a worker computes with, built and loaded; the attention is not bound to a pool yet."""

    platform: Platform
    ops: Ops
    attention: AttentionLayers
    model: Model
    groups: dict[str, ProcessGroup]
    drafter: ChosenDrafter | None = None
    processors: tuple[Processor, ...] = ()
    connectors: dict[str, KVConnectorWorker] = field(default_factory=dict)
    not_captured: tuple[str, ...] | None = None
    """Why no step can be captured, empty where they can be; None where the platform captures nothing anyway."""
    skips_padding: bool = False
    """`engine.interfaces.platform.PlatformCard.skips_padding`."""
    captures_drafts: CapturesDrafts = "never"
    """`engine.interfaces.platform.PlatformCard.captures_drafts`, where attention and drafter are for it."""


def assemble(start: WorkerStart, registry: Registry) -> Assembly:
    """Check the manifest, build the drivers that it names, and load the weights.

    Raises:
        ManifestError: another driver or version is installed here than the launcher chose, or the manifest is
            incomplete.
        UnfitDriverError: a driver that was fit for the launcher's facts says on the real device that it is not.
        PluginError: a card or body cannot be imported.
        CheckpointError: the weights are broken or do not fit the model.
    """
    chosen = _ManifestChoices(start, registry)
    context = WorkerContext(start=start)
    platform: Platform = chosen.build("platform", "", PlatformNeed(dtype=start.dtype), context)
    dtype: torch.dtype = getattr(torch, start.dtype)
    context = replace(context, platform=platform, device=platform.device, dtype=dtype)
    groups = _groups(start, chosen, context)
    try:
        context = replace(context, ops=_ops(start, chosen, context))
        attention = _attention(start, chosen, context)
        assert context.ops is not None
        quantization = _quantization(start, chosen, context)
        model = _model(start, chosen, context.ops, attention, quantization, platform.device, dtype, groups)
        checkpoint: Checkpoint = chosen.build("checkpoint", "", None, context)
        model.load_weights(checkpoint.weights())
        drafter = _drafter(start, chosen, context)
        processors = _processors(start, chosen, context) if start.place.draws else ()
        connectors = _connectors(start, chosen, context)
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    card = cast("type[PlatformCard]", chosen.fit("platform", "", None).card)
    return Assembly(
        platform,
        context.ops,
        attention,
        model,
        groups,
        drafter,
        processors,
        connectors,
        _not_captured(card, start, chosen, attention),
        card.skips_padding,
        card.captures_drafts if drafter is not None and attention.can_capture_drafts() else "never",
    )


def _not_captured(
    card: type[PlatformCard], start: WorkerStart, chosen: _ManifestChoices, attention: AttentionLayers
) -> tuple[str, ...] | None:
    if card.recorder is None or not start.model.generates:
        return None
    # Of several communicators the first takes what it accepts: the sums of activations, in all likelihood.
    communicators = chosen.communicators[:1] if start.parallel.tp > 1 else []
    reasons = why_not_captured(card.recorder, [*chosen.computing, *communicators], chosen.model.operations)
    if not attention.can_capture_decodes():
        reasons.append("the attention's steps cannot be replayed")
    model = chosen.fit("model", "", None)
    recorders = chosen.model.captured_by
    if recorders is not None and card.recorder not in recorders:
        why = NOT_CAPTURED if not recorders else f"it is not recorded by '{card.recorder}'"
        reasons.append(f"model '{model.candidate.name}': {why}")
    return tuple(reasons)


class _ManifestChoices:
    """The manifest's choices, checked against what is installed here."""

    def __init__(self, start: WorkerStart, registry: Registry) -> None:
        self._bodies: dict[tuple[str, str, str], Any] = {}
        mine = tuple(c for c in start.choices if c.point in _POINTS)
        selections = Manifest(mine).restore(registry)
        self._selections = {(selection.point, selection.kind): selection for selection in selections}
        self.computing = [s for s in selections if s.point in ("ops", "attention", "quantization")]
        self.communicators = [selection for selection in selections if selection.point == "communicator"]
        self.connectors = [selection for selection in selections if selection.point == "kv_connector"]
        self.processors = [selection for selection in selections if selection.point == "logits_processor"]

    def names(self, point: str, kind: str = "") -> bool:
        """Whether the manifest names a driver for an optional point."""
        return (point, kind) in self._selections

    @property
    def model(self) -> type[ModelCard]:
        """The card of the model's driver."""
        return cast("type[ModelCard]", self.fit("model", "", None).card)

    def fit(self, point: str, kind: str, need: Any) -> Selection:
        """The chosen driver, asked again whether it can serve `need`."""
        return self.ask(self._selections.get((point, kind)), point, kind, need)

    @staticmethod
    def ask(selection: Selection | None, point: str, kind: str, need: Any) -> Selection:
        """This driver, asked again whether it can serve `need`."""
        what = f"{point} of '{kind}'" if kind else point
        if selection is None:
            raise ManifestError(
                f"build the worker's {what}",
                "the launcher's manifest names no driver for it",
                "start all processes of one engine with the same version",
                point=point,
            )
        reasons = judge(selection.card, selection.candidate, need).reasons if need is not None else ()
        if reasons:
            raise UnfitDriverError(
                f"use driver '{selection.candidate.name}' for {what}",
                f"it was chosen, but on this device it says: {'; '.join(reasons)}",
                f"choose another with --{point}, or start where the launcher's facts hold",
                point=point,
                driver=selection.candidate.name,
                distribution=selection.candidate.provenance,
            )
        return selection

    def build(self, point: str, kind: str, need: Any, context: WorkerContext) -> Any:
        """The chosen driver's body with its own options; one for each kind of layer, else one for each driver."""
        selection = self.fit(point, kind, need)
        key = (point, selection.candidate.name, kind if point == "attention" else "")
        if key not in self._bodies:
            self._bodies[key] = selection.build(replace(context, options=selection.options))
        return self._bodies[key]


def _groups(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> dict[str, ProcessGroup]:
    """The groups that this worker is in. All members of one build its communicators here, in the same order, and meet
    in a directory that the first of them makes."""
    groups: dict[str, ProcessGroup] = {}
    try:
        for name, place in start.place.groups.items():
            place = msgspec.structs.replace(place, rendezvous=os.path.join(start.rendezvous, place.rendezvous))
            os.makedirs(place.rendezvous, mode=0o700, exist_ok=True)
            invariant = start.batch_invariant and name == "tp"  # stages add nothing up
            need = CommunicatorNeed(world_size=place.size, device=start.device, batch_invariant=invariant)
            # A driver was chosen for the largest group; one that cannot serve a smaller one leaves it to the others.
            fit = [selection for selection in chosen.communicators if not selection.card.unsupported(need)]
            communicators: list[Communicator] = []
            for selection in fit or chosen.communicators:
                asked = chosen.ask(selection, "communicator", "", need)
                communicators.append(asked.build(replace(context, options=selection.options, group=place)))
            groups[name] = ProcessGroup(place.rank, place.size, communicators)
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return groups


def _ops(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> Ops:
    needs = ops_needs(
        chosen.model.operations, dtype=start.dtype, device=start.device, batch_invariant=start.batch_invariant
    )
    operations = {name: getattr(chosen.build("ops", name, need, context), name) for name, need in needs.items()}
    return cast(Ops, ResolvedOps(operations))


def _drafter(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> ChosenDrafter | None:
    if not chosen.names("drafter"):
        return None
    need = DrafterNeed(dtype=start.dtype, device=start.device)
    selection = chosen.fit("drafter", "", need)
    options = cast(DrafterOptions, selection.options)
    drafter: Drafter = chosen.build("drafter", "", need, context)
    return ChosenDrafter(drafter, options.acceptance, options.num_tokens, selection.candidate)


def _attention(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> AttentionLayers:
    sites = start.model.sites
    needs = []
    backends: dict[str, Backend] = {}
    for group in start.layout.groups:
        need = AttentionNeed.of(
            sites[group.sites[0]],
            size=start.parallel.tp,
            dtype=start.dtype,
            kv_dtype=start.kv_cache_dtype or start.dtype,
            device=start.device,
            block_size=start.layout.block_size,
            features=frozenset(start.model.attention_features),
            batch_invariant=start.batch_invariant,
        )
        needs.append(need)
        backends[group.kind] = chosen.build("attention", group.kind, need, context)
    return AttentionLayers(start.layout, sites, tuple(needs), backends)


def _quantization(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> dict[str, Quantization]:
    return {
        kind: chosen.build(
            "quantization",
            kind,
            QuantizationNeed(
                kind=kind,
                dtype=start.dtype,
                stored_dtype=start.model.dtype,
                device=start.device,
                batch_invariant=start.batch_invariant,
            ),
            context,
        )
        for kind in KINDS
        if chosen.names("quantization", kind)
    }


def _processors(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> tuple[Processor, ...]:
    need = LogitsProcessorNeed(vocab_size=start.model.vocab_size, device=start.device)
    return tuple(
        Processor(
            selection.candidate,
            cast("type[LogitsProcessorCard]", chosen.ask(selection, selection.point, "", need).card),
            selection.build(replace(context, options=selection.options)),
        )
        for selection in chosen.processors
    )


def _connectors(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> dict[str, KVConnectorWorker]:
    need = KVConnectorNeed(
        page_bytes=start.layout.page_bytes, swap_space=start.swap_space, parallel=start.parallel, device=start.device
    )
    return {
        selection.candidate.name: chosen.ask(selection, selection.point, "", need).build(
            replace(context, options=selection.options), "worker"
        )
        for selection in chosen.connectors
    }


def _model(
    start: WorkerStart,
    chosen: _ManifestChoices,
    ops: Ops,
    attention: AttentionLayers,
    quantization: dict[str, Quantization],
    device: torch.device,
    dtype: torch.dtype,
    groups: dict[str, ProcessGroup],
) -> Model:
    description = start.model
    need = ModelNeed(
        architecture=description.architecture,
        config=description.config,
        parallel=start.parallel,
        features=frozenset({"stages"} if start.parallel.pp > 1 else ()),
        batch_invariant=start.batch_invariant,
    )
    model: Model = chosen.fit("model", "", need).build(
        ModelContext(
            description=description,
            ops=ops,
            attention=attention,
            dtype=dtype,
            device=device,
            max_model_len=start.max_model_len,
            tp_rank=start.place.tp_rank,
            tp_size=start.parallel.tp,
            group=groups.get("tp"),
            quantization=quantization,
            latent_attention=attention.latent,
            stage=start.place.stage,
        )
    )
    return model

"""The only place in a worker that builds drivers.

Platform, communicators, ops, attention, quantization, experts, model, checkpoint, drafter, logits processors,
connectors, in that order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec
import torch

from engine.distributed.group import ProcessGroup
from engine.interfaces.adapter import AdapterCard, AdapterWorker
from engine.interfaces.attention import AttentionNeed
from engine.interfaces.checkpoint import Checkpoint
from engine.interfaces.communicator import Communicator, CommunicatorNeed
from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import OFFERS, Drafter, DrafterCard, DrafterNeed, DrafterOptions
from engine.interfaces.evictor import EvictorCard, ReuseContext
from engine.interfaces.experts import CountsTokens
from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed, KVConnectorWorker
from engine.interfaces.logits_processor import LogitsProcessorCard, LogitsProcessorNeed
from engine.interfaces.model import NOT_CAPTURED, Model, ModelCard, ModelContext, ModelNeed
from engine.interfaces.ops import Ops, ops_needs
from engine.interfaces.platform import STREAM, Platform, PlatformCard, PlatformNeed
from engine.interfaces.quantization import Quantization, QuantizationCard, QuantizationNeed, stored_form
from engine.interfaces.step import StepPart
from engine.plugin import Registry, Selection, points
from engine.plugin.loading import brought
from engine.plugin.manifest import check_choices, restore
from engine.plugin.selection import judge
from engine.runner.attention import AttentionLayers, Backend
from engine.runner.buffers import SlotTables
from engine.runner.capture import why_not_captured
from engine.runner.drafting import ChosenDrafter, Drafting
from engine.runner.drawing import Draws
from engine.runner.session import Session
from engine.runner.states import StateBackend
from engine.sampling.faults import SlotFaults
from engine.sampling.processors import Processor, ProcessorChain
from engine.sampling.sampler import Sampler, SlotParameters
from engine.types.errors import ContractError, ManifestError, UnfitDriverError, placed
from engine.types.start import WorkerStart

_POINTS = (
    *("platform", "communicator", "ops", "attention", "quantization", "experts", "adapter", "model", "checkpoint"),
    *("drafter", "logits_processor", "kv_connector", "evictor"),
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
    card: type[PlatformCard]
    """The platform's."""
    drafts: tuple[Model, ...] = ()
    drafter: ChosenDrafter | None = None
    processors: tuple[Processor, ...] = ()
    connectors: dict[str, KVConnectorWorker] = field(default_factory=dict)
    not_captured: tuple[str, ...] | None = None
    """Why no step can be captured, empty where they can be; None where the platform captures nothing anyway."""
    captures_models: bool = False
    """Whether passes of the drafter's models can be captured."""
    draft_pass: Any = None
    """What captures them with their inputs and draws (`engine_kit.draft_pass`), where these are recorded too."""
    layerwise: frozenset[str] = frozenset()
    """Connectors that are called before and after each layer."""
    adapters: AdapterWorker | None = None
    """What changes weights for single requests."""
    reuse: StepPart | None = None
    """The half of an evictor that finds what is no prefix."""
    streams: tuple[int, ...] = ()
    """The layers whose residual stream the drafter reads."""
    experts: CountsTokens | None = None
    """What counts the tokens of routed experts."""

    def not_whole(self) -> list[str]:
        """Why no decode step is captured from its inputs to its draws: see `engine.interfaces.step.WholeSteps`."""
        bodies = [self.attention.backend(group) for group in self.attention.groups]
        against = {
            "no step is captured": self.not_captured != (),
            "attention is planned by the host": not all(getattr(body, "plans_by_launches", False) for body in bodies),
            "other ranks share its inputs or draws": bool(self.groups.keys() & {"pp", "cp", "dp"}),
            "the drafter looks at each step": self.drafter is not None and self.drafter.observes,
        }
        return [reason for reason, holds in against.items() if holds]


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
        starts = [start.of_draft(draft) for draft in start.drafts]
        of_drafts = [_ManifestChoices(one, registry) for one in starts]
        context = replace(context, ops=_ops(start, [chosen, *of_drafts], context))
        attention = _attention(start, chosen, context, groups.get("cp"))
        assert context.ops is not None
        adapters = chosen.build("adapter", "", None, context, "worker") if chosen.names("adapter") else None
        lent = frozenset[str]().union(*(draft.shares for draft in start.drafts))
        model = _loaded(chosen, context, attention, groups, adapters=adapters, lends=lent)
        experts = chosen.build("experts", "", None, context) if chosen.names("experts") else None
        drafts = tuple(
            _loaded(
                theirs, replace(context, start=one), attention, groups, model=index, target=model, shares=draft.shares
            )
            for index, (draft, one, theirs) in enumerate(zip(start.drafts, starts, of_drafts, strict=True), 1)
        )
        drafter = _drafter(start, chosen, context)
        processors = _processors(start, chosen, context) if start.place.draws else ()
        connectors = _connectors(start, chosen, context)
        reuse = _reuse(chosen, context, model, groups.get("tp"))
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    card = cast("type[PlatformCard]", chosen.fit("platform", "", None).card)
    draft_pass = brought("draft_pass") if drafts else None
    return Assembly(
        platform,
        context.ops,
        attention,
        model,
        groups,
        card,
        drafts,
        drafter,
        processors,
        connectors,
        _not_captured(card, start, chosen, attention, adapters),
        all(_not_captured(card, *of_draft, attention) == () for of_draft in zip(starts, of_drafts, strict=True)),
        draft_pass if draft_pass and not why_not_captured(card.recorder, chosen.computing, draft_pass.calls) else None,
        layerwise=frozenset(
            selection.candidate.name
            for selection in chosen.connectors
            if cast("type[KVConnectorCard]", selection.card).layerwise
        ),
        adapters=adapters,
        reuse=reuse,
        streams=_streams(start, chosen),
        experts=experts if hasattr(experts, "parts") else None,
    )


def _not_captured(
    card: type[PlatformCard],
    start: WorkerStart,
    chosen: _ManifestChoices,
    attention: AttentionLayers,
    adapters: AdapterWorker | None = None,
) -> tuple[str, ...] | None:
    if card.recorder is None or not start.model.generates:
        return None
    # Of several communicators the first takes what it accepts: the sums of activations, in all likelihood.
    communicators = chosen.communicators[:1] if start.parallel.world * start.parallel.dp > start.parallel.pp else []
    reasons = why_not_captured(card.recorder, [*chosen.computing, *communicators], chosen.operations)
    if adapters is not None and not adapters.captured:
        reasons.append("experts with adapters are computed one by one")
    if not attention.captures("decode", "uniform", "any"):
        reasons.append("the attention's steps cannot be replayed")
    if start.parallel.cp > 1 and card.recorder not in STREAM:
        reasons.append(f"how ranks that share sequences join their results is not recorded by '{card.recorder}'")
    model = chosen.fit("model", "", None)
    recorders = chosen.model.captured_by
    if recorders is not None and card.recorder not in recorders:
        why = NOT_CAPTURED if not recorders else f"it is not recorded by '{card.recorder}'"
        reasons.append(f"model '{model.candidate.name}': {why}")
    return tuple(reasons)


def step_parts(
    start: WorkerStart, built: Assembly, slots: SlotTables, max_tokens: int, profiles: bool
) -> tuple[Draws, list[StepPart]]:
    """Who draws a step's tokens, and all parts of steps, in the order in which they are called.

    Args:
        slots: the device's tables.
        max_tokens: of a step, padding included.
        profiles: see `engine.runner.model_runner.ModelRunner`.
    """
    platform, ops, model, description = built.platform, built.ops, built.model, start.model
    tokens, drafter = slots.tables.tokens, built.drafter
    if profiles and drafter is not None and not drafter.observes:
        drafter = None
    faults = SlotFaults()
    processors = ProcessorChain(() if profiles else built.processors, platform, tokens, faults)
    parameters = SlotParameters(start.max_num_seqs, description.vocab_size)
    captures = built.captures_models and built.drafts and not profiles
    session = Session(
        start,
        built.drafts,
        ops,
        platform,
        built.attention,
        slots,
        Sampler(ops, platform, tokens, parameters),
        rejects=drafter is not None and drafter.acceptance == "rejection",
        max_tokens=1 if drafter is None else 1 + drafter.num_tokens,
        branches=drafter is not None and drafter.branches,
        buckets=platform.buckets(start.max_num_seqs) if captures else (),
        skips_padding=built.card.skips_padding,
        draft_pass=built.draft_pass,
    )
    drafting = Drafting(
        drafter, ops, platform, session, faults, lambda slots: parameters.penalised[slots] | processors.used_by(slots)
    )
    draws = Draws(start, ops, platform, tokens, parameters, processors, drafting, faults)
    parts: list[StepPart] = [draws, processors, drafting]
    if drafter is not None and start.parallel.pp > 1:
        early = brought("early_drafts", "draft with several stages")
        parts.append(early(start, drafting, session, platform, faults, drafter.num_tokens))
    if built.connectors and not profiles:
        parts.insert(0, brought("transfers", "take KV pages elsewhere")(start, built.connectors, built.layerwise))
    if built.adapters is not None and not profiles:
        parts.append(built.adapters)
    if built.reuse is not None and not profiles:
        parts.append(built.reuse)
    if built.experts is not None and not profiles:
        parts.extend(built.experts.parts())
    if description.encoder is not None:
        encoders = brought("encoders", "serve an encoder-decoder model")
        parts.append(encoders(platform, model, built.attention, description.encoder, start.max_num_seqs))
    if description.prompt_embeds and start.place.stage.first and not profiles:
        parts.append(brought("given_embeds", "serve prompt_embeds")(platform, model))
    if description.num_token_types:
        parts.append(brought("token_types", "tell texts apart")(platform, start.max_num_seqs, max_tokens))
    if start.place.draws and description.generates:
        scorer = brought("prompt_scorer", "score prompts")
        parts.append(scorer(ops, platform, model, tokens, description.vocab_size, built.adapters))
    elif start.place.draws:
        parts.append(brought("pooler", "pool hidden states")(platform, model, description))
    return draws, parts


class _ManifestChoices:
    """The manifest's choices, checked against what is installed here."""

    def __init__(self, start: WorkerStart, registry: Registry) -> None:
        self._bodies: dict[tuple[str, str, str], Any] = {}
        mine = tuple(c for c in start.choices if c.point in _POINTS)
        check_choices(registry, mine)
        selections = restore(registry, mine)
        self._selections = {(selection.point, selection.kind): selection for selection in selections}
        self.computing = [s for s in selections if s.point in ("ops", "attention", "quantization", "experts")]
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

    @property
    def operations(self) -> frozenset[str]:
        """What the model's body calls, and the adapters'."""
        adapter = cast("type[AdapterCard]", self.fit("adapter", "", None).card) if self.names("adapter") else None
        return self.model.operations | (frozenset() if adapter is None else adapter.operations)

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

    def build(self, point: str, kind: str, need: Any, context: WorkerContext, half: str | None = None) -> Any:
        """The chosen driver's body with its own options; one for each kind of layer, else one for each driver."""
        selection = self.fit(point, kind, need)
        key = (point, selection.candidate.name, kind if point == "attention" else "")
        if key not in self._bodies:
            self._bodies[key] = selection.build(replace(context, options=selection.options), half)
        return self._bodies[key]


def _groups(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> dict[str, ProcessGroup]:
    """The groups that this worker is in. All members of one build its communicators here, in the same order, and meet
    in a directory that the first of them makes."""
    groups: dict[str, ProcessGroup] = {}
    of_members: dict[tuple[int, ...], ProcessGroup] = {}  # groups of the same ones are one
    try:
        for name, place in start.place.groups.items():
            if (same := of_members.get(place.members)) is not None:
                groups[name] = same
                continue
            nodes = len({start.seats[rank].node for rank in place.members}) if start.seats else 1
            if nodes == 1:
                place = msgspec.structs.replace(place, rendezvous=os.path.join(start.rendezvous, place.rendezvous))
                with contextlib.suppress(FileExistsError):
                    os.mkdir(place.rendezvous, mode=0o700)
            invariant = start.batch_invariant and name != "pp"  # stages add nothing up
            need = CommunicatorNeed(
                world_size=place.size, device=start.device, batch_invariant=invariant, num_nodes=nodes
            )
            # A driver was chosen for the largest group; one that cannot serve a smaller one leaves it to the others.
            fit = [selection for selection in chosen.communicators if not selection.card.unsupported(need)]
            communicators: list[Communicator] = []
            for selection in fit or chosen.communicators:
                asked = chosen.ask(selection, "communicator", "", need)
                communicators.append(asked.build(replace(context, options=selection.options, group=place)))
            groups[name] = of_members[place.members] = ProcessGroup(place.rank, place.size, communicators)
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return groups


def _ops(start: WorkerStart, of_models: Sequence[_ManifestChoices], context: WorkerContext) -> Ops:
    """Those that the model's body calls, and those of its draft models."""
    called, chosen = frozenset().union(*(one.operations for one in of_models)), of_models[0]
    needs = ops_needs(called, dtype=start.dtype, device=start.device, batch_invariant=start.batch_invariant)
    operations = {name: getattr(chosen.build("ops", name, need, context), name) for name, need in needs.items()}
    return cast(Ops, ResolvedOps(operations))


def _drafter(start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext) -> ChosenDrafter | None:
    if not chosen.names("drafter") or not start.place.draws:
        return None
    need = DrafterNeed(dtype=start.dtype, device=start.device)
    selection = chosen.fit("drafter", "", need)
    options = cast(DrafterOptions, selection.options)
    drafter: Drafter = chosen.build("drafter", "", need, context)
    card = cast("type[DrafterCard]", selection.card)
    return ChosenDrafter(
        drafter,
        options.acceptance,
        options.num_tokens,
        selection.candidate,
        bool(card.needs & OFFERS),
        card.branches(options) > 0,
    )


def _streams(start: WorkerStart, chosen: _ManifestChoices) -> tuple[int, ...]:
    """The layers whose streams the drafter reads, of all stages."""
    if not chosen.names("drafter"):
        return ()
    selection = chosen.fit("drafter", "", None)
    card, num_layers = cast("type[DrafterCard]", selection.card), start.model.num_layers
    options = cast(DrafterOptions, selection.options)
    streams = card.streams(start.model, options) if "streams" in card.needs else ()
    if any(layer not in range(num_layers) for layer in streams):
        found = f"its card asks for the streams of layers {list(streams)}, and the model has {num_layers}"
        raise selection.candidate.error(ContractError, found, "mend its `streams`, or name another driver")
    return streams


def _attention(
    start: WorkerStart, chosen: _ManifestChoices, context: WorkerContext, shares: ProcessGroup | None
) -> AttentionLayers:
    sites, models = start.sites, (start.model, *(draft.model for draft in start.drafts))
    needs = []
    backends: dict[str, Backend] = {}
    for group in start.layout.groups:
        need = AttentionNeed.of(
            sites[group.sites[0]],
            size=start.parallel.tp,
            shared=start.parallel.cp,
            dtype=start.dtype,
            kv_dtype=start.kv_cache_dtype or start.dtype,
            device=start.device,
            block_size=start.layout.block_size // start.parallel.cp,
            features=frozenset(models[group.model].attention_features),
            batch_invariant=start.batch_invariant,
        )
        needs.append(need)
        if group.kind == "state":
            assert context.platform is not None
            backends[group.kind] = StateBackend(context.platform, sites, start.parallel.tp)
            continue
        backends[group.kind] = chosen.build("attention", group.kind, need, context)
    return AttentionLayers(start.layout, sites, tuple(needs), backends, shares)


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
                stored=stored_form(start.model.config),
            ),
            context,
        )
        for kind in points.QUANTIZATION.kinds
        if chosen.names("quantization", kind)
    }


def _covers(start: WorkerStart, chosen: _ManifestChoices) -> Callable[[str, str], bool] | None:
    """See `ModelContext.covers`."""
    stored = stored_form(start.model.config)
    if stored is None:
        return None

    def covers(name: str, kind: str) -> bool:
        selection = chosen.fit("quantization", kind, None)
        try:
            return cast("type[QuantizationCard]", selection.card).covers(stored, name, kind)
        except Exception as error:
            raise selection.candidate.fault(f"say whether it covers {name}", error) from error

    return covers


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
    made = {}
    if start.layout.mark_bytes:
        canary = brought("kv_canary", "check pages with --kv-canary")
        made[canary.candidate.name] = canary.worker(context)
    return made | {
        selection.candidate.name: chosen.ask(selection, selection.point, "", need).build(
            replace(context, options=selection.options), "worker"
        )
        for selection in chosen.connectors
    }


def _reuse(
    chosen: _ManifestChoices, context: WorkerContext, model: Model, ranks: ProcessGroup | None
) -> StepPart | None:
    if not chosen.names("evictor"):
        return None
    selection = chosen.fit("evictor", "", None)
    if not cast("type[EvictorCard]", selection.card).reuses:
        return None
    context = replace(context, options=selection.options)
    part: StepPart = selection.build(ReuseContext(**vars(context), model=model, ranks=ranks), "worker")
    return part


def _loaded(
    chosen: _ManifestChoices,
    context: WorkerContext,
    attention: AttentionLayers,
    groups: dict[str, ProcessGroup],
    model: int = 0,
    **of_draft: Any,
) -> Model:
    """The model of the context's start message, with its weights.

    Args:
        model: which of the engine's it is: 0, or a draft model's number.
        of_draft: what a draft model's context has besides, or the model's own.
    """
    start, description, ops = context.start, context.start.model, context.ops
    assert ops is not None and context.dtype is not None and context.device is not None
    need = ModelNeed(
        architecture=description.architecture,
        config=description.config,
        parallel=start.parallel,
        features=frozenset({"stages"} if start.parallel.pp > 1 else ()),
        batch_invariant=start.batch_invariant,
    )
    body: Model = chosen.fit("model", "", need).build(
        ModelContext(
            description=description,
            ops=ops,
            attention=partial(attention, model=model),
            dtype=context.dtype,
            device=context.device,
            max_model_len=start.max_model_len,
            tp_rank=start.place.tp_rank,
            tp_size=start.parallel.tp,
            group=groups["tp"] if start.parallel.tp > 1 else None,
            groups={name: groups[name] for name in start.place.groups},
            quantization=_quantization(start, chosen, context),
            covers=_covers(start, chosen),
            experts=chosen.build("experts", "", None, context) if chosen.names("experts") else None,
            latent_attention=partial(attention.latent, model=model),
            cross_attention=partial(attention.cross, model=model),
            state=None if attention.states is None else partial(attention.states.site, attention),
            stage=start.place.stage,
            **of_draft,
        )
    )
    checkpoint: Checkpoint = chosen.build("checkpoint", "", None, context)
    with placed(f"draft model {start.files.name}") if model else contextlib.nullcontext():
        body.load_weights(checkpoint.weights())
    return body

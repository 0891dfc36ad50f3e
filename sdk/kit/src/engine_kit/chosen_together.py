"""What the cards of a choice say together (entry-point group `engine_parts`): drivers that are fit each for itself, and
do not go with one another, or not with the model; and settings that do not go with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.embedding import EngineConfig
from engine.interfaces.drafter import DrafterCard
from engine.interfaces.kv_connector import KVConnectorCard
from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.plugin import Selection, points
from engine.types.errors import ConfigError
from engine.types.model import ModelDescription
from engine.types.start import CoreStart, WorkerStart
from engine_kit.encoder_places import check_places

Made = Mapping[str, Sequence[Selection[Any]]]
"""The drivers at work, by point."""


def check(config: EngineConfig, start: CoreStart, made: Made) -> None:
    """Raise ConfigError where drivers do not go together, or not with the model."""
    model = start.worker.model
    check_steps(config, start.worker)
    check_parallel(config, start, made)
    if any(site.kind == "state" for site in model.sites):
        check_states(model, made.get(points.DRAFTER.name, ()), made.get(points.KV_CONNECTOR.name, ()))
    if start.worker.parallel.pp > 1:
        check_stages(start.worker, made.get(points.DRAFTER.name, ()))
    check_processors(made[points.LOGITS_PROCESSOR.name])
    if config.kv_canary and (model.whole_prompts or not config.enable_prefix_caching or not start.worker.layout.groups):
        found = "marks are made of blocks' keys, which this engine or its model, without a prefix cache, does without"
        raise ConfigError("kv_canary=True", found, "leave --kv-canary out")
    check_connectors(config, start.preemption_mode, made.get(points.KV_CONNECTOR.name, ()))
    check_adapters(start, made)
    check_reuse(start, made)
    if model.prompt_embeds:
        check_embeds(model, made)
    if model.encoder is not None:
        check_places(config, start.worker, made[points.PLATFORM.name][0].card.memory())


def check_steps(config: EngineConfig, worker: WorkerStart) -> None:
    """Raise ConfigError where a step takes fewer tokens than the model needs in one."""
    model, longest = worker.model, worker.max_model_len
    if model.encoder is not None and worker.max_num_batched_tokens <= model.encoder.max_tokens:
        raise ConfigError(
            f"max_num_batched_tokens={worker.max_num_batched_tokens} with {model.architecture}",
            f"what its encoder reads, up to {model.encoder.max_tokens} tokens, is one step's, and the decoder's too",
            f"set max_num_batched_tokens to {model.encoder.max_tokens + 1} or more",
        )
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold") if model.whole_prompts else ():
        if 0 < (tokens := getattr(config, name)) < longest:
            raise ConfigError(
                f"{name}={tokens} with {model.architecture}",
                f"each of its tokens sees all others, so a prompt of up to {longest} tokens is one step's",
                f"set {name} to {longest} or more, or max_model_len to less",
            )


def check_stages(worker: WorkerStart, drafters: Sequence[Selection[DrafterCard]]) -> None:
    """Raise ConfigError where the last of several pipeline stages, which proposes and verifies drafts, would need what
    is on the others."""
    model, parallel = worker.model, worker.parallel
    for drafter in drafters:
        card, reason = drafter.card, ""
        if card.branches(drafter.options):
            reason = "it proposes trees, and the other stages would have to move what they keep of the right path"
        if any(site.kind == "state" for site in model.sites):
            reason = f"the other stages would have to put back the states of {model.architecture} behind wrong drafts"
        if reason:
            asked = f"drafter={drafter.candidate.name} with pipeline_parallel_size={parallel.pp}"
            raise ConfigError(asked, reason, "name another drafter, or divide the model by --tensor-parallel-size")


def check_parallel(config: EngineConfig, start: CoreStart, made: Made) -> None:
    """Raise ConfigError where ranks are to share what nobody at work can divide."""
    parallel = start.worker.parallel
    if parallel.cp > 1:
        check_shared(start.worker, made)
    named, has = config.asked(points.EXPERTS.name), bool(made.get(points.EXPERTS.name))
    if not has and (named is not None or config.options_for(points.EXPERTS.name)):
        asked = f"experts={named} with {start.worker.model.architecture}"
        raise ConfigError(asked, "it has no routed experts", "leave --experts and its options out")
    if not parallel.ep:
        return
    asked = f"enable_expert_parallel=True with {start.worker.model.architecture}"
    if not has:
        raise ConfigError(asked, "it has no routed experts", "leave --enable-expert-parallel out")
    if parallel.ep_size == 1:
        found, remedy = "one rank has all experts", "say over how many: --tensor-parallel-size, --data-parallel-size"
        raise ConfigError(asked, found, remedy)
    if parallel.dp > 1 and config.data_parallel_restarts:
        asked = f"data_parallel_restarts={config.data_parallel_restarts} with enable_expert_parallel=True"
        found = "engine cores that share experts compute each step together, and all end with the first that dies"
        raise ConfigError(asked, found, "leave one of them out, and restarts to what supervises the server")
    if parallel.dp > 1 and start.worker.drafts:
        asked = f"drafter={config.asked('drafter')} with enable_expert_parallel=True over engine cores"
        found = "it has a model of its own, whose passes the other engine cores do not make"
        raise ConfigError(asked, found, "take a drafter without a model, like ngram, or deal experts within one core")


def check_shared(worker: WorkerStart, made: Made) -> None:
    """Raise ConfigError where ranks are to share the tokens of sequences, and something at work needs them together."""
    model, size, reasons = worker.model, worker.parallel.cp, list[str]()
    kinds = {site.kind for site in worker.sites}
    if others := sorted(kinds - {"full", "sliding", "mla"}):
        reasons.append(f"the model has layers of kind {', '.join(others)}, whose tokens are not dealt over ranks")
    windows = sorted({site.sliding_window for site in worker.sites if site.sliding_window is not None})
    if uneven := [window for window in windows if window % size]:
        reasons.append(f"it has layers that see {uneven[0]} tokens, which do not divide by {size}")
    features = sorted({*model.attention_features} - {"kv_index"})
    if "tree" in features:
        reasons.append("a rank has some of a tree's nodes, and would have to know how the others hang together")
    if features := [name for name in features if name != "tree"]:
        reasons.append(f"its attention has {', '.join(features)}, which count keys or distances on each rank")
    (evictor,), (platform,) = made[points.EVICTOR.name], made[points.PLATFORM.name]
    if evictor.card.reuses:
        reasons.append(f"evictor '{evictor.candidate.name}' moves single tokens, and ranks have each some of them")
    if platform.card.worker is not None:
        reasons.append(f"platform '{platform.candidate.name}' has a worker of its own")
    for connector in made.get(points.KV_CONNECTOR.name, ()):
        if not connector.card.swaps:
            reasons.append(f"connector '{connector.candidate.name}' does not tell apart what these ranks keep")
    if reasons:
        asked = f"context_parallel_size={size} with {model.architecture}"
        raise ConfigError(asked, "; ".join(reasons), "leave it out, or what stands in its way")


def check_adapters(start: CoreStart, made: Made) -> None:
    """Raise ConfigError where requests may have adapters, and not all layers' tokens are those of the step."""
    for adapter in made.get(points.ADAPTER.name, ()):
        asked = f"adapter={adapter.candidate.name} with {start.worker.model.architecture}"
        if start.worker.model.encoder is not None:
            found = "its encoder computes inputs between steps, which are no request's tokens"
            raise ConfigError(asked, found, "merge the adapter into the model's weights")
        (evictor,) = made[points.EVICTOR.name]
        if evictor.card.reuses:
            found = f"evictor '{evictor.candidate.name}' has later layers compute some of a step's tokens alone"
            raise ConfigError(asked, found, "leave one of them out")


def check_embeds(model: ModelDescription, made: Made) -> None:
    """Raise ConfigError where prompts may bring embeddings, and somebody cannot take them."""
    (evictor,), (driver,), (platform,) = (made[p.name] for p in (points.EVICTOR, points.MODEL, points.PLATFORM))
    asked, found = f"enable_prompt_embeds=True with {model.architecture}", ""
    if not (driver.card.takes_embeds and driver.card.walks):
        found = f"its driver '{driver.candidate.name}' ({driver.candidate.provenance}) takes tokens alone"
    elif not model.generates:
        found = "an engine that pools takes tokens alone"
    elif evictor.card.reuses:
        found = f"evictor '{evictor.candidate.name}' has later layers compute some of a step's tokens alone"
    elif platform.card.worker is not None:
        found = f"platform '{platform.candidate.name}' has a worker of its own"
    if found:
        raise ConfigError(asked, found, "leave one of them out")


def check_reuse(start: CoreStart, made: Made) -> None:
    """Raise ConfigError where an evictor is to find what is no prefix, and what it finds cannot be used."""
    (evictor,), (model,), (platform,) = (made[p.name] for p in (points.EVICTOR, points.MODEL, points.PLATFORM))
    if not evictor.card.reuses:
        return
    reasons = evictor.card.conflicts(start)
    if not start.enable_prefix_caching:
        reasons.append("prefix caching is off, and what is reused is found in its cache")
    if [table.kind for table in start.worker.layout.tables] != ["full"]:
        reasons.append("not all layers keep the keys and values of every token: sliding windows and states cannot")
    if start.worker.parallel.pp > 1:
        reasons.append("there are several pipeline stages, and each computes all tokens that the first one does")
    for drafter in made.get(points.DRAFTER.name, ()):
        if drafter.card.needs:
            reasons.append(f"drafter '{drafter.candidate.name}' has to see all tokens behind the last layer")
    if "listeners" in model.card.unsupported_features():
        reasons.append(f"model driver '{model.candidate.name}' lets nobody look on between its layers")
    if platform.card.worker is not None:
        reasons.append(f"platform '{platform.candidate.name}' has a worker of its own")
    if reasons:
        asked = f"evictor={evictor.candidate.name} with {start.worker.model.architecture}"
        raise ConfigError(asked, "; ".join(reasons), "leave out what stands in its way, or name another evictor")


def check_states(
    model: ModelDescription,
    drafters: Sequence[Selection[DrafterCard]],
    connectors: Sequence[Selection[KVConnectorCard]],
) -> None:
    """Raise ConfigError where something is asked that states of fixed size cannot do."""
    for drafter in drafters:
        if drafter.card.branches(drafter.options):
            asked = f"drafter={drafter.candidate.name}, which proposes trees, with {model.architecture}"
            found = "its layers keep one state for each sequence, and a tree's branches would each need one"
            raise ConfigError(asked, found, "let it propose chains, or name another drafter")
    for connector in connectors:
        if connector.card.layerwise:
            asked = f"kv_connector={connector.candidate.name}, which transfers layers, with {model.architecture}"
            found = "a state lies in whole pages alone, and is not kept token by token"
            raise ConfigError(asked, found, "name a connector that transfers pages, or leave it out")


def check_connectors(config: EngineConfig, mode: str, chosen: Sequence[Selection[KVConnectorCard]]) -> None:
    """Raise ConfigError where pages are to be swapped, and no connector that the user names does; and where marks of
    pages would not travel."""
    unmarked = [one.candidate.name for one in chosen if one.card.layerwise and not one.card.moves_marks]
    if config.kv_canary and unmarked:
        found = f"{', '.join(unmarked)} transfer(s) layers, without the marks behind them"
        raise ConfigError("kv_canary=True", found, "leave --kv-canary out, or name another connector")
    names = [selection.candidate.name for selection in chosen if not selection.card.swaps]
    if mode == "swap" and len(names) == len(chosen):
        asked = f"swap_space={config.swap_space} with kv_connector={config.asked('kv_connector')}"
        found = f"{', '.join(names)} keep(s) no pages of preempted requests"
        raise ConfigError(asked, found, "name one that does behind it, e.g. 'host', or leave --swap-space out")


def check_processors(chosen: Iterable[Selection[LogitsProcessorCard]]) -> None:
    """Raise ConfigError where two logits processors take the same argument of a request."""
    claimed: dict[str, str] = {}
    for selection in chosen:
        name = selection.candidate.name
        for key in selection.card.extra_args:
            if key in claimed:
                raise ConfigError(
                    f"start with logits processors '{claimed[key]}' and '{name}'",
                    f"both take the request's argument {key!r}",
                    "name one of them",
                )
            claimed[key] = name

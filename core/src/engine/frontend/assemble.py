"""Builds the frontend's parts: one of the three places in which drivers' bodies are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.frontend.capacity import capacity
from engine.frontend.chat_template import ChatTemplate
from engine.frontend.client import Attached, InProcessClient, client_of_several
from engine.frontend.input_processor import InputProcessor
from engine.frontend.launch import Launch
from engine.frontend.needs import renders_tools
from engine.frontend.output_processor import OutputProcessor
from engine.interfaces.client import ClientContext, CoreClient, RemoteClient
from engine.interfaces.context import FrontContext, RouterContext
from engine.interfaces.reasoning_parser import ReasoningParser
from engine.interfaces.router import Router
from engine.interfaces.tokenizer import Tokenizer
from engine.interfaces.tool_parser import ToolParser
from engine.plugin import HookRelay, Selection
from engine.plugin.loading import load_entry_point
from engine.plugin.points import LOGITS_PROCESSOR, REASONING_PARSER, ROUTER, SCHEDULING_POLICY, TOOL_PARSER
from engine.types.errors import ConfigError
from engine.types.start import WorkerReady


@dataclass(frozen=True)
class Frontend:
    """The parts between a user and an engine core.

    Attributes:
        tokenizer: at work.
        inputs, outputs: the processors, to the core and back.
        hooks: the relay of this process.
        tool_parser, reasoning_parser: at work; None where there is none.
        renders_tools: whether the chat template has a place for tools.
    """

    tokenizer: Tokenizer
    inputs: InputProcessor
    outputs: OutputProcessor
    hooks: HookRelay
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    renders_tools: bool = True


def assemble_frontend(plan: Launch) -> Frontend:
    """Build the tokenizer and the processors.

    Raises TokenizerError for a tokenizer that is missing or broken, PluginError for a body that cannot be imported.
    """
    hooks = HookRelay("frontend", plan.registry, options=plan.start.worker.hook_options)
    tokenizer: Tokenizer = _built(plan, plan.tokenizer)
    variables = json.loads(plan.config.default_chat_template_kwargs or "{}")
    chat = ChatTemplate(tokenizer, plan.chat_template, variables)
    chat.check()
    inputs = InputProcessor(
        tokenizer,
        plan.model,
        plan.max_model_len,
        plan.config.seed,
        hooks,
        tuple(selection.card for selection in plan.chosen(LOGITS_PROCESSOR)),
        orders_by_priority=plan.chosen(SCHEDULING_POLICY)[0].card.orders_by_priority,
        constraints=plan.constraints,
        chat=chat,
    )
    outputs = OutputProcessor(tokenizer, hooks, plan.model_name)
    outputs.tokenizer_from = plan.tokenizer.candidate
    return Frontend(
        tokenizer,
        inputs,
        outputs,
        hooks,
        tool_parser=_built(plan, plan.one(TOOL_PARSER)),
        reasoning_parser=_built(plan, plan.one(REASONING_PARSER)),
        renders_tools=renders_tools(plan.tokenizer, plan.tokenizer_folder, plan.chat_template),
    )


def _built(plan: Launch, selection: Selection[Any] | None) -> Any:
    """A body of the frontend's; None where nothing was chosen."""
    if selection is None:
        return None
    return selection.build(
        FrontContext(folder=plan.tokenizer_folder, files=plan.files, model=plan.model, options=selection.options)
    )


def build_router(plan: Launch, workers: Sequence[WorkerReady]) -> Router:
    """The body of the chosen router, for cores that are ready."""
    (chosen,) = plan.chosen(ROUTER)
    worker = plan.start.worker
    context = RouterContext(
        num_ranks=len(workers),
        max_num_seqs=worker.max_num_seqs,
        block_size=worker.layout.block_size,
        cached_tokens=min(capacity(plan, ready)[0] for ready in workers),
        options=chosen.options,
    )
    router: Router = chosen.build(context)
    return router


def start_client(plan: Launch) -> CoreClient:
    """The engine core in this process, or several in processes of their own; loaded and ready."""
    if plan.config.data_parallel_size == 1:
        return start_in_process(plan)
    client = start_cores(plan)
    client.wait_ready()
    return client


def start_in_process(plan: Launch) -> InProcessClient:
    """An engine core in this process, loaded and ready. Raises ConfigError where the settings ask for several."""
    from engine.loop.assemble import assemble_core

    if plan.config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size={plan.config.data_parallel_size}",
            "this runs one engine core in its own process",
            "leave data_parallel_size out here",
        )
    return InProcessClient(assemble_core(plan.start, plan.registry))


def start_cores(plan: Launch, attached: Attached | None = None) -> RemoteClient:
    """Engine cores in processes of their own, which begin to load the model; or those that another process started."""
    from engine.frontend.process_client import start_process  # with what speaks to processes: not every use needs it

    connect = start_process if attached is None else attached.connect
    if plan.config.data_parallel_size == 1:
        return connect(plan.start)
    context = ClientContext(
        core=plan.start,
        num_cores=plan.config.data_parallel_size,
        restarts=plan.config.data_parallel_restarts,
        connect=connect,
        router=partial(build_router, plan),
        owner=attached is None,
    )
    make: Any = load_entry_point(client_of_several(plan.registry))
    client: RemoteClient = make(context)
    return client

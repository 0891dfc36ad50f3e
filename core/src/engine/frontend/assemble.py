"""Builds the frontend's parts: one of the three places in which drivers' bodies are made. Starts the engine core, in
this thread or in another process, and says how much a started one holds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.frontend.input_processor import InputProcessor
from engine.frontend.launch import Launch, client_of_several
from engine.frontend.output_processor import OutputProcessor
from engine.interfaces.client import ClientContext, CoreClient, CoreState, OneCore, RemoteClient
from engine.interfaces.context import FrontContext, RouterContext
from engine.interfaces.reasoning_parser import ReasoningParser
from engine.interfaces.router import Router
from engine.interfaces.tokenizer import Tokenizer
from engine.interfaces.tool_parser import ToolParser
from engine.kv.tables import BlockTable
from engine.plugin import HookRelay, Selection, points
from engine.plugin.loading import brought, load_entry_point
from engine.plugin.points import LOGITS_PROCESSOR, NODES, REASONING_PARSER, ROUTER, SCHEDULING_POLICY, TOOL_PARSER
from engine.types.errors import ConfigError, InvalidRequestError, TokenizerError
from engine.types.start import BrokenPlugin, CoreStart, WorkerReady, WorkerStart

if TYPE_CHECKING:
    from engine.loop.engine_core import EngineCore
    from engine.types.outputs import CoreOutputs, StepStats
    from engine.types.request import EngineRequest


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
    (platform,) = plan.chosen(points.PLATFORM)
    inputs = InputProcessor(
        tokenizer,
        plan.model,
        plan.max_model_len,
        plan.config.seed,
        hooks,
        tuple(one.card for one in plan.chosen(LOGITS_PROCESSOR)) or platform.card.logits_processors(),
        orders_by_priority=plan.chosen(SCHEDULING_POLICY)[0].card.orders_by_priority,
        constraints=plan.constraints,
        chat_template=plan.chat_template,
        chat_variables=variables,
    )
    if variables or plan.chat_template is not None:
        _try_chat(plan, inputs)
    if plan.one(points.ADAPTER) is not None:
        made = brought("adapter_tokenizers", "read the tokenizers of adapters")
        inputs.of_adapters = made(plan.tokenizer.card, partial(_built, plan, plan.tokenizer), tokenizer, plan)
    outputs = OutputProcessor(tokenizer, hooks, plan.model_name)
    outputs.tokenizer_from = plan.tokenizer.candidate
    return Frontend(
        tokenizer,
        inputs,
        outputs,
        hooks,
        tool_parser=_built(plan, plan.one(TOOL_PARSER)),
        reasoning_parser=_built(plan, plan.one(REASONING_PARSER)),
        renders_tools=plan.renders_tools,
    )


def _try_chat(plan: Launch, inputs: InputProcessor) -> None:
    """See before anybody is served that what the user says of chats can be: a template in place of the model's renders
    what a user says, and the variables are such as templates get. Raises ConfigError."""
    try:
        inputs.render_chat([{"role": "user", "content": "?"}])
    except InvalidRequestError as error:
        asked = f"default_chat_template_kwargs={plan.config.default_chat_template_kwargs}"
        raise ConfigError(asked, error.found, "leave it out") from error
    except TokenizerError as error:
        if plan.chat_template is not None:  # the model's own is tried with its first conversation
            remedy = "mend the template; it has to render one message of a user"
            raise ConfigError("chat_template", error.found, remedy) from error


def _built(plan: Launch, selection: Selection[Any] | None, folder: str | None = None) -> Any:
    """A body of the frontend's; None where nothing was chosen. folder: in place of the model's tokenizer's."""
    if selection is None:
        return None
    folder = plan.start.tokenizer_folder if folder is None else folder
    return selection.build(FrontContext(folder=folder, files=plan.files, model=plan.model, options=selection.options))


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


class InProcessClient:
    """The core runs in the caller's thread: `receive` is one `EngineCore.step()`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    @property
    def worker(self) -> WorkerReady:
        return self.core.worker_ready

    def add(self, requests: Sequence[EngineRequest]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except BaseException:
            self.core.abort(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        self.core.abort(list(request_ids))

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(self.core.call(method, *args))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def receive(self, timeout: float | None = None) -> CoreOutputs:
        return self.core.step()

    def has_work(self) -> bool:
        return self.core.has_work()

    @property
    def last_stats(self) -> StepStats:
        return self.core.stats()

    def states(self, look: bool = True) -> list[CoreState]:
        stats = self.last_stats
        usage = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        return [CoreState(0, os.getpid(), True, stats.num_running, stats.num_waiting, usage, stats)]

    def shutdown(self) -> None:
        self.core.shutdown()


@dataclass(frozen=True)
class Attached:
    """Cores that another process has started, for a process beside others that serves them too.

    Args:
        start: what they were started with, but for their places among each other.
        connect: makes the client of one; again where another stands in its place.
        first: this process tells hooks of the engine's statistics, which every process of several could tell.
    """

    start: CoreStart
    connect: Callable[[CoreStart], OneCore]
    first: bool = True


def start_client(plan: Launch) -> CoreClient:
    """The engine core in this process; several, those of other machines, or one that steps together with others, in
    processes of their own. Ready."""
    parallel, nodes = plan.start.worker.parallel, plan.chosen(NODES)
    if plan.config.data_parallel_size == parallel.dp == 1 and not any(one.card.several for one in nodes):
        from engine.loop.assemble import assemble_core

        return InProcessClient(assemble_core(plan.start, plan.registry))
    client = start_cores(plan)
    client.wait_ready()
    return client


def start_cores(plan: Launch, attached: Attached | None = None) -> RemoteClient:
    """Engine cores in processes of their own, which begin to load the model; or those that another process started."""
    if attached is None:
        machines = brought("machines", "start engine cores").Machines(plan)
    connect = machines.connect if attached is None else attached.connect
    if plan.config.data_parallel_size == 1:
        return connect(plan.start)
    context = ClientContext(
        core=plan.start,
        num_cores=plan.config.data_parallel_size,
        restarts=plan.config.data_parallel_restarts,
        connect=connect,
        router=partial(build_router, plan),
        owner=attached is None,
        at_end=machines.close if attached is None else None,
    )
    make: Any = load_entry_point(client_of_several(plan.registry))
    client: RemoteClient = make(context)
    return client


def broken_plugins(plan: Launch, worker: WorkerReady | None) -> tuple[BrokenPlugin, ...]:
    """The plugins that were left out, in this process or in another; `worker`: what these told when they were ready."""
    return tuple(dict.fromkeys((*plan.registry.broken(), *(worker.broken if worker is not None else ()))))


def capacity(plan: Launch, worker: WorkerReady) -> tuple[int, float]:
    """How much the KV cache holds.

    Returns:
        Tokens (of requests at full length, where layers of several kinds share the pool), and how many requests of
        `max_model_len` tokens fit at once; (0, as many as run) for a model that keeps nothing.
    """
    start = plan.start.worker
    tables = start.layout.tables
    if not tables:
        return 0, float(start.max_num_seqs)
    pages = worker.num_pages - 1  # the null page belongs to nobody
    each = _pages_of(start, start.max_model_len)
    one_kind = len(tables) == 1 and tables[0].window is None
    return pages * tables[0].tokens_per_block if one_kind else pages * start.max_model_len // each, pages / each


def longest(plan: Launch, worker: WorkerReady) -> tuple[int, int]:
    """The most tokens, up to `max_model_len`, of a request for which the KV cache has room, and how many pages one of
    `max_model_len` needs at once; none for a model that keeps nothing."""
    start, fits, above = plan.start.worker, 0, plan.start.worker.max_model_len + 1
    if not start.layout.tables:
        return start.max_model_len, 0
    while fits + 1 < above:
        middle = (fits + above) // 2
        fits, above = (middle, above) if _pages_of(start, middle) < worker.num_pages else (fits, middle)
    return fits, _pages_of(start, start.max_model_len)


def _pages_of(start: WorkerStart, length: int) -> int:
    """Pages that a request of this length needs at once."""
    chunk = min(start.max_num_batched_tokens, length)
    return sum(BlockTable(table, 1, length).most_live(length, chunk) for table in start.layout.tables)

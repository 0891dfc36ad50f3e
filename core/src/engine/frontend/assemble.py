"""Builds the frontend's parts: one of the three places in which drivers' bodies are made."""

from __future__ import annotations

from dataclasses import dataclass

from engine.frontend.client import InProcessClient
from engine.frontend.input_processor import InputProcessor
from engine.frontend.launch import Launch
from engine.frontend.output_processor import OutputProcessor
from engine.interfaces.context import FrontContext
from engine.interfaces.tokenizer import Tokenizer
from engine.plugin import HookRelay


@dataclass(frozen=True)
class Frontend:
    """The parts between a user and an engine core.

    Attributes:
        tokenizer: at work.
        inputs, outputs: the processors, to the core and back.
        hooks: the relay of this process.
    """

    tokenizer: Tokenizer
    inputs: InputProcessor
    outputs: OutputProcessor
    hooks: HookRelay


def assemble_frontend(plan: Launch) -> Frontend:
    """Build the tokenizer and the processors.

    Raises TokenizerError for a tokenizer that is missing or broken, PluginError for a body that cannot be imported.
    """
    hooks = HookRelay("frontend", plan.registry)
    tokenizer = build_tokenizer(plan)
    inputs = InputProcessor(
        tokenizer,
        plan.model,
        plan.max_model_len,
        plan.config.seed,
        hooks,
        plan.logits_processors,
        orders_by_priority=plan.orders_by_priority,
    )
    return Frontend(tokenizer, inputs, OutputProcessor(tokenizer), hooks)


def build_tokenizer(plan: Launch) -> Tokenizer:
    """The body of the chosen tokenizer."""
    body = plan.tokenizer.load_body()
    context = FrontContext(
        folder=plan.tokenizer_folder, files=plan.files, model=plan.model, options=plan.tokenizer.options
    )
    tokenizer: Tokenizer = body(context)
    return tokenizer


def start_in_process(plan: Launch) -> InProcessClient:
    """An engine core in this process, loaded and ready."""
    from engine.loop.assemble import assemble_core

    return InProcessClient(assemble_core(plan.start, plan.registry))

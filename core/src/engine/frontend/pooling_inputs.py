"""What a request may ask of a model that pools."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.errors import InvalidRequestError
from engine.types.model import ModelDescription
from engine.types.pooling import PoolingParams


def check_pooling(params: PoolingParams, model: ModelDescription) -> PoolingParams:
    """Verified parameters with `task` and `pooling_type` filled in.

    Raises:
        InvalidRequestError: they make no sense, or this model cannot do what they ask.
    """
    params.verify()
    pooler = model.pooler
    task = pooler.tasks[0] if params.task is None else params.task
    check_task(task, model)
    complete = msgspec.structs.replace(params, task=task)
    complete.verify()  # again: what does not go with a task that was left out
    _check_dimensions(params.dimensions, model)
    if task != "token_embed":
        complete.pooling_type = params.pooling_type or pooler.pooling_type
    return complete


def check_task(task: Any, model: ModelDescription) -> None:
    """Raise InvalidRequestError where this engine does not serve the task."""
    if model.generates:
        raise InvalidRequestError(
            f"{task} with {model.architecture}",
            "this engine was started to generate text",
            'start it with runner="pooling" (--runner pooling)',
        )
    tasks = model.pooler.tasks
    if task not in tasks:
        found = "it has a classification head" if model.pooler.num_labels else "it has no classification head"
        raise InvalidRequestError(f"{task} with {model.architecture}", found, f"ask for {' or '.join(tasks)}")


def _check_dimensions(dimensions: int | None, model: ModelDescription) -> None:
    listed = model.pooler.dimensions
    if dimensions is None:
        return
    if dimensions > model.hidden_size:
        raise InvalidRequestError(
            f"dimensions={dimensions}",
            f"this model's vectors have {model.hidden_size} elements",
            f"ask for {model.hidden_size} or fewer",
        )
    if listed and dimensions not in listed and dimensions != model.hidden_size:
        sizes = ", ".join(map(str, listed))
        raise InvalidRequestError(
            f"dimensions={dimensions}", f"this model was trained for {sizes}", "ask for one of these"
        )

"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from engine_server.bodies import Body
from engine_server.state import State


class LoadAdapter(Body):
    """`POST /v1/load_lora_adapter`.

    Args:
        lora_name: of the model that it becomes.
        lora_path: a folder as PEFT saves it, in --lora-dir.
        lora_int_id: vLLM's; adapters are told apart by their names and files.
        load_inplace: in place of one that has the name.
    """

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1, max_length=4096)
    lora_int_id: int | None = None
    load_inplace: bool = False


class UnloadAdapter(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None


async def load(body: LoadAdapter, state: State) -> Response:
    """Serve the adapter in a folder as a model."""
    await state.adapters.load_named(body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload(body: UnloadAdapter, state: State) -> Response:
    """Serve it no more."""
    await state.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

"""How a request names its adapter."""

from __future__ import annotations

import os

from engine.types.request import Adapter
from engine_lora.peft_folder import read_folder


def LoRARequest(lora_name: str, lora_int_id: int = 0, lora_path: str | os.PathLike[str] = "") -> Adapter:
    """The adapter in a folder as PEFT saves it, for `LLM.generate(..., lora_request=...)`.

    Arguments are vLLM's. A folder whose files have changed is another adapter, whatever its name.

    Args:
        lora_name: for people, and of its prefix cache.
        lora_int_id: not needed: adapters are told apart by their names and what their files hold.
        lora_path: the folder; the cores and workers of the engine have to find it there.

    Raises InvalidRequestError: it is no folder of an adapter, or of one that is not served; says why.
    """
    path = os.path.abspath(os.fspath(lora_path))
    return Adapter(name=lora_name, path=path, revision=read_folder(path).revision)

"""Adapters that are served beside the model, each as a model of its own: named when the server starts
(`--lora-modules`, `--prompt-adapters`), or while it serves, from one folder (`--lora-dir`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.plugin import points
from engine.plugin.loading import brought
from engine.types.embeds import PromptEmbeds
from engine.types.errors import ConfigError, InvalidRequestError, rebuild_error
from engine.types.request import Adapter
from engine_kit.async_llm import AsyncLLM
from engine_kit.prompt_adapters import read_prompt_adapter
from engine_kit.tokenizer_files import TEMPLATES
from engine_server.config import ServerConfig
from engine_server.errors import APIError, invalid

LOOK_SECONDS = 0.02
"""How often the cores are asked whether they have loaded an adapter."""
MOST = 4096
"""Adapters that may be named; of those that are not at work the files alone are there."""


class ServedAdapters:
    """Those that requests may name. From the event loop's thread.

    Args:
        llm: the engine.
        settings: which are there from the start, and where others may be loaded from.

    Attributes:
        folder: where others may be loaded from; None: none may.

    Raises ConfigError where there are to be some, and the engine has no driver for them; and for a prompt adapter that
    is none, or not for this model.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerConfig) -> None:
        self._llm = llm
        self._modules = modules_of(settings.lora_modules or ())
        self._before: dict[str, tuple[str, PromptEmbeds]] = {}
        self._served: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        self.folder = None if settings.lora_dir is None else os.path.realpath(settings.lora_dir)
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ConfigError(f"lora_dir={settings.lora_dir}", "there is no such folder", "make it, or name another")
        asked = "lora_modules" if self._modules else "lora_dir" if self.folder is not None else ""
        if asked and llm.plan.one(points.ADAPTER) is None:
            raise ConfigError(asked, "the engine is to serve no adapters", "pass --adapter lora (or --enable-lora) too")
        if self.folder is not None and settings.api_workers > 1:
            found = f"each of {settings.api_workers} API processes would have adapters of its own"
            raise ConfigError("lora_dir", found, "name them with --lora-modules, or leave --api-workers out")
        prompts = modules_of(settings.prompt_adapters or (), "prompt_adapters")
        for name in (*self._modules, *prompts):
            if name in llm.model_names or (name in self._modules and name in prompts):
                asked = f"{'prompt_adapters' if name in prompts else 'lora_modules'}: {name}"
                raise ConfigError(asked, "another model has this name", "choose another")
        for name, path in prompts.items():
            if not llm.plan.model.prompt_embeds:
                found = "the engine takes no embeddings in place of tokens"
                raise ConfigError("prompt_adapters", found, "pass --enable-prompt-embeds too")
            try:
                self._before[name] = path, read_prompt_adapter(path, llm.plan.model, llm.plan.max_model_len)
            except InvalidRequestError as error:
                raise ConfigError(f"prompt_adapters: {name}={path}", error.found, error.remedy) from error

    @property
    def names(self) -> tuple[str, ...]:
        """In the order in which they came."""
        return (*self._before, *self._served)

    def path(self, name: str) -> str | None:
        """The folder of an adapter; None for the model's own names, and where it is not there (any more)."""
        before, served = self._before.get(name), self._served.get(name)
        return before[0] if before is not None else None if served is None else served.path

    def get(self, name: str | None) -> Adapter | None:
        """The adapter of a name; None for the model's own, and where it is not there (any more)."""
        return None if name is None else self._served.get(name)

    def embeds(self, name: str | None) -> PromptEmbeds | None:
        """What stands before every prompt for the model of this name."""
        return None if name is None or name not in self._before else self._before[name][1]

    def fields(self, name: str | None) -> dict[str, Any]:
        """What a prompt for the adapter of a name has besides; nothing for the model's own, and where it is not there
        (any more)."""
        if (embeds := self.embeds(name)) is not None:
            return {"prompt_embeds": embeds}
        return {} if name is None or name not in self._served else {"adapter": self._served[name]}

    async def begin(self) -> None:
        """Load those that are there from the start. Raises the EngineError of the first that cannot be."""
        for name, path in self._modules.items():
            await self.load(name, path)

    async def load(self, name: str, path: str) -> Adapter:
        """Serve the adapter in a folder under a name, in place of what had it, once the cores have loaded it: they may
        drop it again where others are used more. Raises InvalidRequestError where it is none, or not for this model."""
        make: Any = brought("adapters", "serve adapters")
        adapter: Adapter = await asyncio.to_thread(make, name, 0, path)
        await asyncio.to_thread(self._llm.inputs.tokenizer_of, adapter)  # of its own, which is read and checked
        await self._llm.call("load_adapter", adapter.name, adapter.path, adapter.revision)
        while True:
            loaded, error = await self._llm.call("adapter_state", adapter.identity)
            if error is not None:
                raise rebuild_error(tuple(error))
            if loaded:
                break
            await asyncio.sleep(LOOK_SECONDS)
        before = self._served.get(name)
        self._served[name] = adapter
        if before is not None and before != adapter:
            await self._llm.call("unload_adapter", before.identity)
        return adapter

    async def load_named(self, name: str, path: str, in_place: bool) -> None:
        """As `load`, asked over HTTP. Raises APIError where nobody may, for a name that is taken, for a path outside
        `folder`."""
        self._check_allowed(name)
        if name in self._llm.model_names:
            raise invalid("lora_name", f"another model is called {name!r}; choose another name")
        if name in self._loading or (name in self._served and not in_place):
            raise invalid("lora_name", f"an adapter {name!r} is there already; unload it, or send load_inplace")
        if len(self._served) + len(self._loading) >= MOST and name not in self._served:
            raise invalid("lora_name", f"{MOST} adapters are there, which is the most; unload one")
        self._loading.add(name)
        try:
            await self.load(name, self._within(path))
        except InvalidRequestError as error:
            raise APIError(400, str(error), param="lora_path", code=error.code) from error
        finally:
            self._loading.discard(name)

    async def unload(self, name: str) -> None:
        """Serve it no more; requests that use it go on. Raises APIError where nobody may, and where there is none."""
        self._check_allowed(name)
        adapter = self._served.pop(name, None)
        if adapter is None:
            raise APIError(404, f"the adapter {name[:200]!r} does not exist", param="lora_name", code="model_not_found")
        await self._llm.call("unload_adapter", adapter.identity)

    def _check_allowed(self, name: str) -> None:
        if self.folder is None:
            found = "this server loads no adapters while it serves; its operator can start it with --lora-dir"
            raise APIError(403, found, code="adapters_are_fixed")
        if name in self._modules or name in self._before:
            flag = "--lora-modules" if name in self._modules else "--prompt-adapters"
            found = f"the operator of this server named {name!r} with {flag}: it stays as it is"
            raise APIError(403, found, param="lora_name", code="adapters_are_fixed")

    def _within(self, path: str) -> str:
        """The path, which begins in `folder` where it is relative. Links do not lead out of it, neither the folder's
        nor those of the files in it as they are now: who may write there decides what is read."""
        assert self.folder is not None
        if "\0" in path:
            raise invalid("lora_path", "it has a zero byte; name a folder in --lora-dir")
        found = os.path.realpath(os.path.join(self.folder, path))
        for place in (found, *(os.path.realpath(os.path.join(found, name)) for name in _names_in(found))):
            if os.path.commonpath([place, self.folder]) != self.folder:
                raise invalid("lora_path", "it lies outside of --lora-dir; name a folder in it")
        return found


def _names_in(folder: str) -> list[str]:
    """Of what lies there, and in the folders of chat templates there."""
    names: list[str] = []
    for within in ("", *TEMPLATES):
        with contextlib.suppress(OSError):  # whoever reads it says why not
            names += [os.path.join(within, name) for name in os.listdir(os.path.join(folder, within))]
    return names


def modules_of(given: Iterable[str], setting: str = "lora_modules") -> Mapping[str, str]:
    """Paths by name, of "name=path,name=path" or of {"name": ..., "path": ...} as vLLM has them. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in given:
        for name, path in _modules(text, setting):
            if not name or not path:
                raise ConfigError(f"{setting}={text}", "a name or a path is missing", "pass NAME=PATH,NAME=PATH")
            if name in found:
                raise ConfigError(f"{setting}={text}", f"two have the name {name!r}", "give each its own")
            found[name] = path
    return found


def _modules(text: str, setting: str) -> list[tuple[str, str]]:
    if not text.lstrip().startswith("{"):
        # A comma within a path is one where no NAME= follows.
        parts = [part.partition("=") for part in re.split(r",(?=[^,=/]+=)", text)]
        return [(name.strip(), path.strip()) for name, _, path in parts]
    try:
        module = json.loads(text)
        if unknown := set(module) - {"name", "path"}:
            raise ValueError(f"{sorted(unknown)[0]!r} is not known here")
        return [(str(module["name"]), str(module["path"]))]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"it is no JSON with name and path: {error}"
        raise ConfigError(f"{setting}={text}", found, "pass NAME=PATH,NAME=PATH") from error

"""The worker half of `file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.file.folder import FolderStore, folder_of
from engine_connectors.store_worker import StoreWorker, place_of

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class FileWorker(StoreWorker):
    """Reads files straight into the pool where it lies in host memory."""

    def __init__(self, context: WorkerContext) -> None:
        options = context.options
        store = FolderStore(folder_of(options.path), place_of(context), options.size, options.fsync)
        super().__init__(store, options.threads, options.buffer)

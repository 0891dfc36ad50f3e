"""The scheduler half of `file`. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_connectors.file.folder import FolderDirectory, folder_of
from engine_connectors.pages import places_of
from engine_connectors.store_scheduler import StoreScheduler

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext


class FileScheduler(StoreScheduler):
    """Looks for files itself: that takes microseconds a block."""

    def __init__(self, context: CoreContext) -> None:
        folder = folder_of(context.options.path)
        super().__init__(context, FolderDirectory(folder, places_of(context.parallel)), waits=False)

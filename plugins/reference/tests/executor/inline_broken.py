"""A worker that does not start."""

from engine.types.start import WorkerReady, WorkerStart


class BrokenWorker:
    """Raises where a real one finds no memory."""

    shut_down = 0

    def __init__(self, message: WorkerStart) -> None:
        pass

    def start(self) -> WorkerReady:
        raise MemoryError("no memory")

    def shutdown(self) -> None:
        type(self).shut_down += 1

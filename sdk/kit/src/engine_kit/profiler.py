"""Records what a worker computes while it serves, with torch's profiler, for a viewer of Chrome traces (entry-point
group `engine_parts`)."""

from __future__ import annotations

import os
import time

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from engine.types.errors import ConfigError, EngineError, InvalidRequestError
from engine.types.start import WorkerStart


class Profiler:
    """One rank's. All calls come from the thread that launches steps, which is the one that is recorded.

    What is recorded stays in memory until `stop`: some hundred bytes for each operation. Steps are slower meanwhile.

    Args:
        start: the worker's start message: where files go, and which rank this is.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._start = start
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin. Raises ConfigError where no folder was given or it cannot be written to, InvalidRequestError where a
        profile is being taken."""
        folder = self._start.profile_dir
        if folder is None:
            raise ConfigError("take a profile", "there is no folder for it", "start the engine with --profile-dir")
        if self._profile is not None:
            raise InvalidRequestError("start a profile", "one is being taken already", "stop it first")
        refused = f"take a profile into {folder!r}"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(refused, str(error), "name another --profile-dir") from error
        if not os.access(folder, os.W_OK):
            raise ConfigError(refused, "it cannot be written to", "name another --profile-dir")
        on_host = torch.empty(0, device=self._start.device).is_cpu
        activities = {ProfilerActivity.CPU} if on_host else supported_activities()  # type: ignore[no-untyped-call]
        begun = profile(activities=activities, record_shapes=True)
        try:
            begun.start()
        except Exception as error:  # torch's, of any kind: a step does not fail because nobody can watch it
            raise EngineError("start a profile", f"torch's profiler: {error}") from error
        self._profile = begun

    def stop(self) -> str:
        """End, and write the file: JSON that chrome://tracing and Perfetto read, compressed. Returns its path.

        Raises InvalidRequestError where no profile is being taken, EngineError where the file cannot be written.
        """
        recorded = self._profile
        self._profile = None
        if recorded is None:
            raise InvalidRequestError("stop a profile", "none is being taken", "start one first")
        start = self._start
        rank = start.data_parallel_rank * start.parallel.world + start.place.rank
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}-rank{rank}.json.gz"
        path = os.path.join(start.profile_dir or "", name)
        try:
            recorded.stop()
            recorded.export_chrome_trace(path)
        except Exception as error:
            remedy = "see that there is space, or name another folder"
            raise EngineError(f"write the profile {path!r}", str(error), remedy) from error
        return path

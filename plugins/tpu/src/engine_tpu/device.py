"""JAX set up for a worker: its devices, their mesh, and where compiled steps are kept."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from engine.types.errors import ConfigError
from engine_tpu.platform import TpuOptions
from engine_tpu.weights import AXIS

logger = logging.getLogger(__name__)


def open_mesh(options: TpuOptions, size: int, first: int) -> Mesh:
    """A mesh of one axis over `size` devices, from the machine's `first` on.

    Raises ConfigError where there is no TPU and nobody asked for the processor, or where there are too few devices.
    """
    set_numbers()
    _keep(options.cache_dir)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        _make_cpu_devices(first + size)
        devices = jax.devices("cpu")
    else:
        if first:
            raise ConfigError(
                "platform=tpu with several engine cores",
                "libtpu gives a machine's chips to one process",
                "start several servers, each told its chips, or divide the model: --platform.tensor_parallel",
            )
        try:
            devices = jax.devices("tpu")
        except RuntimeError as error:
            raise ConfigError(
                f"platform=tpu with device={options.device}",
                f"JAX finds no TPU: {str(error).splitlines()[0]}",
                "install jax[tpu] on a machine that has one, or compute on the processor: --platform.device cpu",
            ) from error
    if first + size > len(devices):
        raise ConfigError(
            f"platform=tpu with {size} devices for each of {first // size + 1} or more engine cores",
            f"there are {len(devices)}",
            "divide the model over fewer" if first == 0 else "start fewer engine cores (--data-parallel-size)",
        )
    return Mesh(np.array(devices[first : first + size]), (AXIS,))


def set_numbers() -> None:
    """Let JAX compute as the worker's functions expect it."""
    jax.config.update("jax_enable_x64", True)  # running sums and random numbers have 64 bits; all else says its dtype
    jax.config.update("jax_default_matmul_precision", "highest")  # a TPU would round float32 to bfloat16


def _make_cpu_devices(count: int) -> None:
    """So many processor devices, where JAX has not begun yet and the user has not said how many."""
    if count > 1 and jax.config.jax_num_cpu_devices < count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            logger.debug("JAX has begun already, with the processor devices that it has")


def _keep(cache_dir: str) -> None:
    """Keep what is compiled there."""
    if not cache_dir:
        return
    folder = Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"platform.cache_dir={cache_dir}", f"it cannot be made: {error}", "name another folder, or none"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

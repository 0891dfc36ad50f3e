"""What the driver has to know of an engine, without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEVELS: Mapping[str, Mapping[str, str]] = {
    "": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "CMAKE_ARGS": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON "
        "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF",
        "PIP_NO_CACHE_DIR": "1",
    },
}
"""Variables for the installation and the worker that keep an engine to a level of processor features: those of oneDNN
(OpenVINO's, too) and torch, and llama.cpp's choice when it is compiled, which a cached wheel would pass over. Ours has
an option."""


@dataclass(frozen=True)
class Peer:
    """One engine.

    Args:
        name: as it is asked for, and printed.
        module: run with `-m` as the worker.
        weights: the forms of weights that it serves.
        steps: arguments of pip, one call after the other; None means that the driver's own interpreter is used.
        install_environment: variables for the installation; "{jobs}" is filled in.
        environment: variables for the worker; "{compiled}" is a folder for what the engine compiles at run time,
            "{cores}" the cores' range ("0-3"), "{kv_gib}" the cache's size in whole GiB.
        about: how it is used, one sentence for the page.
        unheld: why it cannot be kept to a level of `LEVELS`; "" where it can.
    """

    name: str
    module: str
    weights: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...] | None
    about: str
    install_environment: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    unheld: str = ""

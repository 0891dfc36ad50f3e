"""AMD's GPUs, from the files in which Linux's driver (amdgpu, kfd) describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine_cuda.gpu import Gpu, Gpus, chosen

_NODES = "class/kfd/kfd/topology/nodes"
_LOCAL_MEMORY = ("1", "2")
"""Heaps of the GPU's own memory: visible to the host, and not."""


def amd_gpus(environ: Mapping[str, str], root: Path = Path("/sys")) -> Gpus | None:
    """The GPUs of this machine that the environment leaves to a process; None where there is no driver.

    ROCR_VISIBLE_DEVICES is applied first; HIP_VISIBLE_DEVICES, or where it is not set CUDA_VISIBLE_DEVICES, chooses of
    what it leaves.

    root: where the system's files are.
    """
    folder = root / _NODES
    if not folder.is_dir():
        return None
    nodes = []
    for node in sorted(folder.iterdir(), key=lambda node: (len(node.name), node.name)):
        properties = _properties(node / "properties")
        if int(properties.get("simd_count", 0)):
            nodes.append((node, properties))
    left = list(range(len(nodes)))
    hidden = []
    for variables in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        variable = next((name for name in variables if name in environ), None)
        if variable is None:
            continue
        places = chosen(environ[variable], tuple(_identifier(nodes[place][1]) for place in left))
        if len(places) < len(left):
            hidden.append(f"{variable}={environ[variable]}")
        left = [left[place] for place in places]
    return Gpus(
        maker="AMD",
        visible=tuple(_gpu(root, *nodes[place]) for place in left),
        installed=len(nodes),
        hidden_by=" and ".join(hidden),
        driver=_text(root / "module/amdgpu/version"),
    )


def _gpu(root: Path, node: Path, properties: Mapping[str, str]) -> Gpu:
    target = _target(int(properties.get("gfx_target_version", 0)))
    device = root / f"class/drm/renderD{properties.get('drm_render_minor', '')}/device"
    total = _number(device / "mem_info_vram_total") or _heaps(node / "mem_banks")
    used = _number(device / "mem_info_vram_used")
    name = _text(device / "product_name") or "AMD GPU"
    return Gpu(f"{name} ({target})", total, None if used is None else total - used, target=target)


def _target(version: int) -> str:
    """90402 -> "gfx942": major, minor and stepping, the latter two in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _identifier(properties: Mapping[str, str]) -> str:
    return f"GPU-{int(properties.get('unique_id', 0)):016x}"


def _heaps(folder: Path) -> int:
    """Bytes of the node's own memory."""
    banks = [_properties(bank / "properties") for bank in folder.iterdir()] if folder.is_dir() else []
    return sum(int(bank.get("size_in_bytes", 0)) for bank in banks if bank.get("heap_type") in _LOCAL_MEMORY)


def _properties(path: Path) -> dict[str, str]:
    """Lines of a name and a number. A file that may not be read (a GPU that a container was not given) is empty."""
    return dict(line.split(None, 1) for line in _text(path).splitlines() if len(line.split(None, 1)) == 2)


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

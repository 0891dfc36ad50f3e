"""What is found out about GPUs: from drivers' libraries that are made up, from made-up files, and from torch's own."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_cuda.gpu import Gpu, TorchBuild, chosen
from engine_cuda.gpu_amd import amd_gpus
from engine_cuda.gpu_nvidia import CUDA, NVML, nvidia_gpus
from engine_cuda.machine import Machine, machine
from engine_cuda.torch_build import torch_build

H100, A10 = "NVIDIA H100 80GB HBM3", "NVIDIA A10G"
Load = Callable[[str], ctypes.CDLL]


@pytest.fixture
def drivers(tmp_path: Path) -> Callable[..., Load]:
    """Makes what opens the libraries of a driver. `nvml` and `cuda`: names of their GPUs with compute capabilities,
    None for a library that is not there; `defines`: of both."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")

    def make(nvml: dict[str, int] | None, cuda: dict[str, int] | None = None, **defines: int) -> Load:
        built = {}
        for name, stem, gpus in ((NVML, "nvml", nvml), (CUDA, "cuda", cuda)):
            if gpus is None:
                continue
            built[name] = tmp_path / f"{stem}{len(list(tmp_path.iterdir()))}.so"
            quoted = ",".join(f'"{gpu.partition("#")[0]}"' for gpu in gpus)
            values = {"NAMES": quoted, "MAJORS": ",".join(map(str, gpus.values())), **defines}
            source = Path(__file__).with_name("fakes") / f"{stem}.c"
            flags = [f"-D{key}={value}" for key, value in values.items()]
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", built[name], source, *flags], check=True)

        def load(name: str) -> ctypes.CDLL:
            return ctypes.CDLL(str(built.get(name, "/there/is/none.so")))

        return load

    return make


def test_the_management_library(drivers: Callable[..., Load]) -> None:
    """Names, memory and versions; of equal GPUs those that CUDA_VISIBLE_DEVICES names, in its order."""
    load = drivers({H100: 9, f"{H100}#2": 9, f"{H100}#3": 9})
    found = nvidia_gpus({}, load)
    assert found is not None and (found.installed, found.driver, found.serves) == (3, "580.65.06", (13, 0))
    assert found.visible[1] == Gpu(H100, 80 << 30, 78 << 30, (9, 0)) and found.hidden_by == found.problem == ""
    some = nvidia_gpus({"CUDA_VISIBLE_DEVICES": "2,0"}, load)
    assert some is not None and [gpu.free_bytes for gpu in some.visible] == [77 << 30, 79 << 30]
    assert (some.installed, some.hidden_by) == (3, "CUDA_VISIBLE_DEVICES=2,0")
    named = nvidia_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1"}, load)
    assert named is not None and named.visible == (found.visible[1],)
    none = nvidia_gpus({"CUDA_VISIBLE_DEVICES": ""}, load)
    assert none is not None and none.visible == () and none.hidden_by == "CUDA_VISIBLE_DEVICES="


def test_the_driver_is_asked_where_it_alone_knows(drivers: Callable[..., Load]) -> None:
    """CUDA puts the fastest first, and shows instances of a divided GPU; without it, NVML's word has to do."""
    mixed = {A10: 8, H100: 9}
    both = drivers(mixed, {H100: 9, A10: 8})
    found = nvidia_gpus({}, both)
    assert found is not None and [gpu.name for gpu in found.visible] == [H100, A10]
    assert (found.serves, found.driver, found.visible[0].total_bytes) == ((13, 0), "580.65.06", 10 << 30)
    by_bus = nvidia_gpus({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, both)
    assert by_bus is not None and [gpu.name for gpu in by_bus.visible] == [A10, H100]
    alone = nvidia_gpus({}, drivers(mixed))
    assert alone is not None and [gpu.name for gpu in alone.visible] == [A10, H100]
    divided = nvidia_gpus({}, drivers({H100: 9}, {f"{H100} MIG 1g.10gb": 9}, MIG=1))
    assert divided is not None and divided.visible == (Gpu(f"{H100} MIG 1g.10gb", 10 << 30, None, (9, 0)),)
    only = nvidia_gpus({}, drivers(None, {H100: 9}))
    assert only is not None and (only.visible[0].capability, only.serves, only.installed) == ((9, 0), (12, 8), 1)


def test_drivers_that_cannot_be_asked(drivers: Callable[..., Load]) -> None:
    broken = nvidia_gpus({}, drivers({H100: 9}, {H100: 9}, INIT=18))
    assert broken is not None and broken.problem == "Driver/library version mismatch" and not broken.visible
    unfit = nvidia_gpus({}, drivers(None, {H100: 9}, INIT=803))
    assert unfit is not None and unfit.problem == "system has unsupported driver"
    hidden = nvidia_gpus({"CUDA_VISIBLE_DEVICES": "7"}, drivers(None, {H100: 9}, INIT=100))
    assert hidden is not None and hidden.hidden_by == "CUDA_VISIBLE_DEVICES=7" and not hidden.visible
    assert nvidia_gpus({}, drivers(None)) is None


def test_lists_of_devices() -> None:
    """As CUDA and torch read them."""
    names = ("GPU-aa1", "GPU-ab2", "GPU-b3")
    for text, places in {
        "1": (1,),
        " 2 , 0": (2, 0),
        "0,9,1": (0,),
        "1,1": (),
        "-1": (),
        "0,-1,1": (0,),
        "GPU-b": (2,),
        "gpu-AB2,GPU-aa": (1, 0),
        "GPU-a": (),  # of two
        "": (),
    }.items():
        assert chosen(text, names) == places, text
    assert chosen(None, names) == (0, 1, 2)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A /sys with a processor and three AMD GPUs, of which the last one's own files may not be read."""
    nodes = [(0, 0, 0), (304, 90402, 128), (228, 90010, 129), (96, 110001, 130)]
    for number, (units, target, minor) in enumerate(nodes):
        node = tmp_path / f"class/kfd/kfd/topology/nodes/{number}"
        (node / "mem_banks/0").mkdir(parents=True)
        lines = {
            "simd_count": units,
            "gfx_target_version": target,
            "drm_render_minor": minor,
            "unique_id": 171 + number,
        }
        (node / "properties").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {24 << 30}\n")
    device = tmp_path / "class/drm/renderD128/device"
    device.mkdir(parents=True)
    for name, text in {
        "product_name": "AMD Instinct MI300X\n",
        "mem_info_vram_total": 192 << 30,
        "mem_info_vram_used": 5,
    }.items():
        (device / name).write_text(str(text))
    return tmp_path


def test_files_of_amd(system: Path) -> None:
    found = amd_gpus({}, system)
    assert found is not None and found.installed == 3 and found.hidden_by == ""
    mi300, mi250, radeon = found.visible
    assert mi300 == Gpu("AMD Instinct MI300X (gfx942)", 192 << 30, (192 << 30) - 5, None, "gfx942")
    assert (mi250.target, mi250.total_bytes, mi250.free_bytes, radeon.target) == ("gfx90a", 24 << 30, None, "gfx1101")
    some = amd_gpus({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ae,0", "HIP_VISIBLE_DEVICES": "1"}, system)
    assert some is not None and [gpu.target for gpu in some.visible] == ["gfx942"]
    assert some.hidden_by == "ROCR_VISIBLE_DEVICES=GPU-00000000000000ae,0 and HIP_VISIBLE_DEVICES=1"
    as_cuda = amd_gpus({"CUDA_VISIBLE_DEVICES": "2"}, system)
    assert as_cuda is not None and [gpu.target for gpu in as_cuda.visible] == ["gfx1101"]
    assert amd_gpus({}, system / "class") is None


def test_torch_builds(tmp_path: Path) -> None:
    """Of this torch, as it says itself when it is imported; and of others' version files."""
    found = torch_build()
    assert found is not None and found.version == torch.__version__
    assert (found.cuda is None, bool(found.rocm)) == (torch.version.cuda is None, torch.version.hip is not None)
    lines = "__version__ = '2.11.0{}'\ndebug = False\ncuda: Optional[str] = {}\nhip: Optional[str] = {}\nxpu = None\n"
    for texts, expected in {
        ("+cu130", "'13.0'", "None"): TorchBuild("2.11.0+cu130", (13, 0)),
        ("+rocm7.2", "None", "'7.2.53211-e1a6bc5663'"): TorchBuild("2.11.0+rocm7.2", None, "7.2"),
        ("", "None", "None"): TorchBuild("2.11.0"),
    }.items():
        (tmp_path / "version.py").write_text(lines.format(*texts))
        assert torch_build([str(tmp_path)]) == expected


def test_facts_are_cheap() -> None:
    """In a fresh process: neither torch nor triton comes, and the second question costs nothing."""
    code = (
        "import sys, time, engine_cuda.platform_cuda.card as c; from engine.interfaces.platform import PlatformNeed\n"
        "c.CudaPlatform.unsupported(PlatformNeed()); print(sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert machine() is machine() and machine({"CUDA_VISIBLE_DEVICES": ""}) is not machine({})


def test_what_a_machine_computes_on() -> None:
    h100, mi300 = Gpu(H100, 80 << 30, None, (9, 0)), Gpu("AMD", 1, target="gfx942")
    from engine_cuda.gpu import Gpus

    nvidia = Gpus(maker="NVIDIA", visible=(h100, h100._replace(capability=(8, 6))), installed=2)
    amd = Gpus(maker="AMD", visible=(mi300,), installed=1)
    assert Machine(nvidia, amd, TorchBuild("2.11", (13, 0))).used is nvidia
    assert Machine(nvidia, amd, TorchBuild("2.11", (13, 0))).capability == (8, 6)
    assert Machine(nvidia, amd, TorchBuild("2.11", None, "7.2")).used is amd
    assert Machine(nvidia, amd, TorchBuild("2.11", None, "7.2")).capability is None
    assert Machine(nvidia, None, TorchBuild("2.11+cpu")).used is None

"""What of `make gpu-rehearsal` needs no torch for CUDA: its libraries compile, and keep the rules of captures."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.environment import ROOT
from tests.gpu.rehearsal.__main__ import environment
from tests.gpu.rehearsal.build import NATIVE, Builder, CannotBuild, folders
from tests.gpu.rehearsal.counts import launches, waits
from tests.gpu.rehearsal.exports import declared, exported, stubs
from tests.gpu.rehearsal.report import findings, table, tell, told, troubles

HEADERS = [folder / "backends" / "nvidia" / "include" for folder in folders("triton")]
HAS_ALL = shutil.which("g++") is not None and any((folder / "cuda_runtime_api.h").exists() for folder in HEADERS)
OK, INVALID, UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION = 0, 1, 900, 901, 904, 905
"""cudaError_t."""
GLOBAL, THREAD_LOCAL = 0, 1
"""cudaStreamCaptureMode."""

PROGRAM = """
import ctypes, json, sys
driver, runtime = (ctypes.CDLL(path) for path in sys.argv[1:3])
def made(create, *arguments):
    handle = ctypes.c_void_p()
    assert create(ctypes.byref(handle), *arguments) == 0
    return handle
def stream():
    return made(runtime.cudaStreamCreateWithFlags, 1)  # it does not wait for the default stream
def end(one):
    graph = ctypes.c_void_p()
    return runtime.cudaStreamEndCapture(one, ctypes.byref(graph)), graph
SIZE = ctypes.c_size_t(1024)
memory = made(runtime.cudaMalloc, SIZE)
pinned = made(runtime.cudaHostAlloc, SIZE, 0)
pageable = ctypes.create_string_buffer(b"x" * 1024)
found = {}

one, other, event = stream(), stream(), made(runtime.cudaEventCreateWithFlags, 2)
codes = [runtime.cudaStreamBeginCapture(one, 0), runtime.cudaMemsetAsync(memory, 0, SIZE, one)]
codes += [runtime.cudaEventRecord(event, one), runtime.cudaStreamWaitEvent(other, event, 0)]
codes += [runtime.cudaMemcpyAsync(pinned, memory, SIZE, 2, other), runtime.cudaEventRecord(event, other)]
codes += [runtime.cudaStreamWaitEvent(one, event, 0)]
code, graph = end(one)
ready = made(runtime.cudaGraphInstantiate, graph, ctypes.c_ulonglong(0))
driver.fakegpu_reset()
codes += [code, runtime.cudaGraphLaunch(ready, one), runtime.cudaStreamSynchronize(one)]
driver.fakegpu_dump(sys.argv[3].encode())
found["sound"] = codes

one = stream()
runtime.cudaStreamBeginCapture(one, 0)
found["synchronised"] = [runtime.cudaStreamSynchronize(one), runtime.cudaMemsetAsync(memory, 0, SIZE, one), end(one)[0]]
for name, mode in ("allocated", 0), ("allocated, relaxed", 2):
    one, more = stream(), ctypes.c_void_p()
    runtime.cudaStreamBeginCapture(one, mode)
    found[name] = [runtime.cudaMalloc(ctypes.byref(more), SIZE), end(one)[0]]
one = stream()
runtime.cudaStreamBeginCapture(one, 1)
found["pageable"] = [runtime.cudaMemcpyAsync(memory, pageable, SIZE, 1, one), end(one)[0]]
one, other = stream(), stream()
runtime.cudaEventRecord(event, other)
runtime.cudaStreamBeginCapture(one, 1)
found["waits for what is outside"] = [runtime.cudaStreamWaitEvent(one, event, 0), end(one)[0]]
one, other = stream(), stream()
runtime.cudaStreamBeginCapture(one, 1)
runtime.cudaEventRecord(event, one)
runtime.cudaStreamWaitEvent(other, event, 0)
runtime.cudaMemsetAsync(memory, 0, SIZE, other)
found["not joined"] = [end(one)[0]]
found["past its end"] = [runtime.cudaMemcpyAsync(pinned, memory, ctypes.c_size_t(4096), 2, one)]
found["read"] = pinned.value is not None and ctypes.string_at(pinned, 4).hex()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """What the program above found, what was counted of its graph, and the faults that were told."""
    if not HAS_ALL:
        pytest.skip("needs g++, and the headers that Triton brings")
    folder = tmp_path_factory.mktemp("fake")
    builder = Builder(folder, HEADERS, "-O0")
    driver = builder.driver()
    runtime = builder.library("libcudart.so.13", ("runtime", "runtime_kernels", "runtime_streams"), (), [driver.name])
    log, counts = folder / "findings", folder / "counts"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver), str(runtime), str(counts)],
        env={"FAKEGPU_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    counted = dict(line.rsplit("\t", 1) for line in counts.read_text().splitlines())
    return json.loads(done.stdout), {name: int(count) for name, count in counted.items()}, findings(log)[0]


@pytest.mark.slow  # the compiler takes ten seconds for the libraries
def test_a_sound_capture_is_replayed_as_one_graph(rehearsed):
    found, counted, _ = rehearsed
    assert found["sound"] == [OK] * 10
    assert counted["graphs"] == counted["graph memset"] == counted["graph memcpy DtoH"] == 1
    assert found["read"] == "00000000"  # of device memory, which nothing writes


@pytest.mark.slow
def test_captures_end_as_on_a_device_where_their_rules_are_broken(rehearsed):
    found, _, faults = rehearsed
    assert found["synchronised"] == [UNSUPPORTED, INVALIDATED, INVALIDATED]
    assert found["allocated"] == [UNSUPPORTED, INVALIDATED]
    assert found["allocated, relaxed"] == [OK, OK]
    assert found["pageable"] == [UNSUPPORTED, INVALIDATED]
    assert found["waits for what is outside"] == [ISOLATION, INVALIDATED]
    assert found["not joined"] == [UNJOINED]
    assert found["past its end"] == [INVALID]
    told_of = ("synchronise", "cudaMalloc", "pageable", "outside", "unjoined", "past its allocation")
    assert len(faults) == len(told_of)
    for fault, words in zip(faults, told_of, strict=True):
        assert words in fault


@pytest.mark.skipif(not HAS_ALL, reason="needs g++, and the headers that Triton brings")
def test_stubs_answer_for_what_a_library_has_and_the_fake_does_not(tmp_path):
    names = declared(HEADERS[0] / "cuda.h")
    assert {"cuInit", "cuMemAlloc_v2", "cuLaunchKernelEx"} <= set(names)
    (tmp_path / "stubs.c").write_text(stubs(["cuOne", "cuTwo"]) + "int own(void) { return cuOne() + cuTwo(); }\n")
    library = tmp_path / "libstubs.so"
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", str(tmp_path / "stubs.c"), "-o", str(library)], check=True)
    assert exported(library, "cu") == ["cuOne", "cuTwo"]  # not fk_unsupported, which it only needs


def test_a_compilers_words_are_told(tmp_path, monkeypatch):
    if shutil.which("g++") is None:
        with pytest.raises(CannotBuild, match="install a C"):
            Builder(tmp_path, [])
        return
    monkeypatch.setattr("tests.gpu.rehearsal.build.NATIVE", tmp_path)
    (tmp_path / "wrong.cpp").write_text("int f( {")
    with pytest.raises(CannotBuild, match="expected"):
        Builder(tmp_path, []).library("libwrong.so", ["wrong"])


def test_what_waits_in_decode_steps_fails_and_is_named(tmp_path, capsys):
    counted = {"graphs": 4, "graph triton k": 8, "eager memcpy DtoH pageable": 4, "api cudaEventSynchronize": 4}
    assert launches(counted, 4) == {"graph triton k": 2.0, "eager memcpy DtoH pageable": 1.0}
    assert waits(counted, 4) == {"eager memcpy DtoH pageable": 4}
    assert waits({"api cudaEventSynchronize": 5, "api cudaStreamSynchronize": 1}, 4) == {
        "cudaStreamSynchronize": 1,
        "cudaEventSynchronize": 5,
    }
    tell({"rows": 1, "milliseconds": 0.5, "graphs": 1.0, "launches": launches(counted, 4), "waits": waits(counted, 4)})
    tell({"served": "one", "failed": ["no answer"]})
    found = told(["of a library", *capsys.readouterr().out.splitlines()])
    assert troubles(found) == ["4 x eager memcpy DtoH pageable in decode steps", "no answer"]
    assert troubles([{"rows": 1, "graphs": 0.0}]) == ["0 graphs a decode step"]
    assert any(line.endswith("2.00  graph triton k") for line in table(found))
    (tmp_path / "log").write_text("fault: a\nnote: b\nfault: a\n")
    assert findings(tmp_path / "log") == (["fault: a"], ["note: b"])


def test_a_python_without_cuda_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.rehearsal", "--only", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, "there is no such setting" in done.stdout) == (2, True)
    if runpy.run_path(str(folders("torch")[0] / "version.py"))["cuda"] is not None:
        pytest.skip("this torch is built for CUDA")
    done = subprocess.run([sys.executable, "-m", "tests.gpu.rehearsal"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "for processors alone" in done.stdout
    assert "GPU_PYTHON=" in done.stdout


def test_its_processes_import_the_answers_of_a_sound_gpu(tmp_path):
    paths = environment(tmp_path, [tmp_path / "libcuda.so.1"], {}, lazy=False)["PYTHONPATH"].split(os.pathsep)
    assert all(Path(path).is_dir() for path in paths)
    compared = "import torch; print(torch.equal.__module__, torch.equal(torch.ones(2), torch.zeros(2)))"
    done = subprocess.run(
        [sys.executable, "-c", compared], env={"PYTHONPATH": os.pathsep.join(paths)}, capture_output=True
    )
    assert done.stdout == b"sitecustomize False\n", done.stderr


def test_sources_are_short():
    assert {path.name for path in NATIVE.iterdir() if len(path.read_text().splitlines()) > 300} == set()

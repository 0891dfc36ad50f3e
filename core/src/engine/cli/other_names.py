"""Flags by the names that they have in `vllm serve`, where ours have others: for whoever types those."""

from __future__ import annotations

from collections.abc import Mapping

IN_PLACE_OF: Mapping[str, str] = {
    "--api-server-count": "pass --api-workers",
    "--async-scheduling": "steps overlap by default; --in-flight 1 ends that",
    "--attention-backend": "pass --attention",
    "--disable-access-log-for-endpoints": "no request is logged unless --access-log is passed",
    "--disable-custom-all-reduce": "pass --communicator with those to use",
    "--disable-uvicorn-access-log": "no request is logged unless --access-log is passed",
    "--distributed-executor-backend": "pass --executor",
    "--enable-auto-tool-choice": 'leave it out: "auto" is always allowed; --tool-call-parser names the parser',
    "--enable-chunked-prefill": "leave it out: long prompts are always cut; --max-num-batched-tokens says into what",
    "--enable-log-requests": "pass --access-log",
    "--enable-prompt-tokens-details": "leave it out: answers always tell cached_tokens",
    "--enable-request-id-headers": "leave it out: answers always carry X-Request-Id",
    "--enable-ssl-refresh": "leave it out: certificate and key are read again when they change",
    "--enable-server-load-tracking": "leave it out: GET /load always tells",
    "--enforce-eager": "pass --platform.capture never, where the platform captures steps",
    "--gpu-memory-utilization": "pass --memory-utilization",
    "--guided-decoding-backend": "pass --grammar",
    "--kv-cache-memory-bytes": "pass --kv-cache-memory",
    "--kv-transfer-config": "pass --kv-connector and its options",
    "--log-config-file": "pass --log-format json",
    "--middleware": "a plugin's hook http_middleware does that",
    "--model-loader-extra-config": "pass options of the checkpoint's driver: --load-format.OPTION",
    "--num-gpu-blocks-override": "pass --num-kv-pages",
    "--profiler-config": "pass --profile-dir, and start a profile with POST /admin/profile/start",
    "--return-tokens-as-token-ids": "send return_tokens_as_token_ids with the request",
    "--speculative-config": "pass --drafter and its options",
    "--speculative-model": "pass --drafter and its options",
    "--ssl-cert-reqs": "leave it out: with --ssl-ca-certs clients have to show a certificate",
    "--structured-outputs-config": "pass --grammar and its options",
    "--tool-parser-plugin": "install the parser's package, and name it with --tool-call-parser",
    "--trust-remote-code": "code that comes with a model is never run: install it as a plugin",
}
"""What to do instead."""


def instead_of(flag: str) -> str:
    """What to do in place of passing this flag; "" where nothing is known of it."""
    return IN_PLACE_OF.get(flag.partition(".")[0].replace("_", "-"), "")

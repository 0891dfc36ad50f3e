"""Flags of `vllm serve`, `vllm run-batch` and `vllm chat` that have another name here, or need none: a copied command
runs, and says in one line a flag what became of it. What would mean something else is refused, with what to do."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from engine.types.errors import ConfigError

SAME: Mapping[str, str] = {
    "--api-server-count": "--api-workers",
    "--disable-log-stats": "--no-log-stats",
    "--enforce-eager": "--platform.capture=never",
    "--gpu-memory-utilization": "--memory-utilization",
    "--guided-decoding-backend": "--grammar",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--model-name": "--model",
    "--no-async-scheduling": "--in-flight=1",
    "--num-gpu-blocks-override": "--num-kv-pages",
    "--system-prompt": "--system",
    "--task": "--runner",
    "-asc": "--api-workers",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
}
"""The flag here of the same meaning. One that ends in a value is for a flag that has none there."""


class Needless(NamedTuple):
    """A flag that would change nothing.

    Args:
        why: it would not.
        values: that it may have: None for any one, () for a switch, which has none; with others `REFUSED` has it.
    """

    why: str
    values: Collection[str] | None = None


_MEDIA = "a prompt is text alone"
_LOADED = "nothing is downloaded: a model is a folder, or comes with a package"
_CACHED = "each kind of layer has a table of its own, always"
_REQUESTS = "no request is logged unless --access-log is passed, and its text never"
_COMPILED = "no model is compiled; which steps are captured, options of the platform say"
_LOGPROBS = range(20, 65)  # from the fewest that vLLM lets in by itself to the most that are let in here

NEEDLESS: Mapping[str, Needless] = {
    "--allowed-headers": Needless("origins that are let in may send any", ('["*"]',)),
    "--allowed-local-media-path": Needless(_MEDIA),
    "--allowed-media-domains": Needless(_MEDIA),
    "--allowed-methods": Needless("origins that are let in may use any", ('["*"]',)),
    "--async-scheduling": Needless("steps overlap by default", ()),
    "--chat-template-content-format": Needless("a template gets a message's content as text", ("auto", "string")),
    "--compilation-config": Needless(_COMPILED),
    "--config-format": Needless("models are in Hugging Face's layout", ("auto", "hf")),
    "--cuda-graph-sizes": Needless(_COMPILED),
    "--data-parallel-backend": Needless("each engine core is a process of this machine", ("mp",)),
    "--disable-access-log-for-endpoints": Needless(_REQUESTS),
    "--disable-async-output-proc": Needless("steps overlap; --in-flight 1 ends that", ()),
    "--disable-cascade-attn": Needless("there is no such attention", ()),
    "--disable-frontend-multiprocessing": Needless("the frontend's process is the one that you start", ()),
    "--disable-hybrid-kv-cache-manager": Needless(_CACHED, ()),
    "--disable-log-requests": Needless(_REQUESTS, ()),
    "--disable-log-stats": Needless("no statistics are logged", ()),
    "--disable-mm-preprocessor-cache": Needless(_MEDIA, ()),
    "--disable-uvicorn-access-log": Needless(_REQUESTS, ()),
    "--distributed-executor-backend": Needless("each rank is a process of this machine", ("mp", "uni")),
    "--download-dir": Needless(_LOADED),
    "--enable-auto-tool-choice": Needless('tool_choice "auto" is always allowed', ()),
    "--enable-chunked-prefill": Needless("long prompts are always cut; --max-num-batched-tokens says into what", ()),
    "--enable-prompt-tokens-details": Needless("answers always tell cached_tokens", ()),
    "--enable-reasoning": Needless("thoughts are always parsed; --reasoning-parser names a parser", ()),
    "--enable-request-id-headers": Needless("answers always carry X-Request-Id", ()),
    "--enable-server-load-tracking": Needless("GET /load always tells", ()),
    "--enable-ssl-refresh": Needless("certificate and key are read again when they change", ()),
    "--exclude-tools-when-tool-choice-none": Needless("so it is always", ()),
    "--h11-max-header-count": Needless("headers are bounded already"),
    "--h11-max-incomplete-event-size": Needless("headers are bounded already, and bodies by --max-body"),
    "--hf-token": Needless(_LOADED),
    "--limit-mm-per-prompt": Needless(_MEDIA),
    "--log-error-stack": Needless("errors that nobody foresaw are logged with their tracebacks, always", ()),
    "--logprobs-mode": Needless("log probabilities are those before everything", ("raw_logprobs",)),
    "--max-log-len": Needless(_REQUESTS),
    "--max-logprobs": Needless("requests may ask for up to 64", tuple(map(str, _LOGPROBS))),
    "--max-parallel-loading-workers": Needless("each rank reads its own part of the files"),
    "--max-seq-len-to-capture": Needless(_COMPILED),
    "--media-io-kwargs": Needless(_MEDIA),
    "--mm-processor-cache-gb": Needless(_MEDIA),
    "--mm-processor-kwargs": Needless(_MEDIA),
    "--multi-step-stream-outputs": Needless("every step is streamed"),
    "--no-enable-log-requests": Needless(_REQUESTS, ()),
    "--no-trust-remote-code": Needless("code that comes with a model is never run", ()),
    "--num-scheduler-steps": Needless("steps overlap by default"),
    "--output-tmp-dir": Needless("results are written where they are to be"),
    "--pipeline-parallel-size": Needless("it is one stage", ("1",)),
    "--response-role": Needless("so it is always", ("assistant",)),
    "--show-hidden-metrics-for-version": Needless("no metric is hidden"),
    "--tokenizer-pool-size": Needless("prompts are tokenised by the frontend's threads"),
    "--trust-remote-code": Needless("code that comes with a model is never run; a plugin brings what it needs", ()),
    "--use-tqdm-on-load": Needless("no bar is shown for it", ()),
    "--use-v2-block-manager": Needless(_CACHED, ()),
    "--uvicorn-log-level": Needless("of uvicorn's own messages warnings and errors are logged"),
    "-O": Needless(_COMPILED),
    **{f"-O{level}": Needless(_COMPILED, ()) for level in range(4)},
    "-pp": Needless("it is one stage", ("1",)),
}
"""Taken, and without effect."""

_STAGES = "pass --tensor-parallel-size: a model is not divided into stages"
REFUSED: Mapping[str, str] = {
    "--allow-credentials": "send keys as a bearer token, for which no credentials are needed",
    "--allowed-headers": "leave it out: origins that are let in may send any header",
    "--allowed-methods": "leave it out: origins that are let in may use any method",
    "--attention-backend": "pass --attention",
    "--chat-template-content-format": "leave it out: a template gets a message's content as text",
    "--config-format": "convert the model to Hugging Face's layout",
    "--convert": "pass --runner pooling",
    "--cpu-offload-gb": "pass --quantization, or --tensor-parallel-size: weights stay on the device",
    "--data-parallel-backend": "leave it out: the cores are processes of this machine",
    "--device": "pass --platform",
    "--disable-custom-all-reduce": "pass --communicator with those to use",
    "--distributed-executor-backend": "pass --executor",
    "--enable-log-requests": "pass --access-log: a line for each request, without its text",
    "--enable-lora": "merge the adapter into the model's weights: adapters are not served yet",
    "--enable-metrics": "leave it out: a batch has no metrics; `engine serve` has",
    "--guided-decoding-disable-any-whitespace": "pass --grammar.max_whitespace 0",
    "--guided-decoding-disable-fallback": "pass --grammar with one driver: nothing falls back then",
    "--headless": "leave it out: an engine works on one machine",
    "--hf-overrides": "change config.json in a copy of the model's folder",
    "--kv-transfer-config": "pass --kv-connector and its options",
    "--log-config-file": "pass --log-format json",
    "--logprobs-mode": "leave it out: log probabilities are those before everything",
    "--lora-modules": "merge the adapter into the model's weights: adapters are not served yet",
    "--max-logprobs": "leave it out: requests may ask for up to 64",
    "--max-long-partial-prefills": "pass --long-prefill-token-threshold",
    "--max-num-partial-prefills": "pass --long-prefill-token-threshold",
    "--middleware": "a plugin's hook http_middleware does that",
    "--model-loader-extra-config": "pass options of the checkpoint's driver: --load-format.OPTION",
    "--no-enable-chunked-prefill": "pass --max-num-batched-tokens of at least --max-model-len",
    "--otlp-traces-endpoint": "install a plugin that sends traces, and pass its options: --hooks.PLUGIN.OPTION",
    "--pipeline-parallel-size": _STAGES,
    "--profiler-config": "pass --profile-dir, and start a profile with POST /admin/profile/start",
    "--response-role": "leave it out: an answer's role is assistant",
    "--return-tokens-as-token-ids": "send return_tokens_as_token_ids with the request",
    "--revision": "download that revision, and name its folder",
    "--rope-scaling": "change config.json in a copy of the model's folder",
    "--rope-theta": "change config.json in a copy of the model's folder",
    "--root-path": "have the proxy take the prefix off the path",
    "--scheduler-cls": "pass --scheduling-policy; a policy is a plugin",
    "--speculative-config": "pass --drafter and its options",
    "--speculative-model": "pass --drafter and its options",
    "--ssl-cert-reqs": "leave it out: with --ssl-ca-certs clients have to show a certificate",
    "--structured-outputs-config": "pass --grammar and its options",
    "--tool-parser-plugin": "install the parser's package, and name it with --tool-call-parser",
    "--uds": "pass --host and --port",
    "-pp": _STAGES,
}
"""What to do instead."""

OTHER_COMMANDS: Mapping[str, str] = {
    "collect-env": "engine plugins doctor",
    "complete": "engine generate PROMPT, which loads the model; a server is asked with POST /v1/completions",
}
"""Commands of vLLM's that have another name here."""


def _one_of(names: Mapping[str, str]) -> Callable[[str], list[str]]:
    return lambda text: [names.get(text, text)]


def _count(text: str) -> list[str]:
    """8k is 8,000 and 8K 8,192, as there."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)
    if found is None:
        return [text]
    base = 1000 if found[2].islower() else 1024
    return [str(int(float(found[1]) * base ** ("kmg".index(found[2].lower()) + 1)))]


def _gibibytes(text: str) -> list[str]:
    """A plain number is one of GiB there and of bytes here, of which so few would hold nothing."""
    return [f"{text}GiB"] if re.fullmatch(r"\d{1,4}(\.\d+)?", text) and float(text) else [text]


def _list(text: str) -> list[str]:
    if not text.startswith("["):
        return [text]
    try:
        return [str(part) for part in json.loads(text)]
    except ValueError:
        return [text]


_POOLING = ("embed", "embedding", "classify", "score", "reward")
VALUES: Mapping[str, Callable[[str], list[str]]] = {
    "--allowed-origins": _list,
    "--dtype": _one_of({"half": "float16", "float": "float32"}),
    "--generation-config": _one_of({"vllm": "engine"}),
    "--kv-cache-memory-bytes": _count,
    "--max-model-len": _count,
    "--max-num-batched-tokens": _count,
    "--model-impl": _one_of({"vllm": "auto"}),
    "--prefix-caching-hash-algo": _one_of({"sha256_cbor": "sha256", "xxhash_cbor": "xxhash"}),
    "--swap-space": _gibibytes,
    "--task": _one_of(dict.fromkeys(_POOLING, "pooling")),
}
"""What a flag's value is called here: it may be several, of a flag that is repeated."""


def translate(arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line with the flags and values of vLLM's put into those of here.

    Args:
        arguments: as typed.
        known: the command's own flags, which mean what they mean here.

    Returns:
        The command line, and a line for each flag that was put into another or left out.

    Raises ConfigError for a part of a flag that is refused, as `--speculative-config.method`.
    """
    result: list[str] = []
    notes: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            return [*result, argument, *rest], notes
        typed, equals, value = argument.partition("=")
        flag = typed if "." in typed else typed.replace("_", "-")
        if flag in known:
            ours, needless = flag if flag in VALUES else "", None
        else:
            ours = _here(flag, known)
            needless = None if ours else NEEDLESS.get(flag)
        if not argument.startswith("-") or not (ours or needless):
            if "." in typed and (hint := instead_of(typed.partition(".")[0])):
                raise ConfigError(f"pass {typed}", "there is no such flag", hint)
            result.append(argument)
            continue
        switch = "=" in ours or ours.startswith("--no-") if needless is None else needless.values == ()
        given = [value] if equals else [] if switch or not rest or rest[0].startswith("--") else [rest.popleft()]
        shown = " ".join([flag, *given])
        if needless is None:
            put = [one for text in given for one in VALUES.get(flag, _as_it_is)(text)]
            result += [f"{ours}={one}" for one in put] or [ours]
            if ours != flag or put != given:
                notes.append(f"{shown} is {' '.join([ours, *put])} here")
        elif not given or needless.values is None or given[0] in needless.values:
            notes.append(f"{shown} changes nothing here: {needless.why}")
        else:
            result += [argument, *([] if equals else given)]  # the command will refuse it, with what to do
    return result, notes


def _here(flag: str, known: Collection[str]) -> str:
    ours = SAME.get(flag, "")
    return ours if re.split(r"[.=]", ours)[0] in known else ""


def _as_it_is(text: str) -> list[str]:
    return [text]


def instead_of(flag: str) -> str:
    """What to do in place of passing this flag; "" where nothing is known of it."""
    return REFUSED.get(flag.replace("_", "-"), "")

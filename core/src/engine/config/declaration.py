"""The settings of the engine and of the server, declared once and lightly: name, type, default, help.

The command line's flags, the environment's variables and the config file's keys are made from these tables, without
importing pydantic; `engine.config.settings.EngineConfig` and `engine.config.server.ServerConfig` have the same fields
with their validation, and a test holds each pair together. Points come beside these, from `engine.plugin.points`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREEMPTION_MODES = ("auto", "recompute", "swap")
RUNNERS = ("auto", "generate", "pooling")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: as a keyword; the flag has dashes, the environment's variable is ENGINE_<NAME>.
        type: "text", "integer", "number" (may have a fraction), "boolean", or "bytes" (a number, or "512MiB", "4GB").
        default: None where the engine finds it out.
        help: one line.
        choices: the values that are allowed, where these are few.
        secret: its value is never shown.
        repeatable: its flag may be given several times; in the environment commas stand between the values.
    """

    name: str
    type: Literal["text", "integer", "number", "boolean", "bytes"]
    default: str | int | float | bool | None
    help: str
    choices: tuple[str, ...] = ()
    secret: bool = False
    repeatable: bool = False

    @property
    def flag(self) -> str:
        """The flag as typed, e.g. "--max-num-seqs"."""
        return "--" + self.name.replace("_", "-")


SETTINGS: tuple[Setting, ...] = (
    Setting("model", "text", None, "the model: a folder or a name (default: the installed driver's own)"),
    Setting("tokenizer", "text", None, "a folder with the tokenizer's files (default: the model's)"),
    Setting(
        "chat_template",
        "text",
        None,
        "a file with the chat template, or the template itself (default: the model's own)",
    ),
    Setting(
        "default_chat_template_kwargs",
        "text",
        None,
        """variables for the chat template where a request does not set them, as JSON: '{"enable_thinking": false}'""",
    ),
    Setting(
        "generation_config",
        "text",
        "auto",
        "sampling defaults of requests: auto (the model's generation_config.json), engine (neutral ones), or a folder",
    ),
    Setting(
        "override_generation_config",
        "text",
        None,
        """sampling defaults in place of those of --generation-config, as JSON: '{"temperature": 0.5}'""",
    ),
    Setting(
        "served_model_name",
        "text",
        None,
        "the model's name in the API, or several with commas between (default: --model as given)",
    ),
    Setting("dtype", "text", "auto", "type of weights and activations", choices=DTYPES),
    Setting(
        "kv_cache_dtype",
        "text",
        "auto",
        "type of the KV cache (default: that of activations); fp8 is fp8_e4m3, with scales of 1",
        choices=KV_CACHE_DTYPES,
    ),
    Setting(
        "runner", "text", "auto", "what the engine is for: to write text, or to embed and classify", choices=RUNNERS
    ),
    Setting("max_model_len", "integer", None, "most tokens of one request, prompt and output (default: the model's)"),
    Setting("max_num_seqs", "integer", 256, "most requests that run at once"),
    Setting("max_num_batched_tokens", "integer", 2048, "most tokens that one step computes"),
    Setting("long_prefill_token_threshold", "integer", 0, "most tokens of one prompt in one step; 0: no limit"),
    Setting("block_size", "integer", 16, "tokens in one block of the KV cache"),
    Setting("tensor_parallel_size", "integer", 1, "ranks among which each layer is divided"),
    Setting("data_parallel_size", "integer", 1, "engine cores side by side, each with the whole model"),
    Setting("data_parallel_restarts", "integer", 0, "how often each of several cores is started again when it dies"),
    Setting("kv_cache_memory", "bytes", None, "memory of each rank's KV cache, e.g. 4GiB (default: by a profile)"),
    Setting("num_kv_pages", "integer", None, "pages of the KV cache; goes before --kv-cache-memory"),
    Setting("swap_space", "bytes", 0, "host memory of each rank for pages of preempted requests, e.g. 4GiB"),
    Setting(
        "preemption_mode",
        "text",
        "auto",
        "what becomes of a request that loses its pages; auto: swap where there is swap space, else recompute",
        choices=PREEMPTION_MODES,
    ),
    Setting(
        "memory_utilization",
        "number",
        None,
        "share of the device's memory to take, weights and all; the KV cache gets the rest (default: platform's)",
    ),
    Setting("enable_prefix_caching", "boolean", True, "reuse the KV cache of prompts that begin alike"),
    Setting(
        "prefix_caching_hash_algo",
        "text",
        "xxhash",
        "hash function that names cached blocks; sha256 where users must not forge each other's",
        choices=("xxhash", "sha256"),
    ),
    Setting("enable_jump_forward", "boolean", True, "compute what a constraint forces together, as drafts"),
    Setting("in_flight", "integer", None, "steps under way at once; 1 overlaps nothing (default: 2)"),
    Setting(
        "grammar_warm_up",
        "boolean",
        False,
        "load the library of the first grammar, and start its process, before a request needs them",
    ),
    Setting(
        "step_timeout",
        "number",
        None,
        "seconds without a sign of life after which a core in a process of its own is taken for hung and ended "
        "(default: platform's)",
    ),
    Setting(
        "log_format",
        "text",
        "text",
        "what commands and the processes of the engine log: lines for people, or a JSON object a line",
        choices=("text", "json"),
    ),
    Setting("profile_dir", "text", None, "folder for profiles that are taken while serving (default: none are taken)"),
    Setting("seed", "integer", 0, "seed of the requests that bring none of their own"),
    Setting(
        "plugins",
        "text",
        None,
        "the plugins that may be used, by distribution or POINT:DRIVER, with commas; -NAME denies one (default: all "
        "that are installed)",
        repeatable=True,
    ),
)
"""Every setting of the engine, in the order in which they are listed."""

SERVER_SETTINGS: tuple[Setting, ...] = (
    Setting("host", "text", "127.0.0.1", "address to listen on"),
    Setting("port", "integer", 8000, "port to listen on; 0 takes a free one"),
    Setting(
        "api_workers",
        "integer",
        1,
        "API processes in front of the engine, where one is not fast enough to hand out its tokens",
    ),
    Setting(
        "api_worker_timeout",
        "number",
        60.0,
        "seconds without a sign of life after which one of several API processes is taken for hung, ended and replaced",
    ),
    Setting(
        "api_key",
        "text",
        None,
        "a key that clients have to send as a bearer token; may be repeated (default: none is asked for)",
        secret=True,
        repeatable=True,
    ),
    Setting("api_key_file", "text", None, "a YAML file with further keys and their limits; read again when it changes"),
    Setting(
        "admin_key",
        "text",
        None,
        "the key of the routes under /admin, which no API key opens (default: these routes are refused)",
        secret=True,
    ),
    Setting("requests_per_minute", "integer", None, "most requests a minute with one API key (default: no limit)"),
    Setting("max_concurrent_requests", "integer", None, "most requests at once with one API key (default: no limit)"),
    Setting(
        "share_prefix_cache",
        "boolean",
        False,
        "let requests with different API keys find each other's cached prompts, whose times then tell of them",
    ),
    Setting(
        "enable_force_include_usage",
        "boolean",
        False,
        "end every stream with an event that counts tokens, as if each asked for it with include_usage",
    ),
    Setting("ssl_certfile", "text", None, "a PEM file with the server's certificate: serve HTTPS (default: HTTP)"),
    Setting("ssl_keyfile", "text", None, "a PEM file with the certificate's key (default: it stands in the same file)"),
    Setting("ssl_ca_certs", "text", None, "a PEM file: clients have to show a certificate signed by one of these"),
    Setting(
        "allowed_origins",
        "text",
        None,
        "a web page's origin whose scripts may call the server, e.g. https://chat.example, or * for any; may be "
        "repeated (default: none)",
        repeatable=True,
    ),
    Setting("max_queue", "integer", 8192, "most sequences that wait for a place; what comes then is refused (429)"),
    Setting("max_body", "bytes", 8 * 2**20, "largest body of a request, e.g. 64MiB; larger ones are refused (413)"),
    Setting(
        "response_store_size",
        "bytes",
        256 * 2**20,
        "most memory for the responses that /v1/responses keeps; the oldest make way; 0 keeps none",
    ),
    Setting("response_store_time", "number", 86400.0, "seconds that /v1/responses keeps a response"),
    Setting("body_timeout", "number", 60.0, "seconds in which a request's body has to arrive (else 408)"),
    Setting("header_timeout", "number", 20.0, "seconds in which a request's headers have to arrive"),
    Setting(
        "write_timeout", "number", 60.0, "seconds that a client may take nothing of its answer before it is cut off"
    ),
    Setting("max_connections", "integer", 16384, "most connections that are open; what comes then is refused (503)"),
    Setting("access_log", "boolean", False, "write one line to standard error for each request"),
    Setting("log_stats", "boolean", True, "while there is work, write a line of statistics every 10 seconds"),
    Setting("verbose", "boolean", False, "tell at the start all that was decided: the drivers at work, and why"),
    Setting("shutdown_timeout", "number", 10.0, "seconds that requests in progress get to finish after SIGTERM"),
)
"""Every setting of `engine serve` beside the engine's own; no name may be one of the engine's or a point's."""

SETTINGS_BY_NAME = {setting.name: setting for setting in SETTINGS}
SERVER_SETTINGS_BY_NAME = {setting.name: setting for setting in SERVER_SETTINGS}

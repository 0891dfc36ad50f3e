"""The settings of `engine serve` beside the engine's own. Light: `engine_server.config` validates them."""

from __future__ import annotations

from pathlib import Path

from engine.embedding import Settings, setting

VLLM_FLAGS = Path(__file__).with_name("vllm_flags.toml")
"""What becomes of flags of vLLM's server, see `engine_kit.vllm_flags`."""


class ServerSettings(Settings):
    """No name may be one of the engine's or a point's."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=65535)
    api_workers: int = setting(
        1,
        "API processes in front of the engine, where one is not fast enough to hand out its tokens",
        least=1,
        most=256,
    )
    api_worker_timeout: float = setting(
        60.0,
        "seconds without a sign of life after which one of several API processes is taken for hung, ended and replaced",
        least=2,
    )
    api_key: tuple[str, ...] | None = setting(
        None,
        "a key that clients have to send as a bearer token; may be repeated (default: none is asked for)",
        secret=True,
        repeatable=True,
        least=1,
    )
    api_key_file: str | None = setting(
        None, "a YAML file with further keys and their limits; read again when it changes"
    )
    admin_key: str | None = setting(
        None,
        "the key of the routes under /admin, which no API key opens (default: these routes are refused)",
        secret=True,
        least=1,
    )
    requests_per_minute: int | None = setting(
        None, "most requests a minute with one API key (default: no limit)", least=1
    )
    max_concurrent_requests: int | None = setting(
        None, "most requests at once with one API key (default: no limit)", least=1
    )
    share_prefix_cache: bool = setting(
        False, "let requests with different API keys find each other's cached prompts, whose times then tell of them"
    )
    enable_force_include_usage: bool = setting(
        False, "end every stream with an event that counts tokens, as if each asked for it with include_usage"
    )
    ssl_certfile: str | None = setting(None, "a PEM file with the server's certificate: serve HTTPS (default: HTTP)")
    ssl_keyfile: str | None = setting(
        None, "a PEM file with the certificate's key (default: it stands in the same file)"
    )
    ssl_ca_certs: str | None = setting(None, "a PEM file: clients have to show a certificate signed by one of these")
    allowed_origins: tuple[str, ...] | None = setting(
        None,
        "a web page's origin whose scripts may call the server, e.g. https://chat.example, or * for any; may be "
        "repeated (default: none)",
        repeatable=True,
        least=1,
    )
    kv_role: str | None = setting(
        None,
        "what this server does for others by its KV connector (--kv-connector.role): prefill computes prompts for "
        "them, decode goes on from theirs, both does either",
        choices=("prefill", "decode", "both"),
    )
    lora_modules: tuple[str, ...] | None = setting(
        None,
        "adapters that are served from the start, each as a model: NAME=PATH, with commas; may be repeated "
        "(needs --adapter)",
        repeatable=True,
        least=1,
    )
    lora_dir: str | None = setting(
        None,
        "the folder from which clients may have adapters loaded, by /v1/load_lora_adapter (default: they may not)",
    )
    prompt_adapters: tuple[str, ...] | None = setting(
        None,
        "embeddings of PEFT's prompt tuning that stand before prompts, each as a model: NAME=PATH, with commas; may be "
        "repeated (needs --enable-prompt-embeds)",
        repeatable=True,
        least=1,
    )
    max_queue: int = setting(8192, "most sequences that wait for a place; what comes then is refused (429)", least=0)
    max_body: int = setting(
        8 * 2**20, "largest body of a request, e.g. 64MiB; larger ones are refused (413)", type="bytes"
    )
    response_store_size: int = setting(
        256 * 2**20,
        "most memory for the responses that /v1/responses keeps; the oldest make way; 0 keeps none",
        type="bytes",
        least=0,
    )
    response_store_time: float = setting(86400.0, "seconds that /v1/responses keeps a response", above=0)
    body_timeout: float = setting(60.0, "seconds in which a request's body has to arrive (else 408)", above=0)
    header_timeout: float = setting(20.0, "seconds in which a request's headers have to arrive", above=0)
    write_timeout: float = setting(
        60.0, "seconds that a client may take nothing of its answer before it is cut off", above=0
    )
    max_connections: int = setting(16384, "most connections that are open; what comes then is refused (503)", least=1)
    access_log: bool = setting(False, "write one line to standard error for each request")
    log_stats: bool = setting(True, "while there is work, write a line of statistics every 10 seconds")
    verbose: bool = setting(False, "tell at the start all that was decided: the drivers at work, and why")
    shutdown_timeout: float = setting(10.0, "seconds that requests in progress get to finish after SIGTERM", least=0)

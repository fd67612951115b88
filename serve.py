"""Serve a checkpoint over an OpenAI-compatible HTTP API, with a chat page.

    python serve.py --checkpoint checkpoints/smollm2-135m
"""
from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from functools import partial
from ipaddress import ip_address

# torch is imported only after the options have been parsed, so that --help is fast.
from common.cli import STARTED, Options, command, is_distributed, is_main_rank, log_stderr, within
from common.errors import InputError
from engine.drafting import AUTO, DraftOptions, add_drafting

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # an Origin header


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT [options]")
    add, on_off = p.add_argument, argparse.BooleanOptionalAction
    p.add_checkpoint("converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    add("--verify", action=on_off,
        help="check weights against the SHA-256 in config.json before loading (default: --verify)")

    add = p.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=within(0, 65535), default=8000, help="port (default 8000); 0 picks a free one")
    add("--api-key", help="API key that clients must send (default: EAGLE_API_KEY, or none)")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="allowed origin for requests from browsers; may be repeated")
    add("--model-name", action="append", default=[], metavar="NAME",
        help="name of the model in requests (default: the folder's name); may be repeated")
    # torchrun sends SIGKILL 30 seconds after SIGTERM.
    add("--grace", type=within(0, 1e6, float), default=20.0 if is_distributed() else 30.0, metavar="SECONDS",
        help="time for running requests to finish after SIGTERM or Ctrl-C (default 30; under torchrun 20)")

    add = p.add_argument_group("requests").add_argument
    add("--slots", type=within(1, 256),
        help="batch slots: requests decoded concurrently (default 4 on a CPU, 16 on a GPU, fewer if memory is"
        " short)")
    add("--queue", type=within(0, 1_000_000), default=64,
        help="maximum number of queued requests; further ones get status 429 (default 64)")
    add("--max-tokens", type=within(1, 1 << 20), default=2048,
        help="max_tokens of requests that do not set it (default 2048)")
    add("--time-limit", type=within(0.1, 1e9, float), default=600.0, metavar="SECONDS",
        help="time limit of a request, queueing included (default 600)")
    add("--max-body", type=within(1, 1 << 30), default=4 << 20, metavar="BYTES",
        help="maximum size of a request body (default 4 MiB)")
    add("--per-request-metrics", action="store_true",
        help="add speculative decoding metrics to every response, as in vLLM")
    add("--quiet", action="store_true", help="do not log requests")
    p.reject_if(lambda args: any(not ORIGIN.fullmatch(origin) for origin in args.cors),
             lambda args: f"--cors {' '.join(args.cors)}: expected *, or an origin such as https://host or"
                       " http://host:8080")
    p.reject_if(lambda args: args.api_key == "", lambda args: "--api-key: is empty; pass a key")
    p.add_rule(key_of)
    add_drafting(p, AUTO)
    p.add_runtime()
    return p


def key_of(args) -> str | None:
    """Return the API key, if any. Raises InputError if it is not valid in an HTTP header."""
    key = args.api_key or os.environ.get("EAGLE_API_KEY") or None
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        source = "--api-key" if args.api_key else "EAGLE_API_KEY"
        raise InputError(f"{source}: not valid in an HTTP header; use printable ASCII characters")
    return key


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, which refuses connections until `listen`: until the model is ready.

    Raises InputError if the address is not available.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except (OSError, UnicodeError) as e:  # UnicodeError: invalid host names
        reason = getattr(e, "strerror", e)
        raise InputError(f"--host {host} --port {port}: {reason}; choose another --port") from None


def run(args) -> None:
    """Serve until a signal ends it, as one process or as one of several ranks.

    Raises InputError, ValueError and OSError on bad input.
    """
    from engine.target import open_runtime

    listener = bind(args.host, args.port) if is_main_rank() else None  # fail before loading
    with open_runtime(args, DraftOptions.from_options(args).tree) as (runtime, ranks):
        start(args, runtime, listener, ranks)


def start(args, runtime, listener: socket.socket | None, ranks=None) -> None:
    """Load and serve. listener: None except on rank 0. Raises as `run`."""
    from engine.sampling import Sampling
    from llm import LLM
    from server.app import Server, make_app
    from server.metrics import Metrics
    from server.ranks import Channel, Leader, follow
    from server.run import largest_engine, serve
    from server.worker import Worker

    slots = args.slots or (16 if runtime.device_name.startswith("cuda") else 4)
    make_engine = partial(largest_engine, min_batch=slots if args.slots or ranks else 1)
    llm = LLM(args.checkpoint, DraftOptions.from_options(args), batch_size=slots,
              max_seq_len=args.max_seq_len, log=log_stderr, ranks=ranks, verify=args.verify,
              make_engine=make_engine, **vars(runtime))
    engine, checkpoint = llm.engine, llm.target.checkpoint
    batch = engine.batch
    if llm.tokenizer is None:
        raise InputError(f"{checkpoint}: has no tokenizer files, which serving needs; copy them there")
    log_stderr(f"loaded {checkpoint}; KV cache of {batch} x {engine.runner.cache_slots} tokens,"
               f" up to {engine.runner.cache_bytes / 1e9:.2f} GB")
    engine.warm_up(Sampling(), Sampling(temperature=1.0), exhaustive=True)
    for is_sampled, temperature in (False, "temperature 0"), (True, "temperature > 0"):
        if line := engine.scheduler.describe(is_sampled):
            log_stderr(f"{temperature}: {line}")
    if ranks:
        channel = Channel()
        if listener is None:
            follow(engine, channel)
            return
        engine = Leader(engine, channel)
    names = tuple(args.model_name) or (checkpoint.resolve().name,)
    worker = Worker(engine, Metrics(names[0], batch, engine.runner.max_commit), args.queue)
    server = Server(worker, llm.tokenizer, names, args.time_limit, args.per_request_metrics, args.max_tokens)
    host, port = listener.getsockname()[:2]
    key = key_of(args)
    if not llm.tokenizer.has_template:
        log_stderr("warning: this model has no chat template: only /v1/completions works")
    if key is None and not ip_address(host).is_loopback:
        log_stderr(f"warning: --host {args.host} without --api-key: anyone who reaches this port can use it")
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    listener.listen()
    log_stderr(f"ready after {time.perf_counter() - STARTED:.1f} s: {url}")
    app = make_app(server, key, args.cors, args.max_body, None if args.quiet else log_stderr)
    serve(app, worker, listener, args.grace)
    if ranks:
        engine.end()


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())

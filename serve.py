"""Serve a converted checkpoint over HTTP, in OpenAI's form, with a page to chat on.

    python serve.py --checkpoint checkpoints/smollm2-135m --speculate eagle3
"""
from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

# Nothing here imports torch before it is needed: --help and mistakes answer at once.
from checkpoint.folder import known_config, read_config
from common.cli import Options, command, count, note
from common.errors import InputError
from common.torchrun import command_in_words, is_first, one_voice, several
from drafters import METHODS, TreeSpec, add_flags, add_window, method_name, read_flags, read_tree

STARTED = time.perf_counter()
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # as browsers send it


def parser() -> Options:
    """The options of the command line, each with its rules."""
    p = Options(__doc__)
    add, refuse, on_off = p.add_argument, p.refuse, argparse.BooleanOptionalAction
    add("--checkpoint", required=True,
        help="converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    add("--verify", action=on_off,
        help="check first that weights have the sha256 of their config.json (default: where it has one)")

    add = p.add_argument_group("requests").add_argument
    add("--slots", type=int, help="requests decoded at once (default 4 on a CPU, 16 on a GPU)")
    add("--queue", type=count, default=64, help="requests that may wait (default 64)")
    add("--max-seq-len", type=int, help="prompt and output together (default 2048, or the model's maximum)")
    add("--time-limit", type=float, default=600.0, metavar="SECONDS",
        help="that a request may take, waiting included (default 600)")
    add("--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request (default 4 MB)")
    p.within("--slots", 1, 256)
    p.within("--queue", 0, 1_000_000)
    p.within("--max-seq-len", 2, float("inf"))
    p.within("--time-limit", 0.1, 1e9)
    p.within("--max-body", 1, 1 << 30)

    add = p.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", help="that requests have to bring (default: EAGLE_API_KEY, or none)")
    add("--cors", action="append", default=[], metavar="ORIGIN",
        help="of pages that may call the server from a browser; may be repeated")
    add("--model-name", action="append", default=[], metavar="NAME",
        help="the model is called so in requests (default: the folder's name); may be repeated")
    p.refuse(lambda o: any(not ORIGIN.fullmatch(origin) for origin in o.cors),
             lambda o: f"--cors {' '.join(o.cors)}: an origin is *, or such as https://host or http://host:8080")
    # torchrun kills its processes 30 seconds after it has told them to end.
    add("--grace", type=float, default=20.0 if several() else 30.0, metavar="SECONDS",
        help="that running requests get to end after SIGTERM or Ctrl-C (default 30; under torchrun 20)")
    p.within("--port", 0, 65535)
    p.within("--grace", 0, 1e6)

    group = p.add_argument_group("drafting")
    add = group.add_argument
    how = "; ".join(f"{name}, {method.what}" for name, method in METHODS.items() if method)
    add("--speculate", type=method_name, default="none", metavar="METHOD",
        help=f"none: not at all (default); {how}. Two with a plus, such as lookup+eagle3, draft one tree")
    add("--draft", help="folder of the head (default CHECKPOINT/KIND, eagle for EAGLE-2 too) or draft model")
    add("--tree", metavar="SPEC", help="as for generate.py; the default shrinks as slots fill")
    add("--coupled", action=on_off, default=True, help="draft with the target's sampling noise")
    add("--draft-int8", action=on_off, default=True, help="on our kernels, quantise a 16-bit head at loading")
    add("--shard-head", action="store_true",
        help="with torchrun: deal the head, or the draft model, among the ranks too; else each has it whole")
    add_flags(group)
    p.judge(lambda o: read_flags(o, [o.speculate]))
    add_window(group, p, lambda o: [o.speculate])
    refuse(lambda o: o.shard_head and not (several() and o.speculate != "none"),
           lambda o: "--shard-head: deals what drafts among ranks; add --speculate, and start with torchrun")
    refuse(lambda o: o.draft and o.speculate == "none",
           lambda o: f"--draft {o.draft}: plain decoding uses no head; add --speculate eagle3")
    refuse(lambda o: o.tree and o.speculate == "none",
           lambda o: f"--tree {o.tree}: plain decoding drafts no tree; add --speculate")
    p.add_runtime()
    return p


def key_of(o) -> str | None:
    """The key that requests have to bring, None if they need none. Raises InputError on one that no header
    can hold.
    """
    key = o.api_key or os.environ.get("EAGLE_API_KEY") or None
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        where = "--api-key" if o.api_key else "EAGLE_API_KEY"
        raise InputError(f"{where}: holds what a header of HTTP cannot; take signs of ASCII")
    return key


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises InputError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except UnicodeError:  # of the encoding of host names
        raise InputError(f"--host {host}: is no name of a machine and no address") from None
    except OSError as e:
        if isinstance(e, socket.gaierror):
            raise InputError(f"--host {host}: {e.strerror}; give an address of this machine") from None
        why = "another process listens there" if e.errno == 98 else e.strerror or str(e)
        raise InputError(f"--host {host} --port {port}: {why}; choose another port with --port") from None
    return listener


def run(o) -> int:
    """Serve until a signal says otherwise. Returns the exit status.

    Raises InputError, ValueError and OSError on bad input.
    """
    from kernels.isa import choose

    known_config(o.checkpoint, o.max_seq_len)
    if o.draft:
        read_config(o.draft, what="--draft")
    tree = read_tree(o.tree)
    if o.isa:
        choose(o.isa)
    key_of(o)
    listener = listen(o.host, o.port) if is_first() else None  # before seconds are spent on loading
    if not several():
        return start(o, tree, listener)
    from engine.runtime import Runtime
    from kernels.tp import joined, own_device

    device = Runtime(o.device).device_name
    with joined(device, o.shard_head) as ranks:
        ranks.agree_on(command_in_words(o, tree), own_device(device))
        return start(o, tree, listener, ranks)


def start(o, tree: TreeSpec, listener: socket.socket | None, ranks=None) -> int:
    """Load and serve, alone or as one of several ranks, of which the first listens. As `run` otherwise."""
    from checkpoint.convert import converted_folder
    from checkpoint.folder import verify
    from common.threads import use_threads
    from engine.api import Drafting, load_target
    from engine.runtime import Runtime, check_device
    from kernels.tp import own_device
    from server.app import Server, Settings, make_app
    from server.metrics import Metrics
    from server.ranks import Leader, Orders, follow
    from server.run import serve
    from server.worker import Worker

    use_threads(o.threads, note)
    runtime = Runtime(o.device, o.dtype, o.compile, o.kernels, False, o.isa, o.kv)
    if ranks:
        runtime = replace(runtime, device=own_device(runtime.device_name))
        read_config(o.checkpoint, "target")  # ranks do not convert: they would all write one folder
    check_device(runtime.device_name)
    checkpoint = converted_folder(o.checkpoint, note)
    if o.verify is not False:
        verify(checkpoint, o.draft, bool(o.verify), note)
    flags = read_flags(o, [o.speculate])[o.speculate]
    drafting = Drafting(
        o.speculate, o.draft, tree, coupled=o.coupled, int8=o.draft_int8, flags=flags, window=o.draft_window
    )
    places = o.slots or (16 if runtime.device_name.startswith("cuda") else 4)
    target = load_target(checkpoint, runtime, note, ranks)
    if target.tokenizer is None:
        raise InputError(f"{checkpoint}: has no tokenizer, which serving needs; copy its files there")
    seats = target.seats(drafting, places=places, max_seq_len=o.max_seq_len)
    note(
        f"loaded {checkpoint}; caches of {places} x {seats.slots} slots: {seats.cache_bytes / 1e9:.2f} GB"
    )
    seats.warm_up()
    if ranks:
        orders = Orders()
        if listener is None:
            follow(seats, orders)
            return 0
        seats = Leader(seats, orders)
    names = tuple(o.model_name) or (Path(checkpoint).resolve().name,)
    metrics = Metrics(names[0], places, seats.window)
    worker = Worker(seats, target.tokenizer, metrics, o.queue)
    if ranks:
        worker.lost = orders.lost
    settings = Settings(names, seats.max_seq_len, key_of(o), tuple(o.cors), o.max_body, o.time_limit)
    app = make_app(Server(worker, metrics, target.tokenizer, settings, target.guide))
    host, port = listener.getsockname()[:2]
    where = f"[{host}]" if ":" in host else host
    ready = f"ready {time.perf_counter() - STARTED:.1f} s after the start: http://{where}:{port}"
    status = serve(app, worker, listener, o.grace, lambda: note(ready))
    if ranks:
        seats.end()
    return status


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    with one_voice() as voices:
        return command(parser(), argv, run, ValueError, OSError, **voices)


if __name__ == "__main__":
    sys.exit(main())

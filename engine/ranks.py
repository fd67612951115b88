"""The start of a command that torchrun runs in several processes, the ranks that share a target."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from checkpoint.load import known_config
from common.torchrun import shared_options
from engine.runtime import Runtime
from kernels.tp import Ranks, local_device, process_group


@contextlib.contextmanager
def join_ranks(o, *read: object) -> Iterator[tuple[Runtime, Ranks]]:
    """Join the ranks that torchrun has started, see `engine.runtime.started`."""
    runtime = Runtime.from_options(o)
    runtime = replace(runtime, device=local_device(runtime.device_name))
    runtime.prepare()
    known_config(o.checkpoint, o.max_seq_len)
    with process_group(runtime.device_name, getattr(o, "shard_head", False)) as ranks:
        ranks.check_equal(shared_options(o, *read), runtime.device_name)
        yield runtime, ranks

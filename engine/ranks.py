"""Join the tensor-parallel ranks that torchrun has started."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from checkpoint.load import read_config_if_converted
from common.torchrun import shared_options
from engine.target import Runtime
from kernels.tp import Ranks, local_device, process_group


@contextlib.contextmanager
def join_ranks(args, *contents: object) -> Iterator[tuple[Runtime, Ranks]]:
    """Join the process group of torchrun and yield the runtime and the ranks. See `open_runtime`."""
    runtime = Runtime.from_options(args)
    runtime = replace(runtime, device=local_device(runtime.device_name))
    runtime.prepare()
    read_config_if_converted(args.checkpoint, args.max_seq_len)
    with process_group(runtime.device_name, getattr(args, "shard_head", False)) as ranks:
        ranks.check_equal(shared_options(args, *contents), runtime.device_name)
        yield runtime, ranks

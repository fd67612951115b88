"""A parallel map with a bounded number of results in memory."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")
MAX_WORKERS = 8  # also limited by torch.get_num_threads(); each holds a result in memory


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield function(item) for each item in order, computed by up to MAX_WORKERS threads.

    At most one more result is waiting. Until the end, PyTorch uses one thread, also in the caller.
    """
    import torch

    threads, futures = torch.get_num_threads(), deque[Future[Result]]()
    workers = min(threads, MAX_WORKERS)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for item in items:
                futures.append(pool.submit(function, item))
                if len(futures) > workers:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
    finally:
        torch.set_num_threads(threads)

"""A parallel map over few results at a time."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")
MAX_WORKERS = 8  # each holds a result, such as a tensor


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield function(item) for each item in order, computed by PyTorch's number of threads or MAX_WORKERS.

    One more result waits. PyTorch computes each call, and the caller's work in between, with one thread.
    """
    import torch

    count, waiting = torch.get_num_threads(), deque[Future[Result]]()
    workers = min(count, MAX_WORKERS)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(count)

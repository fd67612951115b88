"""Fixtures: a server, and plain decoding with the same model in this process."""
from collections.abc import Callable
from functools import partial

import pytest
from helpers.serving import Serving, serving


@pytest.fixture(scope="session")
def server(golden, tmp_path_factory) -> Serving:
    """The golden target with its EAGLE-3 head: three slots, a queue of five, a context of 300 tokens."""
    options = "--speculate", "eagle3", "--tree", "16,3,4", "--slots", "3", "--queue", "5"
    options += "--max-tokens", "120"
    options += "--max-seq-len", "300", "--model-name", "golden"
    with serving(golden, tmp_path_factory.mktemp("server") / "log", *options) as server:
        yield server
    # "destroyed": asyncio's "Task was destroyed but it is pending!".
    assert "Traceback" not in server.printed() and "destroyed" not in server.printed()


@pytest.fixture(scope="session")
def plain(llm) -> Callable:
    """A function (prompt, **sampling) -> the engine's request, decoded without speculation at temperature 1.
    """
    return partial(llm.generate, max_new_tokens=40, temperature=1.0)

"""A server for the tests of this folder, and the same model decoding plainly in this process."""
from collections.abc import Callable

import pytest
from helpers.serving import Serving, serving

TREE = ("--speculate", "eagle3", "--tree", "16,3,4")


@pytest.fixture(scope="session")
def server(golden, tmp_path_factory) -> Serving:
    """The golden target with its EAGLE-3 head: three places, a queue of five, 300 tokens."""
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--slots", "3", "--queue", "5", "--max-seq-len", "300", "--model-name", "golden")
    with serving(golden, log, *TREE, *options) as running:
        yield running
    assert "Traceback" not in running.printed() and "destroyed" not in running.printed()


@pytest.fixture(scope="session")
def plain(golden) -> Callable:
    """A function (prompt, **sampling) -> the engine's request, decoded without drafts at temperature 1."""
    from engine.prompt import encode
    from engine.runtime import Runtime
    from engine.target import load_target
    from sampling.options import Sampling

    target = load_target(golden, Runtime(compile=False))
    engine = target.engine(max_seq_len=300)

    def decode(prompt, raw=False, **sampling):
        options = Sampling(**{"max_new_tokens": 40, "temperature": 1.0, **sampling})
        return engine.generate([encode(target.tokenizer, prompt, raw=raw)], options)[0]

    return decode

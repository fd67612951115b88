"""A server for the tests of this folder."""
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
    assert "Traceback" not in running.said() and "destroyed" not in running.said()


@pytest.fixture(scope="session")
def alone(golden):
    """The golden target in this process, decoding plainly."""
    from helpers.decoding import load

    return load(golden, compile=False, max_seq_len=300)

"""Training on several processes and machines: the text, the losses and the head of one, also after a kill."""
from pathlib import Path

import pytest
import torch
from helpers.launching import Launch
from helpers.training import log_of, options
from safetensors.torch import load_file

import train

pytestmark = pytest.mark.slow
# Short, as every process has to begin: two shards of text, a dozen steps.
RUN = {
    "log-every": 1, "clip": 1e5, "synthesize": 0, "epochs": 2, "steps": 2, "save-seconds": 0, "limit": 20,
    "decode-batch": 1, "max-new-tokens": 16, "batch-tokens": 200, "validate-prompts": 1, "tree": "4,1,3",
}


def text_of(folder: Path) -> dict[str, str]:
    """What the shards of a run hold, by their names; nothing else is beside them."""
    return {path.name: path.read_text() for path in (folder / "work" / "data").iterdir()}


def check_same(a: Path, b: Path) -> None:
    """Two runs have the same text, losses and gradients, acceptance lengths, and heads."""
    assert text_of(a) == text_of(b)
    first, second = log_of(a / "work"), log_of(b / "work")
    assert len(first) == len(second) > 6
    for x, y in zip(first, second):
        assert x["step"] == y["step"] and x.keys() == y.keys()
        assert y.get("loss", 0) == pytest.approx(x.get("loss", 0), rel=1e-4)
        assert y.get("norm", 0) == pytest.approx(x.get("norm", 0), rel=1e-3)
        assert y.get("tau", 0) == pytest.approx(x.get("tau", 0), rel=0.1)
    x, y = (load_file(folder / "head" / "model.safetensors") for folder in (a, b))
    for name in x:
        torch.testing.assert_close(x[name].float(), y[name].float(), rtol=0.02, atol=2e-3)


def test_a_run_that_loses_processes_twice_and_goes_on_with_others(golden, prompt_file, tmp_path):
    """Two machines with a process each, one of which dies while it writes, then while it trains; four
    processes go on, to two and two of which the target is dealt.
    """
    assert train.main(options(golden, prompt_file, tmp_path / "one", **RUN)) == 0
    many = tmp_path / "many"
    command = ["train.py", *options(golden, prompt_file, many, **RUN)]
    data, log = many / "work" / "data", many / "work" / "log.jsonl"

    def answers() -> list[str]:
        return [line for path in data.glob("*.answers") for line in path.read_text().splitlines()]

    launch = Launch(command, machines=2, each=1)
    launch.kill_one(answers)  # at the first; on a busy machine the others may have ended by the kill
    assert all(launch.end()[0])
    launch = Launch(command, machines=2, each=1)
    launch.kill_one(lambda: log.exists() and log.read_text().count("\n") > 2)
    codes, said = launch.end()
    assert all(codes) and not (many / "head").exists()
    assert "has lost another one, so all end; run the same command again to go on" in said
    launch = Launch([*command, "--target-ranks", "2"], machines=1, each=4)
    codes, said = launch.end()
    assert codes == [0], said
    assert "2 ranks: each holds at most" in said and "resumed at step" in said
    check_same(tmp_path / "one", many)

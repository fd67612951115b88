"""One decoder for many requests, each compared with a fresh one: the short version of the benchmark."""
import json

import long_life
import pytest
from helpers.refusals import refused

from engine.api import Drafting, load_target
from engine.runtime import Runtime


@pytest.fixture(scope="module")
def target(golden):
    return load_target(golden, Runtime(compile=False))


@pytest.mark.slow
@pytest.mark.parametrize("method, tree", [("eagle3", "8,2,3"), ("lookup", None), ("none", None)])
def test_a_long_life_is_as_a_new_one(target, method, tree):
    life = long_life.live(target, Drafting(method, tree=tree), 60, 400, seed=7)
    life.check()
    assert sum(life.asked.values()) == len(life.memory) == 60 and life.tokens > 200
    assert {kind.split(",")[0] for kind in life.asked} == {"ids", "text", "chat", "chat after a reset"}
    assert any("left" in kind for kind in life.asked)


def test_another_text_is_told(target, monkeypatch):
    """A decoder that keeps something of the text before."""
    decode, seen = long_life.decode, []

    def keeping(decoder, prompt, sampling, reuse, left):
        seen.append(decoder)
        return decode(decoder, prompt, sampling, reuse, left) + [7] * (len(seen) == 3)

    monkeypatch.setattr(long_life, "decode", keeping)
    life = long_life.live(target, Drafting(), 4, 400)
    with refused("1 texts are not those of a fresh decoder: {'number': 3"):
        life.check()


@pytest.mark.parametrize("memory, files, words", [
    ([10**9] * 50 + [2 * 10**9] * 50, [5] * 100, "memory grew by 1000 MB"),
    ([10**9] * 100, [5] * 50 + [7] * 50, "2 files more are open"),
])
def test_growth_is_told(memory, files, words):
    with refused(words):
        long_life.Life(memory=memory, files=files).check()


def test_the_command_line(golden, results, capsys):
    argv = ["--checkpoint", str(golden), "--requests", "3", "--max-seq-len", "400"]
    assert long_life.main([*argv, "--tree", "a tree"]) == 1 and "--tree a tree" in capsys.readouterr().err
    assert long_life.main([*argv, "--tree", "4,1,2"]) == 0
    record = json.loads((results / "long_life.json").read_text())
    assert record["requests"] == 3 and record["others"] == []
    assert "other texts than fresh: 0" in capsys.readouterr().out

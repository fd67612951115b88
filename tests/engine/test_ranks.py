"""A target dealt among several processes gives the texts of one, in float32, token for token.

One group of two processes and one of four decode all cases; see `helpers.ranked`.
"""
import functools
import json
import shutil

import pytest
from helpers.families import make_target
from helpers.heads import make_head, write_head
from helpers.hybrids import HYBRIDS, make_hybrid
from helpers.launching import TORCHRUN, run
from helpers.ranked import DRAFTERS, MODES, everything
from helpers.sources import CONFIG, target_state, write_source

from checkpoint.convert import convert
from checkpoint.folder import read_config
from checkpoint.quantizing import Quantised, quantize_folder
from kernels.modes import BESIDE, FOUR_BITS
from kernels.modes import MODES as PRECISIONS
from kernels.quantized import Scheme

pytestmark = pytest.mark.slow
# Families that differ in what is dealt: a key/value head for each query, tied tables, biases, norms, experts,
# windows and norms of sums; sinks, biases of sums and weights in MXFP4; delta nets, gates and shared experts.
DEALT = (
    "Llama-2", "Llama-3.2", "Qwen2", "Qwen3", "Mixtral", "Qwen3-MoE", "Gemma 3", "gpt-oss",
    "gpt-oss in MXFP4", "Qwen3.5", "Qwen3-Next", "Qwen3-Next in w4a8",
)
# Rounded to fp8, a row's inputs depend on who has which of them: other roundings, other texts at times.
EXACT = [mode for mode in PRECISIONS if mode != "fp8"]


def with_heads(folder, source):
    """The converted target, with EAGLE heads in its folder."""
    folder = convert(source, folder, quiet=True)
    width = read_config(folder)["hidden_size"]
    for kind in ("eagle", "eagle3"):
        state, config = make_head(kind, hidden=width, target=width)
        convert(write_head(source.parent / f"{folder.name} {kind}", state, config), target=folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    """Converted: each of `DEALT` with heads, a target in each precision, one of sizes that neither two nor
    four divide, and the golden one.
    """
    made, work = tmp_path_factory.mktemp("dealt"), tmp_path_factory.mktemp("sources")
    for name in DEALT:
        family, _, mode = name.partition(" in w")
        if family in HYBRIDS:
            make_hybrid(work / name, family, mtp=True, wide=bool(mode))
        else:
            make_target(work / name, name)
        folder = with_heads((work / "exact" if mode else made) / name, work / name)
        if mode:
            shutil.copytree(folder, made / name)
            quantize_folder(Quantised.of(folder, Scheme("w" + mode, 32, "w8a8")), made / name)
    odd = CONFIG | {
        "num_attention_heads": 10, "num_key_value_heads": 5, "vocab_size": 97, "intermediate_size": 58,
        "torch_dtype": "float32",
    }
    convert(write_source(work / "odd", target_state(odd), odd), made / "odd", quiet=True)
    wide = CONFIG | {"intermediate_size": 256, "head_dim": 64, "torch_dtype": "float32"}
    convert(write_source(work / "wide", target_state(wide), wide), work / "exact of wide", quiet=True)
    for mode in PRECISIONS:
        group = 32 if mode in FOUR_BITS else 0
        scheme = Scheme(mode, group, BESIDE.get(mode, mode))
        quantize_folder(Quantised.of(work / "exact of wide", scheme), made / mode)
    (made / "golden").symlink_to(golden)
    return made


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gives."""
    return json.loads(json.dumps(everything(folder)))


@pytest.fixture(scope="module")
def launch(folder, tmp_path_factory):
    """A function: what so many processes give."""

    @functools.cache
    def launched(count: int) -> dict:
        out = tmp_path_factory.mktemp("said") / "said.json"
        launch = *TORCHRUN, "--standalone", "--nproc-per-node", count
        run(*launch, "-m", "helpers.ranked", folder, out, timeout=900)
        return json.loads(out.read_text())

    return launched


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.dear)], ids="{} ranks".format)
def dealt(request, launch):
    """What so many processes give."""
    return launch(request.param)


@pytest.fixture(scope="module")
def between_two(launch):
    """What two processes give."""
    return launch(2)


@pytest.mark.parametrize("name", [*DEALT, *EXACT, "odd"])
def test_families_and_precisions(alone, dealt, name):
    if name not in dealt:  # more than two ranks
        assert name.startswith(("Qwen3.5", "Qwen3-Next"))
        return
    assert dealt[name] == {what: alone[name][what] for what in dealt[name]} and "plain" in dealt[name]
    if name in DEALT:
        assert dealt[name]["eagle3"] == dealt[name]["eagle"] == dealt[name]["plain"]
        assert dealt[name]["drawn"] != dealt[name]["plain"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters(alone, between_two, name):
    assert between_two["drafters"][name] == alone["drafters"][name]


@pytest.mark.parametrize("name", ["eagle3", "eagle", "draft-model"])
def test_heads_that_are_dealt_too(alone, dealt, name):
    for what in (name, f"{name}, drawn"):
        assert dealt["heads"][what] == alone["heads"][what]


@pytest.mark.parametrize("name", [*MODES, "caches in float8"])
def test_modes(alone, between_two, name):
    assert between_two["modes"][name] == alone["modes"][name]
    if name == "caches in float8":
        assert alone["modes"][name] != alone["modes"]["min-p"]


def test_a_step_is_two_graphs_with_two_sums_a_layer(alone, between_two):
    """As torch.compile traces it for GPUs: eight layers and the tree, the best token; for prompts no tree."""
    assert between_two["traced"]["text"] == alone["traced"]["text"] == alone["modes"]["greedy"]
    assert alone["traced"]["exchanges"] == [[0, 0]]
    assert between_two["traced"]["exchanges"] == [[1, 0], [2 * 8, 0], [2 * 8, 1]]

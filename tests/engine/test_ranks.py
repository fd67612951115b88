"""Tensor parallelism: outputs of two and four ranks equal those of one process, token for token.

One torchrun of each size runs all cases; see `helpers.ranked`.
"""
import json
import os
import subprocess
import sys

import pytest
from helpers import refused
from helpers.families import HYBRIDS, converted, make_target
from helpers.heads import add_heads
from helpers.launching import TORCHRUN, run
from helpers.ranked import TWO_RANKS_ONLY, everything
from helpers.sources import CONFIG, target_state, write_source

from checkpoint.convert import convert
from checkpoint.load import read_config
from checkpoint.quantizing import QuantizationPlan, quantize_folder
from checkpoint.sharded import shards_of
from kernels.scheme import INT4_MODES, LM_HEAD_MODES, Scheme
from kernels.scheme import MODES as PRECISIONS

pytestmark = pytest.mark.slow
# Families that differ in what is sharded: multi-head attention, tied embeddings, biases, norms, experts,
# sliding windows and norms after all-reduces; sinks, biases after all-reduces and MXFP4 weights; DeltaNet
# layers, gates and shared experts.
SHARDED = (
    "Llama-2", "Llama-3.2", "Qwen2", "Qwen3", "Mixtral", "Gemma 3", "gpt-oss in MXFP4", "Qwen3.5",
    "Qwen3-Next",
)
# In fp8 the scale of a token's inputs depends on the shard: outputs may differ.
SHARDING_INVARIANT = [mode for mode in PRECISIONS if mode != "fp8"]


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    """Return a folder of converted targets: each of `SHARDED` with heads, one in each precision, one whose
    sizes are divisible by neither 2 nor 4, and the golden one.
    """
    targets, work = tmp_path_factory.mktemp("sharded"), tmp_path_factory.mktemp("sources")
    for name in SHARDED:
        make_target(work / name / "in", name, mtp=name in HYBRIDS)
        width = read_config(convert(work / name / "in", targets / name, quiet=True))["hidden_size"]
        add_heads(work / name, targets / name, width)
    odd = {"num_attention_heads": 10, "num_key_value_heads": 5, "vocab_size": 97, "intermediate_size": 58}
    for name, changes, out in (
        ("odd", odd, targets / "odd"),
        ("wide", {"intermediate_size": 512, "head_dim": 128}, work / "unquantized"),
    ):
        config = CONFIG | changes | {"torch_dtype": "float32"}
        # With the sizes of "wide", four ranks have whole groups of 128 inputs, rounded as in one process. Its
        # seed gives no near tie, which sums over ranks might decide differently.
        convert(write_source(work / name, target_state(config, seed=3), config), out, quiet=True)
    for mode in PRECISIONS:
        scheme = Scheme(mode, 32 if mode in INT4_MODES else 0, LM_HEAD_MODES.get(mode, mode))
        quantize_folder(QuantizationPlan.from_folder(work / "unquantized", scheme), targets / mode)
    (targets / "golden").symlink_to(golden)
    return targets


@pytest.fixture(scope="module")
def alone(folder):
    """Return the outputs of a single process."""
    return json.loads(json.dumps(everything(folder)))


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.expensive)], ids="{} ranks".format
)
def sharded(request, folder, tmp_path_factory):
    """Return the outputs of this many ranks."""
    out = tmp_path_factory.mktemp("outputs") / "outputs.json"
    launch = *TORCHRUN, "--standalone", "--nproc-per-node", request.param
    run(*launch, "-m", "helpers.ranked", folder, out, timeout=900)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", (
    "OLMo 3", "LFM2", "LFM2-MoE", "GLM-4.7-Flash", "Gemma 4 E2B", "Gemma 4 26B-A4B"))
def test_families_that_cannot_be_sharded_raise_errors(tmp_path, name):
    config = read_config(converted(tmp_path, name)[1])
    with refused("2 ranks: a target of this family runs in one process only; leave out torchrun"):
        shards_of(config, 2)


@pytest.mark.parametrize("name", [*SHARDED, *SHARDING_INVARIANT, "odd", "heads", "drafters", "modes"])
def test_sharded_outputs_equal_those_of_one_process(alone, sharded, name):
    if name in TWO_RANKS_ONLY and "modes" not in sharded:
        return
    outputs, expected = sharded[name], alone[name]
    assert outputs
    for case, tokens in outputs.items():
        assert tokens and tokens == expected[case][: len(tokens)], f"{name}: {case}"
    if name in SHARDED:
        assert outputs["eagle3"][:2] == outputs["plain"][:2] != outputs["eagle3"][2:]
    if name == "modes":
        assert outputs["caches in float8"] != outputs["modes"]


def test_a_rank_exits_when_its_launcher_is_killed():
    """SIGKILL lets the launcher send no signal."""
    rank = "import common.torchrun, time; common.torchrun.exit_with_torchrun(); print('up', flush=True);" \
           " time.sleep(5); print('left behind')"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b""  # returns when the rank has exited: it holds the pipe too

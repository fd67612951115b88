"""Gemma 4 assistants: logits equal those of transformers, and speculative output equals plain output."""
import random

import pytest
import torch
from helpers.decoding import alone, check_outputs, decode, requests
from helpers.families import BASES, SIZES, V, make_target

from checkpoint.convert import convert
from checkpoint.load import load_head, load_model
from common.errors import InputError
from drafters.assistant import AssistantDrafter
from drafters.mixed import Mixed
from drafters.ngram import NGram
from engine.engine import Engine
from kernels.choose import choose_backend
from quantize import main as quantize
from tree import TreeShape

TARGETS = {"Gemma 4 E2B": {}, "Gemma 4 31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1}}


def make_assistant(folder, name: str, ordered: bool, **target):
    """Write a random assistant of a tiny target as published; return the transformers model.

    target: fields of the target's config that differ.
    """
    transformers = pytest.importorskip("transformers")
    width = (SIZES | target)["hidden_size"]
    shape = SIZES | BASES["Gemma 4"][1] | TARGETS[name] | target | {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    config = transformers.Gemma4AssistantConfig(
        text_config=shape, backbone_hidden_size=width, use_ordered_embeddings=ordered, num_centroids=16,
        centroid_intermediate_top_k=5)
    with pytest.MonkeyPatch.context() as patch:  # else transformers 5.23 rejects the config
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * 3)
        model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    torch.manual_seed(0)
    for n, p in model.state_dict().items():
        if n.endswith("token_ordering"):
            p.copy_(torch.randperm(V))
        else:
            p.normal_(int(n.endswith(("layer_scalar", "norm.weight"))), 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("ordered", (False, True))
def test_logits_equal_those_of_transformers(tmp_path, ordered):
    """In a chain of three drafts after a prompt longer than the sliding windows."""
    name = "Gemma 4 E2B"  # transformers 5.23 returns no KV states of targets without shared layers
    with torch.no_grad():
        reference = make_target(tmp_path / "target", name)
        assistant = make_assistant(tmp_path / "assistant", name, ordered)
        target, _ = load_model(folder := convert(tmp_path / "target", tmp_path / "out", quiet=True))
        head = load_head(convert(tmp_path / "assistant", target=folder, quiet=True), target, "mtp")
        T, L = 40, target.args.num_layers
        tokens = torch.randint(0, V, (1, T + 4), generator=torch.Generator().manual_seed(1))
        known = reference(tokens[:, :T], output_hidden_states=True, return_shared_kv_states=True)
        positions, caches = torch.arange(T)[None], target.caches(1, T + 4)
        visible = torch.ones(1, T, T).tril() > 0
        feature = head.fuse(target(tokens[:, :T], positions, positions, visible, caches, (L,))[1][:, -1:])
        state = known.hidden_states[-1][:, -1:]
        torch.testing.assert_close(feature, state, rtol=1e-4, atol=1e-4)
        visible, root = (torch.arange(T + 4) < T)[None, None], torch.tensor([[T]])
        for step in range(3):
            token = tokens[:, T + step : T + step + 1]
            embedded = reference.get_input_embeddings()(token)
            expected = assistant(
                inputs_embeds=torch.cat((embedded, state), -1), position_ids=root,
                shared_kv_states=dict(known.shared_kv_states))
            feature = head(token, feature, root, root + step, visible, caches)
            error = (head.logits(feature) - expected.logits).abs().max() / expected.logits.abs().max()
            assert error < 1e-4
            state = expected.last_hidden_state


@pytest.mark.kernels
@pytest.mark.parametrize("name, ordered, mode", [
    ("Gemma 4 E2B", True, "bf16"), ("Gemma 4 31B", False, "fp32"), ("Gemma 4 31B", True, "fp32, PyTorch"),
    ("Gemma 4 E2B", True, "int4"), ("Gemma 4 31B", False, "int8")])
def test_speculative_output_equals_plain_output(tmp_path, name, ordered, mode):
    """Of requests that arrive at random times, also combined with prompt lookup."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "global_head_dim": 32,
             "hidden_size_per_layer_input": 32 * ("E2B" in name)}
    make_target(tmp_path / "target", name, **sizes)
    make_assistant(tmp_path / "assistant", name, ordered, **sizes)
    dtype = "fp32" if "fp32" in mode else "bf16"
    folder = convert(tmp_path / "target", tmp_path / "out", dtype=dtype, quiet=True)
    convert(tmp_path / "assistant", target=folder, dtype=dtype, quiet=True)
    if "int" in mode:
        options = ["--group", "32", "--method", "nearest"] if mode == "int4" else []
        source, folder = folder, tmp_path / mode
        assert quantize(["--checkpoint", str(source), "--mode", mode, "--out", str(folder), *options]) == 0
    target, _ = load_model(folder)
    head = load_head(folder / "mtp", target, "mtp")
    if "PyTorch" not in mode:
        assert choose_backend("cpu").prepare(target, head) and target.runs_on_backend
    jobs = requests(6, seed=5)
    plain = alone((target, None), jobs)
    for with_lookup in False, True:
        drafter = AssistantDrafter(head, TreeShape(8, 2, 3))
        drafter = Mixed(NGram(), drafter) if with_lookup else drafter
        engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False)
        check_outputs(decode(engine, jobs, random.Random(1)), plain, jobs)


def test_an_assistant_of_another_target_raises_an_error(tmp_path):
    make_target(tmp_path / "target", "Gemma 4 E2B")
    make_assistant(tmp_path / "assistant", "Gemma 4 31B", False)
    folder = convert(tmp_path / "target", tmp_path / "out", quiet=True)
    with pytest.raises(InputError, match="another target: its global_kv_heads is 1, this target's 2"):
        convert(tmp_path / "assistant", target=folder, quiet=True)

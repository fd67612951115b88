"""A smaller model drafts: it reads what the target reads."""
import shutil

import pytest
import torch
from helpers import edit
from helpers.decoding import ids, plain, watched
from safetensors.torch import load_file, save_file

from drafters.draft_model import DraftModel
from drafters.pard import Pard
from engine.drafting import Drafting
from engine.engine import Engine
from engine.sampling import Sampling
from tree import TreeShape

CHAIN = TreeShape(5, 3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_never_wrong(models, temperature):
    """Every token it drafts is accepted, also with noise, and where a conversation goes on in kept caches: it
    reads what the target reads, where the target reads it. This is the whole of the drafter's book-keeping.
    """
    engine = Engine(models[0], DraftModel(models[0], CHAIN), chunks=(8,), max_seq_len=250, compile=False)
    text = prompt = [256, *range(97, 120)]
    for _ in range(3):
        request, = engine.generate([text], Sampling(41, temperature, seed=5))
        assert set(request.accept_lengths[:-1]) == {CHAIN.max_commit}
        assert request.cached == 0 if text is prompt else request.cached > len(text) - 8
        assert [request.ids] == ids(plain(models), [text], Sampling(41, temperature, seed=5))
        text = [*request.tokens, 50, 51, 52]


@pytest.mark.parametrize("rows", [288, 352])
def test_other_rows_after_the_last_id(golden, llm, tmp_path, rows):
    """As Qwen2.5 0.5B has, beside 7B: ids are the same, and the target itself is never wrong."""
    shutil.copytree(golden, folder := tmp_path / "draft")
    state = load_file(golden / "model.safetensors")
    kept = torch.arange(rows).clamp(max=319)
    save_file(state | {n: state[n][kept] for n in ("embed.weight", "lm_head.weight") if n in state},
              folder / "model.safetensors")
    edit(folder, vocab_size=rows)
    request, = llm.target.engine(Drafting("draft-model", folder, tree=CHAIN)).generate(
        [[256, *range(97, 120)]], Sampling(21))
    assert set(request.accept_lengths[:-1]) == {CHAIN.max_commit}


def test_a_parallel_draft_model(models, golden, tmp_path, llm):
    """Its chains are the model's top tokens after mask tokens; its folder says which token that is."""
    target, _ = models
    engine = Engine(target, Pard(target, CHAIN, mask_id=7), chunks=(8,), max_seq_len=250, compile=False)
    steps = watched(engine, [256, *range(97, 120)], Sampling(20))
    for text, drawn in steps:
        x, _ = target.causal(torch.tensor([text + [7] * 3]))
        assert drawn.tokens[1:] == target.logits(x[0, -4:]).argmax(-1).tolist()
    shutil.copytree(golden, folder := tmp_path / "draft")
    edit(folder, pard_token=7)
    drafter = llm.target.engine(Drafting("draft-model", folder)).drafter
    assert len(steps) > 3 and isinstance(drafter.resizable_part, Pard) and drafter.resizable_part.mask_id == 7

"""Drafters without a head: draft models, PARD, lookahead, and two drafters combined."""
import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from helpers import edit, refused
from helpers.decoding import draft_steps, drafts, ids, load, plain, prompts
from helpers.drafters import make_drafter, small_models
from helpers.families import H, converted, make_target
from helpers.states import paths, random_tree
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from drafters.draft_model import DraftModel
from drafters.lookahead import Lookahead
from drafters.mixed import Mixed, join
from drafters.pard import Pard, Pard2Drafter
from engine.draft import HeadDrafter
from engine.drafting import DraftOptions
from engine.engine import Engine
from engine.sampling import Sampling
from engine.target import Runtime, load_target
from families.mixed import causal
from tree import Tree, TreeShape

CHAIN = TreeShape(5, 3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafts_of_the_target_as_its_own_draft_model_are_accepted(models, temperature):
    """Also if sampled, and if a conversation continues from the prefix cache. A wrong position would show."""
    engine = Engine(models[0], DraftModel(models[0], CHAIN), chunks=(8,), max_seq_len=250, compile=False)
    tokens = prompt = [256, *range(97, 120)]
    for _ in range(3):
        request, = engine.generate([tokens], Sampling(41, temperature, seed=5))
        assert set(request.accept_lengths[:-1]) == {CHAIN.max_commit}
        min_cached = len(tokens) - CHAIN.max_commit - 5
        assert request.cached == 0 if tokens is prompt else request.cached >= min_cached
        assert [request.ids] == ids(plain(models), [tokens], Sampling(41, temperature, seed=5))
        tokens = [*request.tokens, 50, 51, 52]


@pytest.mark.parametrize("rows", [288, 352])
def test_a_draft_model_with_another_embedding_size_is_resized(golden, llm, tmp_path, rows):
    """Like Qwen2.5 0.5B and 7B: the vocabularies agree but the embeddings are padded to different sizes."""
    shutil.copytree(golden, folder := tmp_path / "draft")
    state = load_file(golden / "model.safetensors")
    index = torch.arange(rows).clamp(max=319)
    save_file(state | {n: state[n][index] for n in ("embed.weight", "lm_head.weight") if n in state},
              folder / "model.safetensors")
    edit(folder, vocab_size=rows)
    request, = llm.target.engine(DraftOptions("draft-model", folder, tree=CHAIN)).generate(
        [[256, *range(97, 120)]], Sampling(21))
    assert set(request.accept_lengths[:-1]) == {CHAIN.max_commit}


def test_pard_drafts_the_top_tokens_at_mask_positions(models, golden, tmp_path, llm):
    """The config's `pard_token` is the mask token."""
    target, _ = models
    engine = Engine(target, Pard(target, CHAIN, mask_id=7), chunks=(8,), max_seq_len=250, compile=False)
    steps = draft_steps(engine, [256, *range(97, 120)], Sampling(20))
    for tokens, draft in steps:
        x, _ = causal(target, torch.tensor([tokens + [7] * 3]))
        assert draft.tokens[1:] == target.logits(x[0, -4:]).argmax(-1).tolist()
    shutil.copytree(golden, folder := tmp_path / "draft")
    edit(folder, pard_token=7)
    drafter = llm.target.engine(DraftOptions("draft-model", folder)).drafter
    assert len(steps) > 3 and isinstance(drafter.resizable_part, Pard) and drafter.resizable_part.mask_id == 7


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.kernels)])
def test_pard2_drafts_equal_its_formula_in_transformers(tmp_path, kernels):
    reference, folder = converted(tmp_path / "target", "Llama-3")
    model, layers = make_target(tmp_path / "draft", "Qwen3"), [-1, -3, -6]
    proj = 10 * torch.randn(H, 3 * H, generator=torch.Generator().manual_seed(3))
    edit(tmp_path / "draft", pard_token=7, spd_type="pard2", pard2=True, pard2_target_layers=layers,
         pard2_target_dim=3 * H, pard2_scale=0.02, pard2_proj_bias=False)
    torch.save({"target_proj.weight": proj}, tmp_path / "draft" / "warp_model.bin")
    convert(tmp_path / "draft", tmp_path / "out", quiet=True)
    target = load_target(folder, Runtime("cpu", compile=kernels, kernels=kernels))
    options, size = DraftOptions("draft-model", tmp_path / "out", tree=CHAIN), {"max_seq_len": 200}
    part, prompt = target.engine(options, **size).drafter.resizable_part, [*range(1, 40)]
    engine = Engine(target.model, part, chunks=(8,), compile=False, **size)
    steps = draft_steps(engine, prompt, Sampling(30))
    plain, joint = (ids(target.engine(drafting, **size), [prompt], Sampling(30))[0] for drafting in (
        DraftOptions(), DraftOptions("lookup+draft-model", tmp_path / "out")))
    assert type(part) is Pard2Drafter and len(steps) > 5 and joint == plain
    assert steps[-1][0] == [*prompt, *plain][: len(steps[-1][0])]
    for tokens, draft in steps:
        with torch.no_grad():
            states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            features = torch.cat([states[i] for i in layers], -1)[:, :-1]
            features = torch.cat((0 * features[:, :1], features, features[:, -1:].expand(-1, 3, -1)), 1)
            x = model.get_input_embeddings()(torch.tensor([tokens + [7] * 3])) + 0.02 * features @ proj.T
            logits = model(inputs_embeds=x).logits
        assert draft.tokens[1:] == logits[0, -4:].argmax(-1).tolist()
    part.model.args = replace(part.model.args, feature_layers=(-20, -3, -1))
    with refused("--draft: the draft model reads features of size 144"):
        Pard2Drafter(part.model, CHAIN, mask_id=7, target=target.model)


# -- lookahead decoding against a reference ------------------------------------------------------------------


class LookaheadReference:
    """The published lookahead algorithm for one sequence, with dictionaries and lists."""

    def __init__(self, target, rows: list[list[int]], level: int, guesses: int):
        self.target, self.rows, self.level, self.guesses, self.pool = target, rows, level, guesses, {}

    def step(self, tokens: list[int]) -> None:
        """Predict the next token of each column, add the columns to the pool and shift the window."""
        first, new = [tokens[-1], *self.rows[0][1:]], []
        for c, token in enumerate(first):
            context = torch.tensor([tokens + first[1 : c + 1] + [row[c] for row in self.rows[1:]]])
            new.append(int(self.target.logits(causal(self.target, context)[0][0, -1]).argmax()))
            pool = self.pool.setdefault(token, [])
            ngram = [*(row[c] for row in self.rows[1:]), new[c]]
            if ngram in pool:
                pool.remove(ngram)
            pool.append(ngram)
            del pool[: -self.guesses]
        self.rows = [*self.rows[1:], new]

    def check_window(self, drafted: dict[tuple, int], right: int) -> None:
        """Check that each cell is a child of the cell above it, and row 0 a path from the root."""
        for r, row in enumerate(self.rows):
            for c, token in list(enumerate(row))[r == 0 :]:
                assert drafted[(right,) * c + (right + 1,) * r] == token

    def ngrams(self, root: int) -> list[list[int]]:
        """Return the drafted n-grams without the root; the root is repeated where the pool has fewer."""
        pool = self.pool.get(root, [])
        return [[root] * (self.level - 1)] * (self.guesses - len(pool)) + pool


@pytest.mark.parametrize("window, level, guesses", [(7, 5, 7), (3, 3, 2), (1, 4, 1)])
def test_lookahead_equals_the_reference(window, level, guesses):
    """With a vocabulary of five, so that columns repeat; for two requests, one after the other."""
    target = small_models(5)[0]
    drafter, full_pools = Lookahead(5, window, level, guesses), 0
    engine = Engine(target, drafter, max_seq_len=100, compile=False)
    for seed, prompt in enumerate(([0, 1, 2, 3], [1, 2])):
        engine.admit(prompt, Sampling(60, 1.0, seed=seed), watch=True)
        tokens = list(prompt)
        reference = LookaheadReference(target, drafter.window[0].tolist(), level, guesses)
        assert {token for row in reference.rows for token in row} <= {*prompt}
        while engine.busy:
            for event in engine.step():
                if event.draft:
                    paths = drafter.shape.paths
                    drafted = dict(zip(paths, event.draft.tokens[1:]))
                    chains = [[drafted[(c,) + (0,) * i] for i in range(level - 1)] for c in range(guesses)]
                    reference.check_window(drafted, guesses)
                    assert chains == reference.ngrams(tokens[-1])
                    full_pools += chains[0] != [tokens[-1]] * (level - 1)
                    reference.step(tokens)
                    assert drafter.window[0].tolist() == reference.rows
                tokens += event.ids
    assert full_pools > 10


# -- two drafters on one tree --------------------------------------------------------------------------------


def scored(tree: Tree, b: int) -> dict[tuple[int, ...], float]:
    """Return the score of each path; the highest one of duplicate paths."""
    by_path = {}
    for path, score in zip(paths(tree.tokens[b].tolist(), tree.parent[b].tolist()), tree.scores[b].tolist()):
        by_path[path] = max(score, by_path.get(path, -9e9))
    return by_path


@pytest.mark.parametrize("seed", range(8))
def test_joint_trees_have_the_best_paths_of_both(seed):
    one, other = random_tree(9, 4, seed), random_tree(7, 3, seed + 100)
    joined, twice = join(one, other, 10, 4), join(one, one, 10, 4)
    for b in range(2):
        both = scored(other, b)
        for path, score in scored(one, b).items():
            both[path] = max(score, both.get(path, -9e9))
        best = sorted(both, key=both.get, reverse=True)[:10]
        assert scored(joined, b) == pytest.approx({path: both[path] for path in best})
        by_node = paths(joined.tokens[b].tolist(), joined.parent[b].tolist())
        assert joined.depth[b].tolist() == [len(path) for path in by_node]
        # Duplicates free nodes; any other candidate may fill them.
        assert scored(one, b).keys() <= scored(twice, b).keys()


@pytest.mark.parametrize("temperature, which", ((0.2, 0), (0.2, 1), (1.0, 0), (1.0, 1)))
def test_the_drafter_with_much_higher_scores_gets_all_nodes(models, models1, temperature, which):
    """The joint tree equals its own: it reads its layers' features, and noise at all levels."""
    trees = []
    for joint in (False, True):
        parts = HeadDrafter(models[1], TreeShape(6, 7, 2)), HeadDrafter(models1[1], TreeShape(6, 2, 3))
        parts[1 - which].sampled_score_factor = 1e6
        engine = Engine(models[0], Mixed(*parts) if joint else parts[which], max_seq_len=90, compile=False)
        steps = drafts(engine, list(range(97, 120)), Sampling(30, temperature, seed=3))
        trees.append([set(paths(draft.tokens, draft.parent)) for draft in steps])
    assert trees[0] == trees[1] and len(trees[0]) > 5


# -- heads with a sliding window (--draft-window) ------------------------------------------------------------


KINDS = ("eagle3", "eagle2", "eagle1", "p-eagle", "dflash", "dspark")
WINDOW = 20
PROMPT = prompts(1, seed=3, shortest=90, longest=90)[0]


@pytest.fixture(params=KINDS)
def drafter(request, models, models1) -> HeadDrafter:
    return make_drafter(request.param, *models, models1[1], lambda model: None)


def engine_of(target, drafter: HeadDrafter, window: int) -> Engine:
    """Return an engine whose drafter is a copy with this window."""
    head = copy.deepcopy(drafter.head)
    head.use_target(target)
    head.set_sliding_window(window)
    windowed = type(drafter)(head, drafter.shape)
    return Engine(target, windowed, max_seq_len=300, compile=False, chunks=(16,))


def test_the_default_window_is_the_training_length(golden, tmp_path):
    """None if the window is at least max_seq_len or the training length is unknown."""
    folder = shutil.copytree(golden, tmp_path / "target")
    config = folder / "eagle3" / "config.json"
    for trained, length, options, window in (
        (40, 200, {}, 40), (40, 30, {}, 0), (40, 200, {"window": 0}, 0), (40, 200, {"window": 50}, 50),
        (0, 200, {"window": 50}, 50), (0, 200, {}, 0),
    ):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_window": trained}))
        llm = load(folder, "eagle3", compile=False, max_seq_len=length, **options)
        assert llm.engine.drafter.head.layer.window == window


def test_a_window_longer_than_the_sequence_changes_no_draft(models, drafter):
    whole, windowed = (
        [draft[:3] for draft in drafts(engine_of(models[0], drafter, window), PROMPT, Sampling(16))]
        for window in (0, 300)
    )
    assert whole == windowed and any(len(draft[2]) > 1 for draft in whole)


def test_cache_entries_outside_the_window_change_no_draft(models, drafter):
    """Overwritten keys and values outside the window change no draft; without a window they do."""
    trees = []
    for window, overwritten in ((WINDOW, False), (WINDOW, True), (0, True)):
        engine = engine_of(models[0], drafter, window)
        request = engine.admit(PROMPT, Sampling(30), watch=True)
        while not request.ids:
            engine.step()
        if overwritten:
            for buffer in engine.drafter.caches.buffers():
                buffer[:, : len(PROMPT) - WINDOW - 2] = 9.0
        trees.append([])
        while len(trees[-1]) < 3:
            trees[-1] += [event.draft for event in engine.step() if event.draft]
    intact, changed, unlimited = trees
    assert intact == changed and [x.scores for x in intact] != [x.scores for x in unlimited]

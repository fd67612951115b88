"""A smaller model drafts: the text is plain text, and a model that is the target itself is never wrong."""
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.decoding import check_distribution
from helpers.statistics import chi_square, chi_square_limit

import generate
from drafters.draft_model import DraftModel
from engine.decoder import Decoder
from model import Transformer, inverse_frequencies
from sampling.acceptance import residual
from sampling.noise import gumbel
from sampling.options import Sampling
from tree import TreeShape, chain

CHAIN, WIDE = TreeShape(5, 3, 1), TreeShape(16, 3, 4)
PROMPTS = [[256, 104, 105], [256, *range(97, 120)], [256, 1]]


def smaller(target: Transformer, seed: int = 0) -> Transformer:
    """A random model of one layer with the target's vocabulary, its embedding and so some of its habits."""
    torch.manual_seed(seed)
    model = Transformer(dataclasses.replace(target.args, num_layers=1)).requires_grad_(False)
    model.embed.weight.copy_(target.embed.weight)
    model.norm.load_state_dict(target.norm.state_dict())
    model.layers[0].load_state_dict(target.layers[0].state_dict())
    if target.lm_head is not None:
        model.lm_head.load_state_dict(target.lm_head.state_dict())
    model.inv_freq = inverse_frequencies(model.args)
    return model.eval()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [CHAIN, WIDE])
def test_text_is_plain_text(models, shape, temperature):
    target, _ = models
    sampling = [Sampling(60, temperature, seed=s) for s in range(3)]
    plain = Decoder(target, batch=3, max_seq_len=200, compile=False).generate(PROMPTS, sampling)
    decoder = Decoder(target, DraftModel(smaller(target), shape), batch=3, max_seq_len=200, compile=False)
    fast = decoder.generate(PROMPTS, sampling)
    assert [o.ids for o in fast] == [o.ids for o in plain]
    assert sum(map(len, (o.accept_lengths for o in fast))) < 3 * 60  # something was accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_never_wrong(models, temperature):
    """Every token it drafts is accepted, also with noise: what it reads and where it stands are what the
    target reads. This is the whole of the drafter's book-keeping.
    """
    target, _ = models
    decoder = Decoder(target, DraftModel(target, CHAIN), max_seq_len=250, chunks=(8,), compile=False)
    for prompt in PROMPTS:
        lengths = decoder.generate([prompt], Sampling(121, temperature, seed=5))[0].accept_lengths
        assert set(lengths[:-1]) == {CHAIN.window}


@pytest.mark.slow
def test_residual_acceptance_has_the_targets_distribution(models):
    """As coupled drafting has; with a draft model that is wrong often, and one that never is."""
    target, _ = models
    draft = smaller(target)
    decoder = Decoder(
        target, DraftModel(draft, TreeShape(3, 1, 1), rule="residual"), batch=256, max_seq_len=64,
        compile=False
    )
    check_distribution(target, decoder)
    check_distribution(
        target, Decoder(target, DraftModel(draft, CHAIN), batch=256, max_seq_len=64, compile=False)
    )
    lengths = [
        n for o in decoder.generate([PROMPTS[0]] * 256, [Sampling(12, 0.8, seed=i) for i in range(256)])
        for n in o.accept_lengths
    ]
    assert 1.02 < sum(lengths) / len(lengths) < 3


def test_every_position_of_a_residual_chain_has_the_targets_distribution():
    """Two Markov chains over six tokens, one of the target and one that drafts three tokens: at every
    position, what is emitted after each token is distributed as the target's, also the token after a chain
    that was accepted whole. 200,000 seeds, chi-square at 1e-6 per position.
    """
    g, B, V, D, temperature = torch.Generator().manual_seed(0), 200_000, 6, 3, 0.7
    target, draft = torch.randn(V, V, generator=g), torch.randn(V, V, generator=g)
    p, q = (target / temperature).softmax(-1), (0.5 * draft + target).softmax(-1)
    key = torch.randint(2**31, (B, 2), generator=g)
    tokens = [torch.zeros(B, dtype=torch.int64)]
    for _ in range(D):
        tokens.append(torch.multinomial(q[tokens[-1]], 1, generator=g)[:, 0])
    tree, distribution = chain(torch.stack(tokens, 1)), torch.stack([q[t] for t in tokens[:-1]], 1)
    length, warm = torch.full((B,), 9), torch.full((B,), temperature)
    noise = temperature * gumbel(key, length[:, None] + 1 + torch.arange(D + 1), V)
    state = SimpleNamespace(temperature=warm, key=key, length=length)
    agrees, drawn = residual(tree, distribution, target[tree.tokens], noise, state)
    accepted = agrees[:, 1:].long().cumprod(1).sum(1)
    for position in range(D + 1):
        here = accepted >= position
        before, said = tree.tokens[here, position], drawn[here, position]
        if position < D:
            said = torch.where(accepted[here] > position, tree.tokens[here, position + 1], said)
        seen = torch.zeros(V, V).index_put_((before, said), torch.ones(len(said)), accumulate=True)
        expected = p * seen.sum(1, keepdim=True)
        common = expected > 20
        assert chi_square(
            seen[common].double(), expected[common].double()
        ) < chi_square_limit(int(common.sum()))
        assert here.sum() > 5000


def test_residual_acceptance_of_the_target_itself(models):
    """p is q: everything is accepted, whatever is drawn. Greedily it is plain decoding."""
    target, _ = models
    decoder = Decoder(target, DraftModel(target, CHAIN, rule="residual"), max_seq_len=250, compile=False)
    lengths = decoder.generate([PROMPTS[0]], Sampling(100, 1.0, seed=3))[0].accept_lengths
    assert sum(n == CHAIN.window for n in lengths[:-1]) >= len(lengths) - 2  # p and q round apart
    greedy = Decoder(target, max_seq_len=250, compile=False).generate([PROMPTS[1]], Sampling(60))[0].ids
    other = Decoder(
        target, DraftModel(smaller(target), CHAIN, rule="residual"), max_seq_len=250, compile=False
    )
    assert other.generate([PROMPTS[1]], Sampling(60))[0].ids == greedy
    with pytest.raises(ValueError, match="needs a chain"):
        DraftModel(target, WIDE, rule="residual")


def test_its_caches_are_counted_once(models):
    target, _ = models
    one, two = (
        Decoder(target, drafter, max_seq_len=250, compile=False)
        for drafter in (None, DraftModel(target, CHAIN))
    )
    assert two.cache_bytes / two.slots == pytest.approx(2 * one.cache_bytes / one.slots, rel=1e-6)


def test_a_conversation_goes_on(models):
    """Kept caches, the drafter's among them, belong to the text that is kept."""
    target, _ = models
    decoder = Decoder(target, DraftModel(target, CHAIN), max_seq_len=300, compile=False)
    from engine.run import Run

    text = PROMPTS[1]
    for _ in range(3):
        run = Run(decoder, [text], Sampling(30), reuse=True)
        for _ in run:
            pass
        out = run.outputs()[0]
        assert set(out.accept_lengths[:-1]) == {CHAIN.window}
        assert out.ids == Decoder(
            target, max_seq_len=300, compile=False
        ).generate([text], Sampling(30))[0].ids
        text = [*text, *out.ids, 50, 51, 52]


def test_the_command_line(golden, capsys):
    options = [
        "--checkpoint", str(golden), "--speculate", "draft-model", "--prompt", "abc", "--no-compile",
        "--max-new-tokens", "20"
    ]
    assert generate.main(
        [*options, "--draft", str(golden), "--tree", "5,3,1", "--compare", "--json", "--dtype", "fp32"]
    ) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["tau"] > 4


BAD_INPUT = {  # id: what the error says, and the options
    "no draft": ("with --draft", ""),
    "draft that is not there": ("not a folder", "--draft {folder}/none"),
    "draft is a head": ("expected", "--draft {golden}/eagle3"),
    "residual with a tree": ("needs a chain", "--draft {golden} --tree 12,3,4 --accept residual"),
    "tree auto": ("nodes,depth,width only", "--draft {golden} --tree auto"),
    "no tokenizer": ("no tokenizer files to compare", "--draft {folder}/bare"),
    "shorter context": ("--max-seq-len 64 is what both read", "--draft {folder}/short"),
    "other tokenizer": ("gives other ids", "--draft {folder}/swapped"),
    "other vocabulary": ("has a vocabulary of 1000", "--draft {folder}/larger"),
}


@pytest.fixture(scope="module")
def drafts(golden, tmp_path_factory) -> Path:
    """The target again, each time with something about it that does not fit."""
    folder = tmp_path_factory.mktemp("drafts")
    shutil.copytree(golden, folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("short", "swapped", "larger"):
        shutil.copytree(golden, folder / name)
    config = json.loads((golden / "config.json").read_text())
    for name, change in (("short", {"max_seq_len": 64}), ("larger", {"vocab_size": 1000})):
        (folder / name / "config.json").write_text(json.dumps(config | change))
    tokenizer = json.loads((golden / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    (a, i), (b, j), *_ = vocab.items()
    vocab[a], vocab[b] = j, i
    for name in ("swapped", "larger"):
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def command(golden: Path, *options: str) -> list[str]:
    base = ["--checkpoint", str(golden), "--speculate", "draft-model", "--prompt", "abc", "--no-compile"]
    return [*base, *options]


@pytest.mark.parametrize("words, options", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line(golden, drafts, capsys, words, options):
    options = [word.format(folder=drafts, golden=golden) for word in options.split()]
    assert generate.main(command(golden, *options)) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    assert words in error


def test_a_draft_model_with_a_shorter_context_fits_a_shorter_text(golden, drafts):
    options = ["--draft", str(drafts / "short"), "--max-seq-len", "64", "--max-new-tokens", "8"]
    assert generate.main(command(golden, *options)) == 0

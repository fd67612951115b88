"""Lookahead: window and pool do what a plain program of lists does, and the text is plain text."""
import json
import random

import pytest
import torch

import generate
from drafters.lookahead import EMPTY, Lookahead
from engine.decoder import Decoder
from sampling.options import Sampling

PROMPTS = [[256, 104, 105], [256, *range(97, 120)], [256, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sizes", [(7, 5, 7), (1, 3, 1), (4, 3, 2)])
def test_text_is_plain_text(models, sizes, temperature):
    target, _ = models
    sampling = [Sampling(60, temperature, seed=s) for s in range(3)]
    plain = Decoder(target, batch=3, max_seq_len=200, compile=False).generate(PROMPTS, sampling)
    drafter = Lookahead(target.args.vocab_size, *sizes)
    decoder = Decoder(target, drafter, batch=3, max_seq_len=200, compile=False)
    fast = decoder.generate(PROMPTS, sampling)
    assert [o.ids for o in fast] == [o.ids for o in plain]
    if sizes == (7, 5, 7) and not temperature:
        assert sum(len(o.accept_lengths) for o in fast) < 3 * 59


class Lists:
    """The algorithm for one sequence, as published: dictionaries and lists."""

    def __init__(self, rows, window, level, guesses):
        self.rows, self.window, self.level, self.guesses, self.pool = rows, window, level, guesses, {}

    def learn(self, root, new):
        first = [root, *self.rows[0][1:]]
        for c in range(self.window):
            known = self.pool.setdefault(first[c], [])
            gram = tuple(row[c] for row in self.rows[1:]) + (new[c],)
            if gram in known:
                known.remove(gram)
            known.append(gram)
            del known[: -self.guesses]
        self.rows = [*self.rows[1:], new]


class Root:
    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def root(self):
        return self.tokens


@pytest.mark.parametrize("window, level, guesses", [(7, 5, 7), (3, 3, 2), (1, 4, 1)])
def test_window_and_pool_are_those_of_lists(window, level, guesses):
    """Two sequences over a vocabulary of 4, so that columns begin alike and repeat."""
    drafter, rng = Lookahead(4, window, level, guesses), random.Random(0)
    drafter.allocate(2, 64, 16, torch.float32, "cpu")
    for i, prompt in enumerate(([0, 1, 2, 3], [1, 2])):
        drafter.begin(i, prompt)
    assert set(drafter.window_rows[1].flatten().tolist()) <= {1, 2}
    lists = [Lists(drafter.window_rows[i].tolist(), window, level, guesses) for i in range(2)]
    for _ in range(60):
        roots, new = [rng.randrange(4) for _ in range(2)], [
            [rng.randrange(4) for _ in range(window)] for _ in range(2)
        ]
        for i in range(2):
            lists[i].learn(roots[i], new[i])
        drafter.learn(torch.tensor(roots), torch.tensor(new), torch.ones(2, dtype=torch.bool))
        for i in range(2):
            assert drafter.window_rows[i].tolist() == lists[i].rows
            for token in range(4):
                held = [tuple(gram) for gram in drafter.pool[i, token].tolist() if EMPTY not in gram]
                assert held == lists[i].pool.get(token, [])
    tree = drafter.propose(Root([3, 0]), None, None).tree
    paths = [[tree.tokens[0, 1 + c + guesses * d].item() for d in range(level - 1)] for c in range(guesses)]
    known = [list(gram) for gram in lists[0].pool[3]]
    assert paths[
        guesses - len(known) :
    ] == known and paths[: guesses - len(known)] == [[3] * (level - 1)] * (guesses - len(known))


def test_an_extra_row_reads_what_its_column_says(models):
    """The choice at the window's last row is that of plain decoding on root, row 0 up to the column, and the
    column below.
    """
    target, _ = models
    drafter = Lookahead(target.args.vocab_size, 4, 4, 2)
    decoder, heard = Decoder(target, drafter, max_seq_len=200, compile=False), []
    learn = drafter.learn

    def listen(root, chosen, where):
        n = int(decoder.state.length[0])
        heard.append(
            (decoder.state.tokens[0, : n + 1].tolist(), drafter.window_rows[0].tolist(), chosen[0].tolist())
        )
        learn(root, chosen, where)

    drafter.learn = listen
    decoder.generate([PROMPTS[1]], Sampling(12))
    for text, rows, chosen in heard[:6]:
        for c in range(4):
            read = text + rows[0][1 : c + 1] + [row[c] for row in rows[1:]]
            logits = target.logits(target.causal(torch.tensor([read]))[0][:, -1])[0]
            assert logits[chosen[c]] >= logits.max() - 1e-4


def test_the_command_line(golden, capsys):
    command = [
        "--checkpoint", str(golden), "--prompt", "abc abc abc", "--no-compile", "--max-new-tokens", "30",
        "--dtype", "fp32"
    ]
    assert generate.main(
        [*command, "--speculate", "lookahead", "--window", "3", "--guess-set", "4", "--compare", "--json"]
    ) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    for options, message in (
        (["--speculate", "lookahead", "--level", "2"], "--level 2: must be 3 to"),
        (["--speculate", "lookup", "--level", "4"], "belongs to"),
        (["--speculate", "lookahead", "--tree", "4,1,2"], "no use for --tree"),
    ):
        assert generate.main([*command, *options]) == 1
        assert message in capsys.readouterr().err

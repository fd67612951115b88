"""Lookahead: window and pool do what a plain program of lists does, with tokens that are the target's own."""
import random
from types import SimpleNamespace

import pytest
import torch

from drafters.lookahead import EMPTY, Lookahead
from engine.engine import Engine
from sampling.options import Sampling


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
        roots = [rng.randrange(4) for _ in lists]
        new = [[rng.randrange(4) for _ in range(window)] for _ in lists]
        for one, root, tokens in zip(lists, roots, new):
            one.learn(root, tokens)
        drafter.learn(torch.tensor(roots), torch.tensor(new), torch.ones(2, dtype=torch.bool))
        for i, one in enumerate(lists):
            assert drafter.window_rows[i].tolist() == one.rows
            for token in range(4):
                held = [tuple(gram) for gram in drafter.pool[i, token].tolist() if EMPTY not in gram]
                assert held == one.pool.get(token, [])
    state = SimpleNamespace(root=lambda: torch.tensor([3, 0]))
    tree = drafter.propose(state, None, None).tree
    paths = [[tree.tokens[0, 1 + c + guesses * d].item() for d in range(level - 1)] for c in range(guesses)]
    known = [list(gram) for gram in lists[0].pool[3]]
    assert paths == [[3] * (level - 1)] * (guesses - len(known)) + known


def test_an_extra_row_reads_its_column(models):
    """The choice at the window's last row is that of plain decoding on root, row 0 up to the column, and the
    column below.
    """
    target, _ = models
    drafter = Lookahead(target.args.vocab_size, 4, 4, 2)
    engine, seen, learn = Engine(target, drafter, max_seq_len=200, compile=False), [], drafter.learn

    def listen(root, chosen, where):
        n = int(engine.state.length[0])
        text = engine.state.tokens[0, : n + 1].tolist()
        seen.append((text, drafter.window_rows[0].tolist(), chosen[0].tolist()))
        learn(root, chosen, where)

    drafter.learn = listen
    request, = engine.generate([[256, *range(97, 120)]], Sampling(12))
    assert len(seen) == len(request.accept_lengths) >= 4
    for text, rows, chosen in seen[:6]:
        for c in range(4):
            read = text + rows[0][1 : c + 1] + [row[c] for row in rows[1:]]
            logits = target.logits(target.causal(torch.tensor([read]))[0][:, -1])[0]
            assert logits[chosen[c]] >= logits.max() - 1e-4

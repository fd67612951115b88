"""Lookahead: tree, window and pool are those of a plain program of lists, with tokens of the target's own."""
import pytest
import torch
from helpers.drafters import few_tokens

from drafters.lookahead import Lookahead
from engine.engine import Engine
from engine.sampling import Sampling


class Lists:
    """The algorithm for one sequence, as published: dictionaries and lists."""

    def __init__(self, target, rows: list[list[int]], level: int, guesses: int):
        self.target, self.rows, self.level, self.guesses, self.pool = target, rows, level, guesses, {}

    def learn(self, text: list[int]) -> None:
        """Guess what follows each column, with what stands before it in row 0."""
        first, new = [text[-1], *self.rows[0][1:]], []
        for c, token in enumerate(first):
            read = text + first[1 : c + 1] + [row[c] for row in self.rows[1:]]
            new.append(int(self.target.logits(self.target.causal(torch.tensor([read]))[0][0, -1]).argmax()))
            known = self.pool.setdefault(token, [])
            gram = [*(row[c] for row in self.rows[1:]), new[c]]
            if gram in known:
                known.remove(gram)
            known.append(gram)
            del known[: -self.guesses]
        self.rows = [*self.rows[1:], new]

    def check_window(self, drafted: dict[tuple, int], right: int) -> None:
        """Each cell stands below the one above it, row 0 is a path below the root."""
        for r, row in enumerate(self.rows):
            for c, token in list(enumerate(row))[r == 0 :]:
                assert drafted[(right,) * c + (right + 1,) * r] == token

    def tree(self, root: int) -> list[list[int]]:
        known = self.pool.get(root, [])
        return [[root] * (self.level - 1)] * (self.guesses - len(known)) + known


@pytest.mark.parametrize("window, level, guesses", [(7, 5, 7), (3, 3, 2), (1, 4, 1)])
def test_every_step_is_that_of_lists(window, level, guesses):
    """Over five tokens, so that columns begin alike and repeat; texts at random, one after the other."""
    target = few_tokens(5, 0)
    drafter, whole = Lookahead(5, window, level, guesses), 0
    engine = Engine(target, drafter, max_seq_len=100, compile=False)
    for seed, prompt in enumerate(([0, 1, 2, 3], [1, 2])):
        engine.admit(prompt, Sampling(60, 1.0, seed=seed), watch=True)
        text, lists = list(prompt), Lists(target, drafter.window[0].tolist(), level, guesses)
        assert {token for row in lists.rows for token in row} <= {*prompt}
        while engine.busy:
            for event in engine.step():
                if event.draft:
                    paths = drafter.shape.paths
                    drafted = dict(zip(paths, event.draft.tokens[1:]))
                    chains = [[drafted[(c,) + (0,) * i] for i in range(level - 1)] for c in range(guesses)]
                    lists.check_window(drafted, guesses)
                    assert chains == lists.tree(text[-1])
                    whole += chains[0] != [text[-1]] * (level - 1)
                    lists.learn(text)
                    assert drafter.window[0].tolist() == lists.rows
                text += event.ids
    assert whole > 10

"""Requests that come and go: each text is what it is alone, whatever else is running."""
import itertools
import random

import pytest
import torch
from helpers.decoding import plain, prompts
from helpers.drafters import NAMES, make_drafter

from drafters.base import Drafter
from drafters.eagle import Eagle
from drafters.lookup import Lookup
from drafters.mixed import Mixed
from engine import body
from engine.calibration import SHORT, TEMPERATURES, Calibration
from engine.costs import Costs
from engine.decoder import Decoder
from engine.run import Run
from engine.seats import Seats
from engine.tuning import Plan
from sampling.options import Sampling
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)


def requests(count: int, seed: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of 1 to 150 tokens, of which many begin alike, with samplings of every sort."""
    draw = random.Random(seed)
    beginnings, made = prompts(4, seed=seed, shortest=60, longest=120), []
    for i in range(count):
        prompt = prompts(1, seed=1000 * seed + i, longest=40)[0]
        if draw.random() < 0.6:
            prompt = draw.choice(beginnings)[: draw.randrange(1, 120)] + prompt
        more = draw.choice([
            {}, {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
            {"temperature": 0.9, "min_p": 0.05, "presence_penalty": 0.5},
            {"repetition_penalty": 1.2, "logit_bias": {101: 2}}, {"logprobs": 2},
        ])
        made.append((prompt, Sampling(draw.randrange(1, 40), seed=i, **more)))
    return made


def alone(models, made) -> list[list[int]]:
    decoder = plain(models)
    return [decoder.generate([prompt], [sampling])[0].ids for prompt, sampling in made]


def decode(
    seats: Seats, made, draw: random.Random, leaving: float = 0.0, plain: float = 0.0
) -> list[list[int] | None]:
    """All texts, which come when it happens; None for one that was left before its end. plain: the share of
    those that want no drafts.
    """
    waiting, found, texts = list(enumerate(made)), [None] * len(made), {}
    while waiting or seats.busy:
        while waiting and seats.free and draw.random() < 0.5:
            i, (prompt, sampling) = waiting.pop(0)
            text = seats.admit(prompt, sampling, plain=draw.random() < plain)
            texts[text] = i
        for event in seats.advance():
            if event.emitted.done:
                found[texts.pop(event.text)] = event.text.ids
        for text in [*texts]:
            if draw.random() < leaving:
                seats.leave(text)
                del texts[text]
        assert len(texts) == len(seats.texts) == seats.batch - seats.free
        assert all(seats._texts[text.place] is text for text in seats.texts)
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != "residual"])
def test_every_text_is_what_it_is_alone(models, models1, name):
    drafter = make_drafter(name, models[0], models[1], models1[1], lambda heads: None)
    seats = Seats(models[0], drafter, places=3, max_seq_len=300, compile=False)
    made = requests(14, seed=1)
    assert decode(seats, made, random.Random(2)) == alone(models, made)


@pytest.mark.parametrize("counts", (None, (3,)))
def test_many_at_once(models, counts):
    """More than there are places; each ends as it does in a decoder of its own."""
    made = requests(8, 5)
    prompts, sampling = map(list, zip(*made))
    seats = Seats(models[0], places=3, max_seq_len=120, compile=False, stop_ids=[ord("e")], counts=counts)
    alone = Decoder(models[0], max_seq_len=120, compile=False, stop_ids=[ord("e")])
    expected = alone.generate(prompts, sampling)
    found = seats.generate(prompts, sampling)
    assert [(o.ids, o.finish) for o in found] == [(o.ids, o.finish) for o in expected]
    assert len({o.finish for o in found}) > 1 and not seats.busy


@pytest.fixture(scope="module")
def thirty(models):
    """Requests, and what each emits alone."""
    made = requests(30, seed=3)
    return made, alone(models, made)


@pytest.mark.parametrize("lag", (0, 1, 2))
@pytest.mark.parametrize("places", (1, 2, 5))
def test_whatever_else_is_running(models, thirty, places, lag):
    """Also where the host learns late what was emitted, and texts are left in the middle."""
    (target, head), (made, expected) = models, thirty
    seats = Seats(target, Eagle(head, SHAPE), places=places, max_seq_len=300, compile=False, lag=lag)
    for turn, leaving in enumerate((0.0, 0.03)):
        found = decode(seats, made, random.Random(turn), leaving)
        assert [a for a in found if a is not None] == [
            b for a, b in zip(found, expected) if a is not None
        ]
        assert (None in found) == bool(leaving)
    assert seats.free == places and not seats.busy


@pytest.mark.parametrize("few", (False, True))
@pytest.mark.parametrize("name", ("eagle3", "lookahead", "lookup"))
def test_plain_texts_beside_others(models, models1, monkeypatch, name, few):
    """Each group takes its own steps. few: as on a GPU, there are steps for few numbers of sequences."""
    if few:
        monkeypatch.setattr(Seats, "counts", staticmethod(lambda places, device: (2, places)))
    drafter = make_drafter(name, models[0], models[1], models1[1], lambda heads: None)
    seats = Seats(models[0], drafter, places=5, max_seq_len=300, compile=False, lag=int(few))
    made = requests(30, seed=4)
    found = decode(seats, made, random.Random(2), leaving=0.02, plain=0.4)
    expected = alone(models, made)
    assert [a for a in found if a is not None] == [b for a, b in zip(found, expected) if a is not None]
    one, other = seats.admit([5, 6], Sampling(20)), seats.admit([5, 6], Sampling(20), plain=True)
    while seats.busy:
        seats.advance()
    assert one.ids == other.ids and sum(other.steps.values()) == 19
    assert sum(one.steps.values()) < 19 or name == "lookup"


def test_a_text_is_read_once(models):
    """The next turn of a chat, and another text that begins alike while the first is being written."""
    target, head = models
    seats = Seats(target, Eagle(head, SHAPE), places=3, max_seq_len=300, compile=False)
    prompt = prompts(1, seed=5, shortest=100, longest=100)[0]
    first = seats.admit(prompt, Sampling(20))
    assert first.cached == 0
    while not first.ids:
        seats.advance()
    beside = seats.admit([*prompt[:90], 3, 4], Sampling(5, seed=2))  # copied from the first
    assert beside.cached == 89 and first.place != beside.place
    while seats.busy:
        seats.advance()
    other = seats.admit([9, 8, 7], Sampling(5))  # takes the place that is of least use
    assert other.cached == 0
    turn = seats.admit(prompt + first.ids + [5, 6], Sampling(10))
    assert turn.cached >= 119 - SHAPE.window - 1
    while seats.busy:
        seats.advance()
    decoder = plain(models)
    for text in (first, beside, other, turn):
        assert text.ids == decoder.generate([text.prompt], [text.sampling])[0].ids


def test_a_long_text_is_not_lost_for_a_short_beginning(models):
    target, head = models
    seats = Seats(target, Eagle(head, SHAPE), places=3, max_seq_len=300, compile=False)
    long = prompts(1, seed=6, shortest=200, longest=200)[0]

    def decode(prompt):
        text = seats.admit(prompt, Sampling(3))
        while seats.busy:
            seats.advance()
        return text.cached

    assert decode(long) == 0
    assert decode([*long[:50], 1, 2]) == 49  # copied into a free place
    assert decode([*long, 7]) >= 202 - SHAPE.window - 1
    assert decode([*long[:50], 1, 2, 3]) >= 50


def test_others_decode_while_a_prompt_is_read(models):
    seats = Seats(models[0], Eagle(models[1], SHAPE), places=2, max_seq_len=300, compile=False, chunks=(16,))
    first = seats.admit([1, 2, 3], Sampling(100))
    while not first.ids:
        seats.advance()
    second = seats.admit(prompts(1, seed=8, shortest=120, longest=120)[0], Sampling(5))
    progress = []
    while not second.ids:
        before = len(first.ids)
        seats.advance()
        progress.append(len(first.ids) - before)
    assert len(progress) == 8 and all(progress)


def test_trees_are_told_to_who_watches(models):
    target, head = models
    seats = Seats(target, Eagle(head, SHAPE), places=2, max_seq_len=300, compile=False)
    watched, other = seats.admit([5, 6, 7], Sampling(20), watch=True), seats.admit([5, 9], Sampling(20))
    steps = 0
    while seats.busy:
        for event in seats.advance():
            if event.text is other or not event.nodes:
                assert event.draft is None
                continue
            steps += 1
            draft, taken = event.draft, event.draft.path[: event.emitted.drafted + 1]
            assert len(draft.tokens) == len(draft.parent) == SHAPE.nodes == event.nodes + 1
            assert [draft.tokens[i] for i in taken[1:]] == event.emitted.ids[: event.emitted.drafted]
            assert all(draft.parent[b] == a for a, b in itertools.pairwise(taken))
    assert steps == sum(watched.steps.values()) > 3


def test_scores_of_a_prompt(models):
    target, _ = models
    prompt = prompts(1, seed=9, shortest=90, longest=90)[0]
    seats = Seats(target, Drafter(), places=2, max_seq_len=300, compile=False)
    for _ in range(2):  # read anew, though it is there
        text = seats.admit(prompt, Sampling(1, logprobs=3), score_prompt=True)
        while seats.busy:
            seats.advance()
        with torch.no_grad():
            p = target.logits(target.causal(torch.tensor([prompt]))[0])[0].log_softmax(-1)
        assert len(text.prompt_scores) == 89
        for i, score in enumerate(text.prompt_scores):
            assert score.logprob == pytest.approx(float(p[i, prompt[i + 1]]), abs=1e-4)
            assert [token for token, _ in score.top] == p[i].topk(3).indices.tolist()


def test_what_cannot_be_admitted(models):
    seats = Seats(models[0], places=1, max_seq_len=50, compile=False)
    for prompt, words in (([], "empty"), ([1] * 50, "50 tokens"), ([999999], "999999")):
        with pytest.raises(ValueError, match=words):
            seats.admit(prompt, Sampling())
    assert seats.free == 1
    seats.admit([1], Sampling())
    with pytest.raises(RuntimeError, match="all 1 places are taken"):
        seats.admit([1], Sampling())


def test_an_end_at_the_first_token(models):
    seats = Seats(models[0], Eagle(models[1], SHAPE), places=2, max_seq_len=50, compile=False)
    one, full = seats.admit([1, 2], Sampling(1)), seats.admit([3] * 49, Sampling(9))
    while seats.busy:
        seats.advance()
    assert len(one.ids) == len(full.ids) == 1
    decoder = Run(plain(models, max_seq_len=50), [[3] * 49], Sampling(9))
    for _ in decoder:
        pass
    assert decoder.ids[0] == full.ids


class Replays:
    """As `engine.capture.CapturedCalls`: what was called first for a key is what runs for it ever after."""

    def __init__(self):
        self.calls = {}

    def __call__(self, key, call):
        return self.calls.setdefault(key, call)()


@pytest.mark.parametrize("share", (0.0, 0.5, 1.0))
def test_captured_passes_are_told_apart(models, share):
    """Every step runs the tree that was asked for, whichever was captured first."""
    seats = Seats(models[0], Eagle(models[1], SHAPE), places=3, max_seq_len=300, compile=False, lag=0)
    seats.captured, launch, ran = Replays(), seats.launch_step, set()

    def watched(rows, span, kind, modes, guides=None):
        tree, path = launch(rows, span, kind, modes, guides)
        ran.add((kind.drafter.shape.nodes, tree.tokens.shape[1]))
        return tree, path

    seats.launch_step = watched
    seats.warm_up()
    ran.clear()
    made = requests(9, 5)
    assert decode(seats, made, random.Random(1), plain=share) == alone(models, made)
    assert ran == {0.0: {(12, 12)}, 0.5: {(1, 1), (12, 12)}, 1.0: {(1, 1)}}[share]


@pytest.mark.parametrize("plans", (False, True))
def test_a_chat_may_go_from_plain_to_drafts_and_back(models, plans):
    """Only the new turn is read, and the head knows what was decoded without it."""
    target, head = models
    known = Calibration({t: {SHAPE: 2.5} for t in TEMPERATURES}, (1.0,))
    pass_, rest = {SHORT: {1: 1e-3}}, {SHORT: {1: 1e-6}}
    always = {False: (SHAPE,), True: (SHAPE,)}
    seats = Seats(
        target, Eagle(head, SHAPE), places=2, max_seq_len=600, compile=False,
        plans={n: Plan(known, Costs(pass_, rest, rest), n, always) for n in (1, 2)} if plans else None,
    )
    for switch in seats.switches.values():
        switch.next = lambda context: SHAPE  # whatever this machine takes for it
    text, before = prompts(1, seed=6, shortest=30)[0], []
    for turn, without in enumerate((True, False, True, True, False)):
        made = seats.admit(text, Sampling(80), plain=without)
        while seats.busy:
            seats.advance()
        if turn:
            assert made.cached >= len(before) - 3
        before = made.prompt + made.ids
        text = before + [97, 98]
        if not without:
            alone = Decoder(target, Eagle(head, SHAPE), max_seq_len=600, compile=False)
            expected, = alone.generate([made.prompt], Sampling(80))
            assert made.ids == expected.ids
            # As many steps as where the head has read everything itself.
            assert abs(sum(made.steps.values()) - len(expected.accept_lengths)) <= 2


def test_texts_of_joint_trees_whose_head_rests_now_and_then(models):
    """Steps with the head, steps with what prompt lookup finds alone, plain steps: always the same text."""
    target, head = models
    shape = TreeShape(10, 3, 3)
    known = Calibration({t: {shape: 2.5} for t in TEMPERATURES}, (1.0,))
    pass_, rest = {SHORT: {1: 1e-3}}, {SHORT: {1: 1e-6}}
    always = {False: (shape,), True: (shape,)}
    seats = Seats(
        target, Mixed(Lookup(shortest=1), Eagle(head, shape)), places=3, max_seq_len=300, compile=False,
        plans={n: Plan(known, Costs(pass_, rest, rest), n, always) for n in (1, 2, 3)},
    )
    kinds = itertools.cycle([shape, *[None] * 9, shape, None, *[None] * 40])
    for switch in seats.switches.values():
        switch.next = lambda context: next(kinds)
    launch, taken = seats.launch_step, set()

    def watched(rows, span, kind, modes, guides=None):
        taken.add(kind.drafter.shape.nodes)
        return launch(rows, span, kind, modes, guides)

    seats.launch_step = watched
    made = requests(14, seed=1)
    assert decode(seats, made, random.Random(2)) == alone(models, made)
    assert taken == {1, Lookup().shape.nodes, shape.nodes}


def test_a_text_beside_it_does_not_take_a_chats_place(models):
    """The same prompt again, without drafts: what was answered before is still there for the next turn."""
    target, head = models
    seats = Seats(target, Eagle(head, SHAPE), places=4, max_seq_len=400, compile=False)
    prompt = prompts(1, seed=7, shortest=40)[0]
    one = seats.admit(prompt, Sampling(100))
    while seats.busy:
        seats.advance()
    beside = seats.admit(prompt, Sampling(100), plain=True)
    assert beside.cached == len(prompt) - 1
    while seats.busy:
        seats.advance()
    assert beside.ids == one.ids
    turn = seats.admit(prompt + one.ids + [97], Sampling(5))
    assert turn.cached >= len(prompt) + 97


@pytest.mark.parametrize("room, temperature", ((64, 0.0), (512, 1.0)))
def test_the_tree_follows_how_many_are_live(models, monkeypatch, room, temperature):
    """Large for one, small for two, none for more: whoever ends is replaced, until nobody waits.

    room: for tokens that the head has not read; texts in a crowd have more of them, or fewer.
    """
    monkeypatch.setattr(body, "UNREAD", room)
    target, head = models
    large, small = TreeShape(12, 3, 3), TreeShape(3, 1, 1)
    known = Calibration({t: {large: 2.5, small: 1.5} for t in TEMPERATURES}, (1.0,))
    pass_, rest = {SHORT: {1: 1e-3}}, {SHORT: {1: 1e-6}}
    trees = {1: (large,), 2: (small,), 3: (), 4: ()}
    seats = Seats(
        target, Eagle(head, large), places=4, max_seq_len=300, compile=False, plans={
            n: Plan(known, Costs(pass_, rest, rest), n, dict.fromkeys((False, True), of))
            for n, of in trees.items()
        },
    )
    for count, switch in seats.switches.items():
        switch.next = lambda context, of=trees[count]: of[0] if of else None
    launch, taken = seats.launch_step, {}

    def watched(rows, span, kind, modes, guides=None):
        taken.setdefault(rows.count, set()).add(kind.drafter.shape.nodes)
        return launch(rows, span, kind, modes, guides)

    seats.launch_step = watched
    made = [(prompt, Sampling(20 + 17 * i % 40, temperature, seed=i))
            for i, prompt in enumerate(prompts(7, seed=3, longest=90))]
    made.append((prompts(1, seed=4)[0], Sampling(150, temperature)))  # it outlives the others
    texts, waiting, at_last = [], list(made), None
    while waiting or seats.busy:
        while waiting and seats.free:
            texts.append(seats.admit(*waiting.pop(0)))
        seats.advance()
        if len(last := texts[-1].ids) > 130 and not texts[-1].done:
            cache, place = seats.drafter.caches[0], texts[-1].place
            at_last = [x[place, : texts[-1].length - large.window].clone() for x in (cache.k, cache.v)]
    assert [text.ids for text in texts] == alone(models, made)
    assert taken == {1: {12}, 2: {3}, 3: {1}, 4: {1}} and len(last) == 150
    # The head has read what was decoded without it, as in a text of its own.
    own = Decoder(target, Eagle(head, large), max_seq_len=300, compile=False)
    own.generate([made[-1][0]], made[-1][1])
    for mine, theirs in zip(at_last, (own.drafter.caches[0].k, own.drafter.caches[0].v)):
        torch.testing.assert_close(mine, theirs[0, : len(mine)], rtol=1e-3, atol=1e-4)

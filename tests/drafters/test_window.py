"""A head that attends to the last tokens of a text only: the text, what it drafts, what its caches hold."""
from collections.abc import Callable

import pytest
import torch
from helpers.decoding import load, plain, prompts
from helpers.drafters import make_drafter

from common.errors import InputError
from drafters.base import Drafter
from drafters.eagle import Eagle
from drafters.kept import Ring, Whole
from drafters.lookup import Lookup
from drafters.mixed import Mixed
from drafters.network import HeadDrafter
from engine.api import Drafting
from engine.costs import measure
from engine.decoder import Decoder
from engine.run import Run
from engine.seats import Seats
from engine.state import State
from kernels.backend import TORCH
from sampling.options import Sampling
from tree import TreeShape

KINDS = ("eagle3", "eagle2", "eagle1", "p-eagle", "dflash", "dspark")
SHAPE, ROOM = TreeShape(8, 2, 3), 24
PROMPTS = prompts(2, seed=3, shortest=30, longest=90)


@pytest.fixture(params=KINDS)
def make(request, models, models1) -> Callable[[int], HeadDrafter]:
    """make(reach) -> a drafter of each kind, the same head in all."""
    drafter = make_drafter(request.param, *models, models1[1], lambda model: None)
    return lambda reach: type(drafter)(drafter.head, drafter.shape, drafter.coupled, reach)


def decoder_of(target, drafter: Drafter, **options) -> Decoder:
    options = {"batch": len(PROMPTS), "max_seq_len": 200, "compile": False, "chunks": (16,)} | options
    return Decoder(target, drafter, **options)


def decode(decoder: Decoder, temperature: float = 0.0, texts=PROMPTS, tokens: int = 40):
    """(The tokens of all trees, what is decoded)."""
    seen = []
    with decoder.observe(lambda tree, path: seen.append(tree.tokens.tolist())):
        outputs = decoder.generate(texts, Sampling(tokens, temperature, seed=5))
    return seen, [output.ids for output in outputs]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_text_is_plain_text(models, make, temperature):
    """In a batch of texts that are several windows long, whose prompts are read in chunks longer than one."""
    _, expected = decode(plain(models, batch=len(PROMPTS)), temperature)
    trees, found = decode(decoder_of(models[0], make(12)), temperature)
    whole, _ = decode(decoder_of(models[0], make(0)), temperature)
    assert found == expected
    assert trees != whole  # the window matters


def test_a_window_as_long_as_the_text_changes_nothing(models, make):
    assert decode(decoder_of(models[0], make(200))) == decode(decoder_of(models[0], make(0)))


@pytest.mark.parametrize("reach", (5, 12, 70))
def test_the_ring_holds_the_last_tokens(models, make, reach):
    """Keys and values of a first layer do not depend on what it attends to, nor do any of DFlash's, which
    are of what it reads of the target: they are those of a cache of the whole text.
    """
    held = []
    for window in (0, reach):
        decoder = decoder_of(models[0], make(window))
        run = Run(decoder, PROMPTS, Sampling(50))
        for i, _ in enumerate(run):
            if i == 9:  # a step that is only captured leaves all as it is
                with decoder.still(), torch.no_grad():
                    decoder._launch_step(decoder.span(120), decoder.usual)
        held.append(decoder)
    whole, ring = (decoder.drafter.caches for decoder in held)
    deep = None if hasattr(held[0].drafter.head, "layers") else 1
    ends = [(d.state.length - d.state.n_new).tolist() for d in held]  # what comes after is not read yet
    for place, (known, end) in enumerate(zip(*ends)):
        last = torch.arange(max(0, end - reach), min(known, end))
        assert len(last) > min(reach, end) // 2
        for one, other in zip(whole[:deep], ring[:deep]):
            for all_rows, some in zip(one.buffers(), other.buffers()):
                torch.testing.assert_close(some[place, last % reach], all_rows[place, last])


def drafted(drafter: HeadDrafter, tokens, features, n_new: int = 2, places: int = 0) -> list[list[int]]:
    """The tree after a text of which all is read but `n_new` tokens. places: added to all positions."""
    N = tokens.shape[1] - 1
    drafter.allocate(1, 200, ROOM, torch.float32, "cpu")
    W = drafter.shape.window
    state = State(1, 200, W, features.shape[2], (), torch.float32, "cpu", vocabulary=320)
    state.tokens[0, : N + 1], state.done[0], slots = tokens[0], False, torch.arange(200)
    state.length.fill_(N - n_new)
    for start in range(0, N - n_new, 16):
        chunk = start + torch.arange(16)[None]
        some = torch.nn.functional.pad(features, (0, 0, 0, 16))[:, start : start + 16]
        drafter.read(state, some, chunk, TORCH.visible_before(slots, chunk[:, 0], 16))
    state.length.fill_(N), state.n_new.fill_(n_new)
    state.features[:, :n_new] = features[:, N - n_new : N]
    with torch.no_grad():
        tree = drafter.propose(state, slots, None).tree
    return tree.tokens.tolist(), tree.scores


@pytest.mark.parametrize("n_new", (1, 2, 3))
def test_what_stands_before_the_window_is_not_seen(make, n_new):
    """Other tokens and features there change nothing; one later they do, and without a window."""
    g = torch.Generator().manual_seed(1)
    windowed, whole = make(20), make(0)
    tokens = torch.randint(320, (1, 91), generator=g)
    width = len(windowed.aux_layers) * windowed.head.args.target_hidden_size
    features = torch.randn(1, 90, width, generator=g)

    def changed(until: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Text and features, other ones at the first positions, each a feature and the token after it."""
        others = tokens.clone(), features.clone()
        others[0][:, : until + 1] = torch.randint(320, (1, until + 1), generator=g)
        others[1][:, :until] = torch.randn(1, until, width, generator=g)
        return others

    before = 90 - n_new - 20  # tokens before those that the catch-up sees
    expected, scores = drafted(windowed, tokens, features, n_new)
    found, others = drafted(windowed, *changed(before), n_new)
    if windowed.head.args.num_layers == 1:  # deeper layers have seen what their windows had
        assert found == expected
        torch.testing.assert_close(others, scores)
    assert not torch.equal(drafted(windowed, *changed(before + 3), n_new)[1], scores)
    _, scores = drafted(whole, tokens, features, n_new)
    assert not torch.equal(drafted(whole, *changed(before), n_new)[1], scores)


@pytest.mark.parametrize("make", ("eagle3", "dspark"), indirect=True)
def test_several_at_a_time(models, make):
    """Requests come and go, prompts share beginnings: the texts are plain ones."""
    base = PROMPTS[0] + PROMPTS[1]
    texts = [base, base[:50] + [40, 41], base + PROMPTS[0], *PROMPTS]
    samplings = [Sampling(20 + 7 * i, i % 2, seed=i) for i in range(len(texts))]
    seats = Seats(models[0], make(12), places=2, max_seq_len=300, compile=False, chunks=(16,))
    found = [output.ids for output in seats.generate(texts, samplings)]
    expected = plain(models).generate(texts, samplings)
    assert found == [output.ids for output in expected]


def test_what_a_ring_has_lost_is_read_again(models):
    """A text that begins as a longer one did: its drafts are those of a decoder that has read only it."""
    long, short = PROMPTS[0] + PROMPTS[1], PROMPTS[0] + PROMPTS[1][:10]
    decoder = decoder_of(models[0], Eagle(models[1], SHAPE, reach=12), batch=1, max_seq_len=300)

    def trees(texts, reuse: bool) -> list:
        seen = []
        with decoder.observe(lambda tree, path: seen.append(tree.tokens.tolist())):
            decoder.start(texts, Sampling(30), reuse=reuse)
            started = decoder._start
            for _ in decoder.steps():
                pass
        return started, seen

    trees([long], False)
    started, found = trees([short], True)
    assert started == [len(short) - 1 - 12]
    assert found == trees([short], False)[1]
    assert trees([short + long], True)[0] == [len(short) - 1]  # all of the ring is written again


def test_how_much_a_ring_can_reuse():
    ring, whole = Ring(10), Whole()
    assert whole.reusable(7, 99, 8) == 7
    assert ring.reusable(7, 9, 8) == 7  # it has not gone round yet
    assert ring.reusable(50, 60, 70) == 50  # the new text goes further than the old one
    assert ring.reusable(50, 60, 55) == 40 and ring.reusable(5, 60, 55) == 0


def test_caches_are_as_long_as_the_window(models):
    """However long the text may be; what is checked beforehand is what is allocated."""
    sizes = []
    for longest in (300, 1000):
        decoder = decoder_of(models[0], Eagle(models[1], SHAPE, reach=64), max_seq_len=longest)
        buffers = [*decoder.caches.buffers(), *decoder.drafter.caches.buffers()]
        assert decoder.cache_bytes == sum(b.nbytes for b in buffers)
        sizes.append(decoder.drafter.caches[0].k.shape[1])
    assert sizes[0] == sizes[1] < 64 + 32
    mixed = Mixed(Lookup(), Eagle(models[1], SHAPE, reach=64))
    decoder = decoder_of(models[0], mixed)
    assert decode(decoder)[1] == decode(plain(models, batch=len(PROMPTS)))[1]
    assert mixed.reusable(50, 200, 90) == 0 and mixed.parts[1].caches[0].k.shape[1] < 64 + 40


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_the_kernels_draft_the_same(golden, dtype):
    """On the CPU kernels, in bfloat16 with an int8 head; in float32 the trees are those of PyTorch."""
    options = {"batch": 2, "max_seq_len": 300, "dtype": dtype, "device": "cpu"}
    drafting = {"method": "eagle3", "tree": SHAPE, "window": 20, "int8": dtype == "bf16"}
    fast, usual = load(golden, **options, **drafting).decoder, load(golden, **options).decoder
    assert fast.backend.row_invariant and fast.drafter.kept.reach == 20
    trees, found = decode(fast)
    assert found == decode(usual)[1]
    if dtype == "fp32":
        assert trees == decode(load(golden, compile=False, **options, **drafting).decoder)[0]


def test_costs_are_those_of_the_window(models):
    """The passes that are timed attend to the window: they run, over caches of its size."""
    costs = measure(models[0], Eagle(models[1], SHAPE, reach=16), False, (64,))
    assert costs.step(SHAPE, 64) > 0


@pytest.mark.parametrize("method, window, words", [
    ("eagle3", -1, "--draft-window -1: must be at least 1 token"),
    ("medusa", 8, "--draft-window 8: is for heads with attention .eagle, eagle2"),
    ("none", 8, "--draft-window 8"), ("lookup+medusa", 8, "--draft-window 8"),
])
def test_windows_that_cannot_be(method, window, words):
    with pytest.raises(InputError, match=words):
        Drafting(method, window=window)
    Drafting("lookup+eagle3", window=8)


def test_a_window_beyond_the_longest_text_is_none(golden):
    decoder = load(golden, "eagle3", compile=False, max_seq_len=100, tree=SHAPE, window=100).decoder
    assert decoder.drafter.kept.reach == 0

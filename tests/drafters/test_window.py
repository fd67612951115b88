"""A head that attends to the last tokens of a text only."""
import copy
import json
import shutil

import pytest
from helpers.decoding import drafts, load, prompts
from helpers.drafters import make_drafter

from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Sampling

KINDS = ("eagle3", "eagle2", "eagle1", "p-eagle", "dflash", "dspark")
WINDOW = 20
PROMPT = prompts(1, seed=3, shortest=90, longest=90)[0]


@pytest.fixture(params=KINDS)
def drafter(request, models, models1) -> HeadDrafter:
    return make_drafter(request.param, *models, models1[1], lambda model: None)


def engine_of(target, drafter: HeadDrafter, window: int) -> Engine:
    """An engine whose drafter is a copy, with this window."""
    head = copy.deepcopy(drafter.head)
    head.use_target(target)
    head.set_sliding_window(window)
    own = type(drafter)(head, drafter.shape)
    return Engine(target, own, max_seq_len=300, compile=False, chunks=(16,))


def test_the_default_is_what_a_head_was_trained_on(golden, tmp_path):
    folder = shutil.copytree(golden, tmp_path / "target")
    config = folder / "eagle3" / "config.json"
    for trained, length, given, window in (
        (40, 200, {}, 40), (40, 30, {}, 0), (40, 200, {"window": 0}, 0), (40, 200, {"window": 50}, 50),
        (0, 200, {"window": 50}, 50), (0, 200, {}, 0),
    ):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_window": trained}))
        llm = load(folder, "eagle3", compile=False, max_seq_len=length, **given)
        assert llm.engine.drafter.head.layer.window == window


def test_a_window_as_long_as_the_text_changes_no_draft(models, drafter):
    whole, windowed = (
        [draft[:3] for draft in drafts(engine_of(models[0], drafter, window), PROMPT, Sampling(16))]
        for window in (0, 300)
    )
    assert whole == windowed and any(len(draft[2]) > 1 for draft in whole)


def test_what_is_outside_the_window_changes_no_draft(models, drafter):
    """Keys and values that the last rows cannot see, not even by layers: other ones draft the same."""
    found = []
    for window, forgotten in ((WINDOW, False), (WINDOW, True), (0, True)):
        engine = engine_of(models[0], drafter, window)
        request = engine.admit(PROMPT, Sampling(30), watch=True)
        while not request.ids:
            engine.step()
        if forgotten:
            for buffer in engine.drafter.caches.buffers():
                buffer[:, : len(PROMPT) - WINDOW - 2] = 9.0
        found.append([])
        while len(found[-1]) < 3:
            found[-1] += [event.draft for event in engine.step() if event.draft]
    seen, same, whole = found
    assert seen == same and [draft.scores for draft in seen] != [draft.scores for draft in whole]

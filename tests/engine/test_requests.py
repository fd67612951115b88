"""Options of requests, each and all together: drafted text is plain text, and the option matters."""
import pytest
import torch
from helpers.decoding import check_texts, ids, load, plain, prompts, speculative

from sampling.options import Sampling
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)
ASKED = {
    "min_p": {"min_p": 0.05},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {32: -100, 101: 4, 97: 1.5}},
    "all": {
        "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
        "logit_bias": {101: 2}, "top_p": 0.95, "top_k": 40, "logprobs": 3,
    },
}


@pytest.mark.parametrize("asked, temperature", zip(ASKED.values(), (0.9, 0.0, 0.9, 0.0, 0.9, 0.9)), ids=ASKED)
def test_text_is_plain_text(models, asked, temperature):
    """And not the text without it: three prompts at once, of which one asks for nothing."""
    given = prompts(3, seed=21)
    requests = [Sampling(40, temperature, seed=i, **asked) for i in range(2)] + [Sampling(40, temperature)]
    usual = ids(plain(models, batch=3), given, [Sampling(40, temperature, seed=i) for i in (0, 1, 0)])
    wanted = ids(plain(models, batch=3), given, requests)
    check_texts(ids(speculative(models, SHAPE, batch=3), given, requests), wanted, list(zip(given, requests)))
    assert wanted[2] == usual[2] and wanted[:2] != usual[:2]


def test_penalties_are_forgotten_with_the_text(models):
    decoder, given = speculative(models, SHAPE), prompts(1, seed=23)
    usual = ids(decoder, given, Sampling(30))
    ids(decoder, given, Sampling(30, repetition_penalty=1.5, logit_bias={101: 50}, presence_penalty=2))
    assert ids(decoder, given, Sampling(30)) == usual
    fresh = ids(speculative(models, SHAPE), given, Sampling(30, presence_penalty=2))
    assert ids(decoder, given, Sampling(30, presence_penalty=2)) == fresh


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logprobs_are_the_targets(models, temperature):
    """Against a pass over the whole text; before penalties."""
    target, _ = models
    prompt = prompts(1, seed=24)[0]
    request = Sampling(25, temperature, logprobs=4, frequency_penalty=1, seed=2)
    found = []
    for decoder in (plain(models), speculative(models, SHAPE)):
        found += decoder.generate([prompt], request)
    assert found[0].ids == found[1].ids and max(found[1].accept_lengths) > 1
    with torch.no_grad():
        text = torch.tensor([prompt + found[0].ids])
        p = target.logits(target.causal(text)[0])[0, len(prompt) - 1 : -1].log_softmax(-1)
    for output in found:
        assert len(output.scores) == 25
        for row, token, score in zip(p, output.ids, output.scores):
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in score.top] == row.topk(4).indices.tolist()
            assert [x for _, x in score.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_stop_text_ends_text_and_tokens(golden, temperature):
    """Everywhere in the text, also in the middle of what a step accepted."""
    fast = load(golden, "eagle3", tree=SHAPE, compile=False)
    settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 3, "raw": True}
    whole = fast.generate("hello there", **settings)
    assert whole.finish == "length" and max(whole.accept_lengths) > 1
    inside = False
    for at in range(1, len(whole.text) - 1):
        stop = whole.text[at : at + 2]
        result = fast.generate("hello there", stop=(stop, "never there"), logprobs=0, **settings)
        end = whole.text.index(stop)
        assert (result.text, result.finish, result.stop) == (whole.text[:end], "stop", stop)
        last = fast.tokenizer.decode(whole.ids[: len(result.ids) - 1])
        assert fast.tokenizer.decode(result.ids).endswith(stop) and stop not in last
        assert result.ids == whole.ids[: len(result.ids)] and len(result.scores) == len(result.ids)
        assert sum(result.accept_lengths) == len(result.ids) - 1
        inside |= result.accept_lengths != whole.accept_lengths[: len(result.accept_lengths)]
    assert inside
    again = fast.generate("hello there", **settings)
    assert again.ids == whole.ids and again.stop is None


def test_events_end_before_the_stop(golden):
    llm = load(golden, "eagle3", tree=SHAPE, compile=False, batch=2)
    whole = llm.generate("the sea", raw=True, max_new_tokens=30)
    requests, texts = [], {}
    prompt = llm.encode("the sea", raw=True)
    for event in llm.engine.run([prompt] * 2, [Sampling(30), Sampling(30, stop="e")], requests):
        texts[event.request] = texts.get(event.request, "") + event.text
        assert event.drafted <= len(event.ids)
    first, second = requests
    assert [*texts.values()] == [whole.text, whole.text.split("e")[0]] == [first.text, second.text]
    assert first.finish == "length" and second.finish == "stop" and "e" in whole.text

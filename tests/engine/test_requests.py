"""Options of requests, each and all together."""
import pytest
import torch
from helpers.decoding import load, plain, prompts, speculative

from engine.sampling import Sampling
from tree import TreeShape

SHAPE = TreeShape(12, 3, 3)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_logprobs_are_the_targets(models, temperature):
    """Against a pass over the whole text; before penalties. Those of the prompt too, which is read anew."""
    target, _ = models
    prompt = prompts(1, seed=24, shortest=90, longest=90)[0]
    request = Sampling(25, temperature, logprobs=4, frequency_penalty=1, seed=2)
    engines = plain(models), speculative(models, SHAPE)
    found = [x for engine in engines * 2 for x in engine.generate([prompt], request, score_prompt=True)]
    assert found[0].ids == found[1].ids and max(found[1].accept_lengths) > 1
    text = prompt + found[0].ids
    with torch.no_grad():
        p = target.logits(target.causal(torch.tensor([text]))[0])[0, :-1].log_softmax(-1)
    for output in found:
        scores = output.prompt_scores + output.scores
        assert len(scores) == len(text) - 1 and output.cached == 0
        for row, token, score in zip(p, text[1:], scores):
            assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in score.top] == row.topk(4).indices.tolist()
            assert [x for _, x in score.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_a_stop_text_ends_text_and_tokens(golden, temperature):
    """Everywhere in the text, also in the middle of what a step accepted."""
    fast = load(golden, "eagle3", tree=SHAPE, compile=False)
    settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 3, "raw": True}
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

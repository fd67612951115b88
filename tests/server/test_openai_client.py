"""The official client against a running server: output equals plain decoding in this process."""
import asyncio
import json
from functools import partial

import openai
import pytest

pytestmark = pytest.mark.slow
USER = [{"role": "user", "content": "tell me something"}]
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["word", "count"],
    "properties": {"word": {"type": "string", "maxLength": 6}, "count": {"enum": [1, 2, 3]}},
}


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chat(client):
    return partial(client.chat.completions.create, model="golden", messages=USER)


def text_of(chunks, index: int = 0) -> str:
    """Return the text of one choice of a chat stream."""
    choices = (choice for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(choice.delta.content or "" for choice in choices)


def test_greedy_and_the_default(chat, plain):
    """The default is OpenAI's: temperature 1, a new seed each time."""
    answer, want = chat(temperature=0, max_completion_tokens=40), plain(USER, temperature=0)
    (choice,), usage = answer.choices, answer.usage
    assert choice.message.content == want.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(want.prompt), 40)
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    (one,), other = (answer := chat(logit_bias={"257": -100})).choices, chat(max_tokens=20)  # one never ends
    assert not one.message.content.startswith(other.choices[0].message.content)
    assert one.finish_reason == "length" and answer.usage.completion_tokens == 120  # --max-tokens


def test_a_stream_is_the_same_text(chat, plain):
    options = {"seed": 7, "n": 2, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    *chunks, last = chat(**options, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and not last.choices
    assert last.usage.completion_tokens == 80 and all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    texts = [plain(USER, seed=7 + i).text for i in range(2)]  # each choice has a seed of its own
    assert [text_of(chunks, i) for i in range(2)] == texts
    assert [choice.message.content for choice in chat(**options).choices] == texts
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"] * 2
    scores = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert len(scores) == 80 and all(len(x.top_logprobs) == 2 for x in scores)
    assert all(x.token in [one.token for one in x.top_logprobs] for x in scores)


def test_penalties_biases_and_stops(chat, plain):
    extra = {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1}
    same = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.95, "seed": 3}
    options = {"max_tokens": 40, "logit_bias": {"101": 2}, "extra_body": extra, **same}
    want = plain(USER, logit_bias={101: 2}, **extra, **same)
    assert chat(**options).choices[0].message.content == want.text
    stop = want.text[12:14]
    short = plain(USER, logit_bias={101: 2}, stop=(stop,), **extra, **same)
    answer = chat(stop=[stop, "never there"], **options)
    assert answer.choices[0].message.content == want.text.split(stop)[0] == short.text
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == len(short.ids)


@pytest.mark.parametrize("choice, names", (
    ("required", {"walk", "wait"}), ({"type": "function", "function": {"name": "wait"}}, {"wait"}),
), ids=("required", "named"))
def test_required_tool_calls(chat, choice, names):
    walk, wait = ({"type": "function", "function": {"name": name}} for name in ("walk", "wait"))
    walk["function"]["parameters"] = SCHEMA
    options = {"tools": [walk, wait], "tool_choice": choice, "max_tokens": 200, "temperature": 0.8}
    for seed in range(3):
        (found,) = chat(seed=seed, **options).choices
        (call,) = found.message.tool_calls
        assert found.finish_reason == "tool_calls" and not found.message.content
        assert call.type == "function" and call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == ({"word", "count"} if call.function.name == "walk" else set())
    (cut,) = chat(seed=2, **options | {"max_tokens": 5}).choices
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", "", None)


def test_the_schema_of_the_output_wherever_a_client_has_it(chat):
    """Complete output conforms to the schema: OpenAI's, llama.cpp's and vLLM's fields."""
    own, form = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "response_format"
    own["additionalProperties"] = False
    for body in (
        {form: {"type": "json_object", "schema": own}}, {form: {"type": "json_schema", "schema": own}},
        {form: {"type": "json_schema", "json_schema": {"schema": own}}}, {"json_schema": own},
        {"guided_json": json.dumps(own)}, {"structured_outputs": {"json": own}},
    ):
        (found,) = chat(max_tokens=200, seed=1, extra_body=body).choices
        assert json.loads(found.message.content) == {"a": 1}, body
    (free,) = chat(max_tokens=10, extra_body={form: {"type": "json_object"}}).choices
    assert free.message.content.startswith("{")


def test_completions_of_texts_and_ids(client, plain):
    prompts = ["the sea is", "a fox"]
    want = [plain(p, raw=True, temperature=0, max_new_tokens=12).text for p in prompts]
    options = {"model": "golden", "temperature": 0, "max_tokens": 12}
    for prompt in prompts, [list(p.encode()) for p in prompts]:
        assert [choice.text for choice in client.completions.create(prompt=prompt, **options).choices] == want
    chunks = client.completions.create(prompt=list(b"the sea is"), stream=True, echo=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompts[0] + want[0]


def test_echo_with_logprobs_scores_the_prompt(client):
    """As lm-evaluation-harness uses it. Offsets are character positions, also of tokens that are partial
    characters or not part of the text.
    """
    ids = [*"é 猫x".encode(), 257, *b"ab"]
    options = {"model": "golden", "prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    one, none = (client.completions.create(max_tokens=n, **options).choices[0] for n in (6, 0))
    found, offsets, scores = one.logprobs, one.logprobs.text_offset, one.logprobs.token_logprobs
    assert offsets[:10] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 5] and one.text.startswith(none.text)
    assert none.text == "é 猫xab" and none.logprobs.token_logprobs == scores[:10] and scores[0] is None
    for token, own, top in [*zip(found.tokens, scores, found.top_logprobs)][1:]:  # its own, as OpenAI has it
        assert top[token] == own <= max(top.values()) and len(top) <= 2
    alone = client.completions.create(max_tokens=2, **options | {"logprobs": 0, "echo": False})
    bare = alone.choices[0].logprobs
    assert [*map(dict, zip(zip(bare.tokens, bare.token_logprobs)))] == bare.top_logprobs
    for token, at in zip(found.tokens[8:], offsets[8:]):
        assert "\ufffd" in token or one.text[at : at + len(token)] == token
    parts = [chunk.choices[0] for chunk in client.completions.create(max_tokens=6, stream=True, **options)]
    assert [x for part in parts for x in part.logprobs.text_offset] == offsets and len(scores) == 16
    assert "".join(part.text for part in parts) == one.text


def test_prefix_cache_serves_the_next_turn(chat):
    turn = [{"role": "user", "content": "once upon a time there was a very long first message"}]
    first = chat(messages=turn, max_tokens=30, seed=1)
    turn += [{"role": "assistant", "content": first.choices[0].message.content},
             {"role": "user", "content": "go on"}]
    usage = chat(messages=turn, max_tokens=5, seed=1).usage
    assert first.usage.prompt_tokens <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_many_concurrent_clients(server, plain):
    """Twenty clients, three slots, a queue of five: the client library retries requests that are refused."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20)

    async def one(seed: int) -> str:
        answer = await client.chat.completions.create(
            model="golden", messages=USER, seed=seed, max_tokens=10 + seed, stream=seed % 2 == 0
        )
        return answer.choices[0].message.content if seed % 2 else text_of([c async for c in answer])

    async def everyone() -> list[str]:
        return await asyncio.gather(*map(one, range(20)))

    want = [plain(USER, seed=seed, max_new_tokens=10 + seed).text for seed in range(20)]
    assert asyncio.run(everyone()) == want

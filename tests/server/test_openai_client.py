"""OpenAI's client against a running server: output equals plain decoding in this process."""
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


def test_greedy_equals_plain_and_defaults_are_random(chat, plain):
    """The defaults are OpenAI's: temperature 1 and a random seed."""
    answer, expected = chat(temperature=0, max_completion_tokens=40), plain(USER, temperature=0)
    (choice,), usage = answer.choices, answer.usage
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt), 40)
    assert usage.completion_tokens_details.accepted_prediction_tokens > 0
    answer, other = chat(logit_bias={"257": -100}), chat(max_tokens=20)  # the bias excludes <eos>
    (choice,) = answer.choices
    assert not choice.message.content.startswith(other.choices[0].message.content)
    assert choice.finish_reason == "length" and answer.usage.completion_tokens == 120  # --max-tokens


def test_streamed_and_complete_text_equal_plain(chat, plain):
    options = {"seed": 7, "n": 2, "max_tokens": 40, "logprobs": True, "top_logprobs": 2}
    *chunks, last = chat(**options, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant" and not last.choices
    assert last.usage.completion_tokens == 80 and all(c.usage is None for c in chunks)
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    texts = [plain(USER, seed=7 + i).text for i in range(2)]  # the choices have consecutive seeds
    assert [text_of(chunks, i) for i in range(2)] == texts
    assert [choice.message.content for choice in chat(**options).choices] == texts
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"] * 2
    scores = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert len(scores) == 80 and all(len(x.top_logprobs) == 2 for x in scores)
    assert all(x.token in [top.token for top in x.top_logprobs] for x in scores)


def test_sampling_options_equal_plain(chat, plain):
    extra = {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1}
    same = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.95, "seed": 3}
    options = {"max_tokens": 40, "logit_bias": {"101": 2}, "extra_body": extra, **same}
    expected = plain(USER, logit_bias={101: 2}, **extra, **same)
    assert chat(**options).choices[0].message.content == expected.text
    stop = expected.text[12:14]
    stopped = plain(USER, logit_bias={101: 2}, stop=(stop,), **extra, **same)
    answer = chat(stop=[stop, "never there"], **options)
    assert answer.choices[0].message.content == expected.text.split(stop)[0] == stopped.text
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == len(stopped.ids)


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


def test_output_matches_the_json_schema(chat):
    """The schema is in the fields of OpenAI, llama.cpp or vLLM."""
    schema, form = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, "response_format"
    schema["additionalProperties"] = False
    for body in (
        {form: {"type": "json_object", "schema": schema}}, {form: {"type": "json_schema", "schema": schema}},
        {form: {"type": "json_schema", "json_schema": {"schema": schema}}}, {"json_schema": schema},
        {"guided_json": json.dumps(schema)}, {"structured_outputs": {"json": schema}},
    ):
        (found,) = chat(max_tokens=200, seed=1, extra_body=body).choices
        assert json.loads(found.message.content) == {"a": 1}, body
    (free,) = chat(max_tokens=10, extra_body={form: {"type": "json_object"}}).choices
    assert free.message.content.startswith("{")


def test_completions_equal_plain(client, plain):
    prompts = ["the sea is", "a fox"]
    expected = [plain(p, raw=True, temperature=0, max_new_tokens=12).text for p in prompts]
    options = {"model": "golden", "temperature": 0, "max_tokens": 12}
    for prompt in prompts, [list(p.encode()) for p in prompts]:
        choices = client.completions.create(prompt=prompt, **options).choices
        assert [choice.text for choice in choices] == expected
    chunks = client.completions.create(prompt=list(b"the sea is"), stream=True, echo=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompts[0] + expected[0]


def test_echo_with_logprobs_scores_the_prompt(client):
    """Used by lm-evaluation-harness. Offsets count characters; tokens that do not complete a character, and
    control tokens, have the next token's offset.
    """
    ids = [*"é 猫x".encode(), 257, *b"ab"]
    options = {"model": "golden", "prompt": [ids], "echo": True, "logprobs": 1, "temperature": 0}
    echoed, prompt_only = (client.completions.create(max_tokens=n, **options).choices[0] for n in (6, 0))
    logprobs, offsets, scores = echoed.logprobs, echoed.logprobs.text_offset, echoed.logprobs.token_logprobs
    assert offsets[:10] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 5] and echoed.text.startswith(prompt_only.text)
    assert prompt_only.text == "é 猫xab" and scores[0] is None
    assert prompt_only.logprobs.token_logprobs == scores[:10]
    for token, logprob, top in [*zip(logprobs.tokens, scores, logprobs.top_logprobs)][1:]:
        assert top[token] == logprob <= max(top.values()) and len(top) <= 2  # incl. the token
    completion = client.completions.create(max_tokens=2, **options | {"logprobs": 0, "echo": False})
    new = completion.choices[0].logprobs
    assert [*map(dict, zip(zip(new.tokens, new.token_logprobs)))] == new.top_logprobs
    for token, at in zip(logprobs.tokens[8:], offsets[8:]):
        assert "\ufffd" in token or echoed.text[at : at + len(token)] == token
    parts = [chunk.choices[0] for chunk in client.completions.create(max_tokens=6, stream=True, **options)]
    assert [x for part in parts for x in part.logprobs.text_offset] == offsets and len(scores) == 16
    assert "".join(part.text for part in parts) == echoed.text


def test_next_turn_reuses_the_cached_prefix(chat):
    turn = [{"role": "user", "content": "once upon a time there was a very long first message"}]
    first = chat(messages=turn, max_tokens=30, seed=1)
    turn += [{"role": "assistant", "content": first.choices[0].message.content},
             {"role": "user", "content": "go on"}]
    usage = chat(messages=turn, max_tokens=5, seed=1).usage
    assert first.usage.prompt_tokens <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_concurrent_clients_equal_plain(server, plain):
    """Twenty clients, three slots, a queue of five: the client library retries on status 429."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20)

    async def complete(seed: int) -> str:
        answer = await client.chat.completions.create(
            model="golden", messages=USER, seed=seed, max_tokens=10 + seed, stream=seed % 2 == 0
        )
        return answer.choices[0].message.content if seed % 2 else text_of([c async for c in answer])

    async def complete_all() -> list[str]:
        return await asyncio.gather(*map(complete, range(20)))

    expected = [plain(USER, seed=seed, max_new_tokens=10 + seed).text for seed in range(20)]
    assert asyncio.run(complete_all()) == expected

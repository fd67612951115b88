"""The official client against a running server: each text is that of plain decoding here."""
import asyncio
import json

import pytest

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow
USER = [{"role": "user", "content": "tell me something"}]
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["word", "count"],
    "properties": {"word": {"type": "string", "maxLength": 6}, "count": {"enum": [1, 2, 3]}},
}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def text_of(alone, messages, **sampling) -> str:
    return alone.generate(messages, **{"max_new_tokens": 40, "temperature": 1.0, **sampling}).text


@pytest.mark.parametrize("temperature", (0.0, 0.9))
def test_chat(client, alone, temperature):
    answer = client.chat.completions.create(
        model="golden", messages=USER, temperature=temperature, seed=5, max_completion_tokens=40
    )
    result = alone.generate(USER, temperature=temperature, seed=5, max_new_tokens=40)
    (choice,) = answer.choices
    assert choice.message.content == result.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and answer.object == "chat.completion"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(result.prompt_ids), 40)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens > 0


def test_the_default_is_openais(client, alone):
    """Temperature 1, another seed each time, a text to the end of the context."""
    answers = [client.chat.completions.create(model="golden", messages=USER) for _ in range(2)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] != texts[1]
    assert all(a.usage.total_tokens == 300 or a.choices[0].finish_reason == "stop" for a in answers)


def test_a_stream_is_the_same_text(client, alone):
    stream = client.chat.completions.create(
        model="golden", messages=USER, seed=7, max_tokens=40, stream=True,
        stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 40 and all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == text_of(alone, USER, seed=7)
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    scores = [x for c in chunks[:-1] if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
    assert len(scores) == 40 and all(len(x.top_logprobs) == 2 for x in scores)


def test_several_choices_at_once(client, alone):
    answer = client.chat.completions.create(model="golden", messages=USER, seed=10, n=3, max_tokens=40)
    texts = [choice.message.content for choice in answer.choices]
    assert texts == [text_of(alone, USER, seed=10 + i) for i in range(3)]
    assert answer.usage.completion_tokens == 120
    stream = client.chat.completions.create(
        model="golden", messages=USER, seed=10, n=3, max_tokens=40, stream=True
    )
    streamed = ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_penalties_biases_and_stops(client, alone):
    extra = {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1}
    asked = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "top_p": 0.95}
    answer = client.chat.completions.create(
        model="golden", messages=USER, seed=3, max_tokens=40, logit_bias={"101": 2}, extra_body=extra, **asked
    )
    expected = text_of(alone, USER, seed=3, logit_bias={101: 2}, **extra, **asked)
    assert answer.choices[0].message.content == expected
    stop = expected[12:14]
    answer = client.chat.completions.create(
        model="golden", messages=USER, seed=3, max_tokens=40, logit_bias={"101": 2}, extra_body=extra,
        stop=[stop, "never there"], **asked,
    )
    result = alone.generate(
        USER, seed=3, max_new_tokens=40, temperature=1.0, logit_bias={101: 2}, stop=(stop,), **extra, **asked
    )
    assert answer.choices[0].message.content == expected.split(stop)[0] == result.text
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == len(result.ids)


@pytest.mark.parametrize("form", (
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
), ids=lambda form: form["type"])
def test_json(client, form):
    for seed in range(3):
        answer = client.chat.completions.create(
            model="golden", messages=USER, seed=seed, response_format=form, max_tokens=200, temperature=0.8,
        )
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            assert form["type"] == "json_object" and choice.message.content.startswith("{")
            continue
        value = json.loads(choice.message.content)
        if form["type"] == "json_schema":
            assert value.keys() == {"word", "count"} and value["count"] in (1, 2, 3)


def test_completions_of_texts_and_ids(client, alone):
    prompts = ["the sea is", "a fox"]
    answer = client.completions.create(model="golden", prompt=prompts, temperature=0, max_tokens=12)
    expected = [alone.generate(p, raw=True, max_new_tokens=12).text for p in prompts]
    assert [choice.text for choice in answer.choices] == expected
    ids = [list(p.encode()) for p in prompts]
    again = client.completions.create(model="golden", prompt=ids, temperature=0, max_tokens=12)
    assert [choice.text for choice in again.choices] == expected
    streamed = ""
    for chunk in client.completions.create(
        model="golden", prompt=ids[0], temperature=0, max_tokens=12, stream=True, echo=True
    ):
        streamed += chunk.choices[0].text
    assert streamed == prompts[0] + expected[0]


def test_echo_with_logprobs_scores_the_prompt(client, alone):
    """As lm-evaluation-harness asks: sums over the prompt's tokens, and whether they are the likeliest."""
    prompt = list(b"the sea is wide")
    answer = client.completions.create(
        model="golden", prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    assert text.startswith("the sea is wide") and logprobs.token_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(logprobs.tokens) == len(prompt) + 1
    assert logprobs.text_offset[:3] == [0, 1, 2] and logprobs.tokens[:3] == ["t", "h", "e"]
    for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:]):
        assert own <= max(top.values())
    nothing = client.completions.create(
        model="golden", prompt=[prompt], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert nothing.choices[0].text == "the sea is wide"
    assert nothing.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:-1]


def test_the_next_turn_reads_only_what_is_new(client):
    turn = [{"role": "user", "content": "once upon a time there was a very long first message"}]
    first = client.chat.completions.create(model="golden", messages=turn, max_tokens=30, seed=1)
    turn += [{"role": "assistant", "content": first.choices[0].message.content},
             {"role": "user", "content": "go on"}]
    second = client.chat.completions.create(model="golden", messages=turn, max_tokens=5, seed=1)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_async_and_many_at_once(server, alone):
    """Twenty clients, three places, a queue of five: those who do not fit try again, as the client does."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20)

    async def one(seed: int) -> str:
        stream = await client.chat.completions.create(
            model="golden", messages=USER, seed=seed, max_tokens=10 + seed, stream=seed % 2 == 0
        )
        if seed % 2:
            return stream.choices[0].message.content
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def everyone() -> list[str]:
        return await asyncio.gather(*map(one, range(20)))

    texts = asyncio.run(everyone())
    assert texts == [text_of(alone, USER, seed=seed, max_new_tokens=10 + seed) for seed in range(20)]


def test_errors_are_openais(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError, match="needs room for one more") as error:
        client.completions.create(model="golden", prompt=[[5] * 400])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="golden", messages=USER, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="logit_bias holds token id 99999"):
        client.chat.completions.create(model="golden", messages=USER, logit_bias={"99999": 1})
    with pytest.raises(openai.BadRequestError, match="JSON schema cannot be used"):
        client.chat.completions.create(
            model="golden", messages=USER,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}},
        )
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="chat template defines no calls"):
        client.chat.completions.create(model="golden", messages=USER, tools=[tool])

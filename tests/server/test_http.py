"""The server's routes, limits and shutdown; malformed requests, impatient clients, disconnects."""
import concurrent.futures
import gzip
import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers.serving import serving

import serve
from server.app import FILES

pytestmark = pytest.mark.slow
MESSAGES = [{"role": "user", "content": "tell me something"}]
CHAT = {"messages": MESSAGES, "seed": 1}
ENDLESS = {**CHAT, "max_tokens": 280, "logit_bias": {"257": -100}}
TOOL = {"function": {"name": "f"}}
DEEP = b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}"


def metrics(server) -> dict[str, float]:
    """Return the metrics that have one label."""
    lines = server.get("/metrics").text.splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def quiet(server, seconds: float = 10.0) -> bool:
    """Return whether the server becomes idle within a short time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        health = server.get("/health").json()
        if health["running"] == health["waiting"] == 0:
            return True
        time.sleep(0.02)
    return False


# A body of a chat, whole or added to a good one, and words of its error.
OF_CHATS = (
    (b"", "the body is missing"), (b"[]", "the body is []; expected a valid dictionary"),
    (b"\x80", "not UTF-8 (byte 0)"), (DEEP, "nested too deeply"),
    (b'{"messages": ', "the body is not JSON: Expecting value (character 13)"),
    ({"messages": []}, "messages is []; expected at least 1 item"),
    ({"messages": [{"role": "me"}]}, "messages.0.role is 'me'; expected 'system', "),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages.1.content is missing; expected a text or tool"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content is missing; expected"),
    ({"temperature": "hot"}, "temperature is 'hot'; expected a valid number"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not text"),
    ({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}, "'images' is not text"),
    ({"images": ["aGk="]}, "images: "), ({"tool_choice": "required"}, "tool_choice: needs tools"),
    ({"max_tokens": 0}, "max_tokens is 0; expected greater than or equal to 1"),
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice: names no function"),
    ({"chat_template_kwargs": {"messages": 3}}, "messages cannot"),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema needs a schema"),
    *(({"json_schema": schema}, words) for schema, words in (
        ({"$ref": "#"}, "no text fits one that refers to itself"), ({"not": {}}, 'used: "not" not supported'),
        ({"type": "foo"}, "the JSON schema cannot be used: type foo unknown"))),
)
REFUSED = [("/v1/chat/completions", *case) for case in OF_CHATS] + [
    ("/v1/completions", {"prompt": []}, "at least 1 item"), ("/v1/completions", {"prompt": [[]]}, "is empty"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix: not supported"),
    # Before the prompts are read: a hundred thousand of them took half a minute and a gigabyte.
    ("/v1/completions", {"prompt": ["a"] * 100_000, "n": 16}, "at most 8"),
    *(("/v1/completions", {"prompt": "x"} | fields, words) for fields, words in (
        ({"banned_strings": ["a"]}, "banned_strings: not supported; use bad_words"),
        ({"best_of": 2}, "best_of: not supported; use n"), ({"guided_regex": "("}, "cannot be used"),
        ({"min_tokens": 20}, "min_tokens 20: at most 16"), ({"bad_words": [""]}, "bad_words.0 is "),
        ({"guided_choice": ["a"], "regex": "b"}, "give one of"), ({"ebnf": "root ::= x"}, "cannot be used"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is 'x'; expected no such"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1; expected greater than"))),
    *(("/v1/chat/completions", {name: value}, f"{name}: not supported") for name, value in (
        ("functions", [TOOL["function"]]), ("function_call", {"name": "f"}), ("chat_template", "x"),
        ("include_stop_str_in_output", True), ("skip_special_tokens", False), ("typical_p", 0.5))),
    ("/v1/completions", {"prompt": [[5] * 400]},
        "can have at most 300 tokens: shorten it or raise --max-seq-len (at most 1,024)"),
    ("/tokenize", {}, "give prompt or"), ("/detokenize", {"tokens": [7, 100_000]}, "100000 is not a"),
]


def test_bad_bodies_are_one_line_errors(server):
    """Web pages must send JSON with its content type: browsers let another site post text without asking the
    server.
    """
    for path, body, words in [*REFUSED, ("/v1/chat/completions?page", CHAT, "Content-Type")]:
        if isinstance(body, dict):
            body = json.dumps((CHAT if "chat" in path else {}) | body).encode()
        kind = {"Origin": "http://a.page", "Content-Type": "text/plain"} if "page" in path else {}
        found = httpx.post(server.url + path, content=body, headers=kind, timeout=15)
        error = found.json()["error"]
        assert found.status_code == 400 and error["type"] == "invalid_request_error", (path, body[:80])
        assert error["message"] and "\n" not in error["message"] and words in error["message"]
        assert "Value error" not in error["message"] and " should " not in error["message"]
        assert "at most 300" not in words or error["code"] == "context_length_exceeded"


LIMITS = (
    ({"guided_choice": ["yes", "no"]}, "yes|no"), ({"structured_outputs": {"choice": ["no"]}}, "no"),
    ({"guided_regex": "^[0-9]{3}$"}, "[0-9]{3}"), ({"regex": "a/b"}, "a/b"),
    ({"structured_outputs": {"regex": "x"}, "guided_grammar": ""}, "x"), ({"grammar": 'root ::= "no"'}, "no"),
    ({"ebnf": 'root ::= "a"+ "!"'}, "a+!?"), ({"guided_grammar": 'start: "no"'}, "no"),
    ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"), ({"bad_words": ["e", "o"]}, "[^eo]*"),
    ({"stop_token_ids": [101], "bad_words": []}, "[^e]*"), ({"ignore_eos": True}, ".{20,24}"),
    ({"min_tokens": 20, "logit_bias": {"257": 100}}, ".{16,20}"),
    ({"grammar": 'root ::= "no"', "min_tokens": 24, "ignore_eos": True}, "no"),  # the grammar wins
)


def test_fields_that_limit_an_answer(server):
    """Equal with and without speculation."""
    for temperature, (fields, pattern) in itertools.product((0, 1), LIMITS):
        body = CHAT | fields | {"max_tokens": 24, "temperature": temperature}
        text, plain = (server.post(**body, speculate=drafts).json()["choices"][0]["message"]["content"]
                       for drafts in (True, False))
        assert text == plain and re.fullmatch(pattern, text, re.DOTALL), (fields, text, plain)
    off = {"best_of": 1, "functions": [], "skip_special_tokens": True, "n_predict": -1, "typical_p": 1.0}
    assert server.post(**CHAT | off, max_tokens=1).status_code == 200


def test_requests_as_clients_send_them(server):
    """Without a Content-Type or with curl's default, extra slashes, HEAD; compressed bodies are refused."""
    body = json.dumps({"prompt": "the sea", "max_tokens": 1}).encode()
    for path, headers in (
        ("/v1/completions", {}), ("/completions", {"Content-Encoding": "identity"}),
        ("/v1//completions/", {"Content-Type": "application/x-www-form-urlencoded"}),
    ):
        assert httpx.post(server.url + path, content=body, headers=headers).status_code == 200
    for path in ("/v1/models/", "/v1/models/golden", "/health/", "/metrics", "/", "/docs", "/tokenizer_info"):
        found = httpx.head(server.url + path)
        assert (found.status_code, found.content) == (200, b"") and server.get(path).status_code == 200
    packed = httpx.post(server.url + path, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding gzip" in packed.json()["error"]["message"]
    for path, words in ("/v1/embeddings", "embeddings: not supported"), ("/v1/nothing/", "no such route"):
        found = server.post(path, input="x")
        assert found.status_code == 404 and words in found.json()["error"]["message"]
    assert "model 'other' not found" in server.post(**CHAT, model="other").json()["error"]["message"]
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_null_and_unknown_fields_are_ignored(server):
    names = "stream_options", "n", "stop", "seed", "model", "tools", "tool_choice", "max_completion_tokens"
    unknown = {"user": "me", "store": True, "reasoning_effort": "low", "metadata": {"a": 1}, "nothing": None}
    found = server.post(**CHAT | dict.fromkeys(names) | unknown, max_tokens=3)
    assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 3
    usage = server.post("/v1/completions", prompt=["the sea", "sand"], n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 11 and usage["completion_tokens"] == 12  # a prompt counts once


def test_speculation_statistics(server):
    """Each step's tree contains the accepted path, which the step's tokens start with. Field names are
    vLLM's; in a stream they come with the last chunk.
    """
    body = {**ENDLESS, "max_tokens": 30, "return_speculation": True}
    with server.stream(**body) as events:
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
    told = [chunk["choices"][0].get("speculation", {}) for chunk in chunks]
    steps = [step for step in told if step.get("tree")]
    for step in steps:
        tree = step["tree"]
        assert len(tree["texts"]) == len(tree["parent"]) == len(tree["scores"]) == step["nodes"] + 1 == 16
        assert all(tree["parent"][node] == above for above, node in zip(tree["path"], tree["path"][1:]))
        assert "".join(tree["texts"][node] for node in tree["path"][1:]) == step["text"]
        assert all(score <= 0 for score in tree["scores"]) and step["drafted"] <= step["tokens"]
    accepted, count = sum(step["drafted"] for step in steps), len(steps)
    histogram = [sum(step["drafted"] == n for step in steps) for n in range(5)]
    whole, plain = (server.post(**body, speculate=speculate).json() for speculate in (True, False))
    found = whole["metrics"]["speculative_decoding"]
    assert accepted > 0 and found == {
        "mean_acceptance_length": 1 + accepted / count, "draft_acceptance_rate": accepted / (15 * count),
        "acceptance_histogram": histogram, "num_spec_steps": count, "num_spec_tokens": 4,
        "num_accepted_draft_tokens": accepted, "num_draft_tokens": 15 * count,
    }
    assert [i for i, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_control_tokens_of_raw_prompts(server):
    """Completion prompts are raw text, so <eos> is a token there, and is echoed as sent."""
    prompt, chat = "a<eos>b", {"messages": [{"role": "user", "content": "a<eos>b"}], "tools": [TOOL]}
    for more, want in (({}, [97, 257, 98]), ({"parse_special": False}, list(prompt.encode()))):
        assert server.post("/tokenize", prompt=prompt, **more).json()["tokens"] == want
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0, **more}
        found = server.post("/v1/completions", **body).json()
        choice, offsets = found["choices"][0], [0, 1, 6, 7] if 257 in want else [*range(8)]
        assert found["usage"]["prompt_tokens"] == len(want) and choice["text"].startswith(prompt)
        assert choice["logprobs"]["text_offset"] == offsets
    for more, text in ({}, b"f u:a<eos>b\na:"), ({"add_generation_prompt": False}, b"f u:a<eos>b\n"):
        assert bytes(server.post("/tokenize", **chat, **more).json()["tokens"]) == text


def test_every_request_has_a_line(server):
    assert quiet(server)
    seen = len(server.printed())
    server.post(**ENDLESS)
    server.get("/no%0Awhere")
    ends = time.monotonic() + 10
    while len(lines := server.printed()[seen:].splitlines()) < 2 and time.monotonic() < ends:
        time.sleep(0.01)  # the line comes after the answer
    words = r"POST /v1/chat/completions 200 length, 22 \+ 278 tokens, [\d.]+ tokens/s, tau [1-5]\.\d\d"
    assert re.fullmatch(words, lines[0])
    assert lines[1] == r"GET /no\nwhere 404 no such route; see /docs"


def test_routes(server):
    (described,) = server.get("/v1/models").json()["data"]
    assert described == server.get("/v1/models/golden").json() and described["id"] == "golden"
    assert described["max_model_len"] == 300 and described["method"] == "eagle3"
    assert "chat_template" in server.get("/tokenizer_info").json()
    assert server.get("/v1/chat/completions").headers["Allow"] == "POST"
    for file in (*FILES, "/openapi.json", "/docs"):
        assert server.get(file).status_code == 200
    for path in ("/nothing", "/v1/models/other/one", "/page.py", "/../serve.py", "/%2e%2e/serve.py"):
        found = server.get(path)
        assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"
    found = server.post("/tokenize", prompt="the sea").json()
    assert found == {"tokens": list(b"the sea"), "count": 7, "max_model_len": 300}
    for more, text in (([], "the sea"), ([257], "the sea<eos>"), ([319], "the sea")):  # only the model's
        assert server.post("/detokenize", tokens=found["tokens"] + more).json() == {"prompt": text}


def test_connections_are_refused_until_the_model_is_ready():
    with serve.bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


def test_full_queue_is_refused(server):
    """Three slots and a queue of five: of twelve concurrent requests, eight are answered."""
    assert quiet(server)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: server.post(**ENDLESS | {"max_tokens": 150}), range(12)))
    refused = [answer for answer in found if answer.status_code == 429]
    assert 1 <= len(refused) <= 4 and all(answer.headers["Retry-After"] for answer in refused)
    assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}


def test_disconnect_frees_the_slot(server):
    assert quiet(server)
    before = metrics(server)
    for _ in range(3):
        with server.stream(**ENDLESS) as events:
            next(events)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/chat/completions", json=ENDLESS, timeout=0.05)
    assert quiet(server, 2.0)
    name = "vllm:generation_tokens_total"
    assert metrics(server)[name] - before[name] < 6 * 280


def test_metrics_add_up(server):
    assert quiet(server)
    before = metrics(server)
    usage = server.post(**CHAT, max_tokens=50).json()["usage"]
    grown = {name: value - before[name] for name, value in metrics(server).items() if name in before}
    assert grown["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert grown["vllm:generation_tokens_total"] == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == accepted + rejected
    drafts = grown["vllm:spec_decode_num_drafts_total"]
    assert drafts == grown["eagle_steps_total"] and accepted + rejected == 15 * drafts
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    # A step's own token is left out where the text ends before it.
    assert usage["completion_tokens"] - accepted - drafts - 1 in (-1, 0)


def test_key_origins_size_and_time(golden, tmp_path):
    options = ("--api-key", "secret", "--cors", "http://a.page", "--max-body", "2000", "--time-limit", "0.5")
    options += ("--per-request-metrics", "--speculate", "none")
    right, path = {"Authorization": "Bearer secret"}, "/v1/chat/completions"
    with serving(golden, tmp_path / "log", *options) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}):
            found = server.post(headers=headers, **CHAT)
            assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
            assert server.get("/v1/models", headers=headers).status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200
        assert {server.get(path).status_code for path in ("/health", "/metrics", "/")} == {200}
        assert server.post(headers=right, **CHAT, max_tokens=2).json()["metrics"] is None  # nothing drafts
        for origin, allowed in (("http://a.page", "http://a.page"), ("http://b.page", None)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            found = httpx.options(server.url + path, headers=headers)
            assert found.headers.get("Access-Control-Allow-Origin") == allowed
        assert server.post(headers=right, messages=MESSAGES, user="x" * 3000).status_code == 413
        pieces = httpx.post(server.url + path, content=iter([b" " * 1500] * 2), headers=right)
        assert pieces.status_code == 413
        late = server.post(headers=right, **ENDLESS | {"max_tokens": 1500})
        assert late.status_code == 504 and "0.5 s" in late.json()["error"]["message"]
        with server.stream(headers=right, **ENDLESS | {"max_tokens": 1500}) as events:
            *_, last, end = events
        assert end == "[DONE]" and "0.5 s" in json.loads(last)["error"]["message"]


def test_graceful_shutdown(golden, tmp_path):
    with serving(golden, tmp_path / "log", "--grace", "30", "--speculate", "none") as server:
        with server.stream(**ENDLESS) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            while (refused := server.post(**CHAT, max_tokens=1)).status_code == 200:  # signals take time
                pass
            assert refused.status_code == server.get("/health").status_code == 503
            assert "shutting down" in refused.json()["error"]["message"] and refused.headers["Retry-After"]
            *_, last, end = events
        assert json.loads(last)["choices"][0]["finish_reason"] == "length" and end == "[DONE]"
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.printed() and "shutting down" in server.printed()


@pytest.mark.parametrize("grace, signals", (("0.3", 1), ("60", 2)))
def test_shutdown_deadline_and_second_signal(golden, tmp_path, grace, signals):
    """Streams, plain responses and queued requests that have not ended by then get an error."""
    options = "--grace", grace, "--slots", "2", "--speculate", "none"  # else trees are measured first
    with serving(golden, tmp_path / "log", *options) as server:
        body = {**ENDLESS, "max_tokens": 1900}
        with concurrent.futures.ThreadPoolExecutor(4) as pool, server.stream(**body) as events:
            next(events)  # the stream has a place; one of the others gets the second, two wait
            whole = [pool.submit(server.post, **body) for _ in range(3)]
            while metrics(server)["vllm:num_requests_waiting"] < 2:
                time.sleep(0.01)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            *_, last, end = events
        assert end == "[DONE]" and "shutting down" in json.loads(last)["error"]["message"]
        for answer in (each.result() for each in whole):
            assert answer.status_code == 503 and answer.headers["Retry-After"]
            assert "shutting down" in answer.json()["error"]["message"]
        assert server.process.wait(30) == 0  # within the grace of 60 seconds
        assert "Traceback" not in server.printed()


# -- a server on two ranks answers as one process does, and ends in order ------------------------------------


ON_RANKS = (
    "--speculate", "eagle3", "--tree", "8,2,3", "--slots", "3", "--max-seq-len", "300", "--dtype", "fp32"
)
BODIES = [
    {"seed": 1, "max_tokens": 40}, {"seed": 2, "temperature": 1.0, "max_tokens": 30},
    {"seed": 3, "temperature": 0.8, "top_p": 0.9, "max_tokens": 50, "stop": ["e"]},
    {"seed": 4, "max_tokens": 1}, {"seed": 5, "max_tokens": 24, "response_format": {"type": "json_object"}},
    {"seed": 6, "max_tokens": 60, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
]


def answers(server) -> list[str]:
    """Return answers to concurrent requests on three slots, while another client disconnects in the middle of
    a long stream.
    """
    def ask(i: int) -> str:
        messages = [{"role": "user", "content": f"tell me something about {i}"}]
        answer = server.post(**{"messages": messages, "temperature": 0, **BODIES[i]}).json()
        return answer["choices"][0]["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(7) as pool, server.stream(**ENDLESS) as events:
        found = pool.map(ask, range(len(BODIES)))
        next(events)
    return [*found]


def test_two_ranks_answer_as_one(golden, server, tmp_path):
    want = answers(server)
    with serving(golden, tmp_path / "log", *ON_RANKS, ranks=2) as server:
        bad = server.post("/v1/completions", prompt=[1, 99999], max_tokens=4)
        assert bad.status_code == 400 and answers(server) == want and answers(server) == want
        server.end()
        printed = server.printed()
    assert "2 ranks: each holds" in printed and printed.count("ready ") == 1 and "error: " not in printed
    assert "shutting down: finishing running requests" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_a_rank_that_dies_ends_the_server(golden, tmp_path):
    """A waiting client gets an error that names the reason."""
    with serving(golden, tmp_path / "log", *ON_RANKS, ranks=2) as server:
        pid = server.process.pid
        ranks = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        (follower,) = (x for x in ranks if b"\0RANK=1\0" in Path(f"/proc/{x}/environ").read_bytes())
        with server.stream(**ENDLESS) as events:
            next(events)
            os.kill(follower, signal.SIGKILL)
            *_, reason, end = events
        assert end == "[DONE]" and "decoding failed" in reason
        assert server.process.wait(60) != 0  # long before a collective would time out
        printed = server.printed()
        assert printed.count("error: rank 0 of 2 has lost another one") == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

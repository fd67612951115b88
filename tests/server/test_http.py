"""The server's routes, limits, metrics and shutdown; invalid requests and disconnected clients."""
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


def wait_until_idle(server, seconds: float = 10.0) -> bool:
    """Return whether the server becomes idle within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        health = server.get("/health").json()
        if health["running"] == health["waiting"] == 0:
            return True
        time.sleep(0.02)
    return False


# (body as bytes, or fields that make a valid chat invalid; part of the error message)
BAD_CHAT_REQUESTS = (
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
    ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "the function is not in tools"),
    ({"chat_template_kwargs": {"messages": 3}}, "messages cannot"),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema needs a schema"),
    *(({"json_schema": schema}, error) for schema, error in (
        ({"$ref": "#"}, "only a reference to itself"), ({"not": {}}, 'used: "not" not supported'),
        ({"type": "foo"}, "the JSON schema cannot be used: type foo unknown"))),
)
BAD_REQUESTS = [("/v1/chat/completions", *case) for case in BAD_CHAT_REQUESTS] + [
    ("/v1/completions", {"prompt": []}, "at least 1 item"), ("/v1/completions", {"prompt": [[]]}, "is empty"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix: not supported"),
    # Rejected before encoding: encoding 100,000 prompts would take half a minute and 1 GB.
    ("/v1/completions", {"prompt": ["a"] * 100_000, "n": 16}, "at most 8"),
    *(("/v1/completions", {"prompt": "x"} | fields, error) for fields, error in (
        ({"banned_strings": ["a"]}, "banned_strings: not supported; use bad_words"),
        ({"best_of": 2}, "best_of: not supported; use n"), ({"guided_regex": "("}, "cannot be used"),
        ({"min_tokens": 20}, "min_tokens 20: must be at most max_tokens, 16"),
        ({"bad_words": [""]}, "bad_words.0 is "),
        ({"guided_choice": ["a"], "regex": "b"}, "set only one of"),
        ({"ebnf": "root ::= x"}, "cannot be used"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is 'x'; expected a known key"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0 is -1; expected greater than"))),
    *(("/v1/chat/completions", {name: value}, f"{name}: not supported") for name, value in (
        ("functions", [TOOL["function"]]), ("function_call", {"name": "f"}), ("chat_template", "x"),
        ("include_stop_str_in_output", True), ("skip_special_tokens", False), ("typical_p", 0.5))),
    ("/v1/completions", {"prompt": [[5] * 400]},
        "can have at most 300 tokens: shorten it or raise --max-seq-len (at most 1,024)"),
    ("/tokenize", {}, "set either prompt or"), ("/detokenize", {"tokens": [7, 100_000]}, "100000 is not a"),
]


def test_bad_bodies_are_one_line_errors(server):
    """Requests with an Origin need JSON's content type: browsers send text/plain without CORS."""
    for path, body, message in [*BAD_REQUESTS, ("/v1/chat/completions?page", CHAT, "Content-Type")]:
        if isinstance(body, dict):
            body = json.dumps((CHAT if "chat" in path else {}) | body).encode()
        headers = {"Origin": "http://a.page", "Content-Type": "text/plain"} if "page" in path else {}
        response = httpx.post(server.url + path, content=body, headers=headers, timeout=15)
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error", (path, body[:80])
        assert error["message"] and "\n" not in error["message"] and message in error["message"]
        assert "Value error" not in error["message"] and " should " not in error["message"]
        assert "at most 300" not in message or error["code"] == "context_length_exceeded"


# (fields, pattern of the output)
CONSTRAINTS = (
    ({"guided_choice": ["yes", "no"]}, "yes|no"), ({"structured_outputs": {"choice": ["no"]}}, "no"),
    ({"guided_regex": "^[0-9]{3}$"}, "[0-9]{3}"), ({"regex": "a/b"}, "a/b"),
    ({"structured_outputs": {"regex": "x"}, "guided_grammar": ""}, "x"), ({"grammar": 'root ::= "no"'}, "no"),
    ({"ebnf": 'root ::= "a"+ "!"'}, "a+!?"), ({"guided_grammar": 'start: "no"'}, "no"),
    ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"), ({"bad_words": ["e", "o"]}, "[^eo]*"),
    ({"stop_token_ids": [101], "bad_words": []}, "[^e]*"), ({"ignore_eos": True}, ".{20,24}"),
    ({"min_tokens": 20, "logit_bias": {"257": 100}}, ".{16,20}"),
    ({"grammar": 'root ::= "no"', "min_tokens": 24, "ignore_eos": True}, "no"),  # the grammar has priority
)


def test_output_matches_its_constraints(server):
    """It is equal with and without speculation."""
    for temperature, (fields, pattern) in itertools.product((0, 1), CONSTRAINTS):
        body = CHAT | fields | {"max_tokens": 24, "temperature": temperature}
        text, plain = (server.post(**body, speculate=drafts).json()["choices"][0]["message"]["content"]
                       for drafts in (True, False))
        assert text == plain and re.fullmatch(pattern, text, re.DOTALL), (fields, text, plain)
    unset = {"best_of": 1, "functions": [], "skip_special_tokens": True, "n_predict": -1, "typical_p": 1.0}
    assert server.post(**CHAT | unset, max_tokens=1).status_code == 200


def test_lenient_requests_and_unknown_routes(server):
    """No Content-Type or curl's default, extra slashes and HEAD work; compressed bodies get status 415."""
    body = json.dumps({"prompt": "the sea", "max_tokens": 1}).encode()
    for path, headers in (
        ("/v1/completions", {}), ("/completions", {"Content-Encoding": "identity"}),
        ("/v1//completions/", {"Content-Type": "application/x-www-form-urlencoded"}),
    ):
        assert httpx.post(server.url + path, content=body, headers=headers).status_code == 200
    for path in ("/v1/models/", "/v1/models/golden", "/health/", "/metrics", "/", "/docs", "/tokenizer_info"):
        response = httpx.head(server.url + path)
        assert (response.status_code, response.content) == (200, b"") and server.get(path).status_code == 200
    headers = {"Content-Encoding": "gzip"}
    compressed = httpx.post(server.url + path, content=gzip.compress(body), headers=headers)
    assert compressed.status_code == 415 and "Content-Encoding gzip" in compressed.json()["error"]["message"]
    for path, message in ("/v1/embeddings", "embeddings: not supported"), ("/v1/nothing/", "no such route"):
        response = server.post(path, input="x")
        assert response.status_code == 404 and message in response.json()["error"]["message"]
    assert "model 'other' not found" in server.post(**CHAT, model="other").json()["error"]["message"]
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405


def test_null_and_unknown_fields_are_ignored(server):
    names = "stream_options", "n", "stop", "seed", "model", "tools", "tool_choice", "max_completion_tokens"
    unknown = {"user": "me", "store": True, "reasoning_effort": "low", "metadata": {"a": 1}, "nothing": None}
    response = server.post(**CHAT | dict.fromkeys(names) | unknown, max_tokens=3)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 3
    usage = server.post("/v1/completions", prompt=["the sea", "sand"], n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 11 and usage["completion_tokens"] == 12  # each prompt is counted once


def test_speculation_statistics(server):
    """Each tree contains the accepted path, with the step's text. Metrics have vLLM's names, are computed
    from the steps, and are in the last chunk of a stream.
    """
    body = {**ENDLESS, "max_tokens": 30, "return_speculation": True}
    with server.stream(**body) as events:
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
    speculation = [chunk["choices"][0].get("speculation", {}) for chunk in chunks]
    steps = [step for step in speculation if step.get("tree")]
    for step in steps:
        tree = step["tree"]
        assert len(tree["texts"]) == len(tree["parent"]) == len(tree["scores"]) == step["nodes"] + 1 == 16
        assert all(tree["parent"][node] == parent for parent, node in zip(tree["path"], tree["path"][1:]))
        assert "".join(tree["texts"][node] for node in tree["path"][1:]) == step["text"]
        assert all(score <= 0 for score in tree["scores"]) and step["drafted"] <= step["tokens"]
    accepted, count = sum(step["drafted"] for step in steps), len(steps)
    histogram = [sum(step["drafted"] == n for step in steps) for n in range(5)]
    whole, plain = (server.post(**body, speculate=speculate).json() for speculate in (True, False))
    assert accepted > 0 and whole["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 1 + accepted / count, "draft_acceptance_rate": accepted / (15 * count),
        "acceptance_histogram": histogram, "num_spec_steps": count, "num_spec_tokens": 4,
        "num_accepted_draft_tokens": accepted, "num_draft_tokens": 15 * count,
    }
    assert [i for i, chunk in enumerate(chunks) if "metrics" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert plain["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_control_tokens_of_raw_prompts(server):
    """Completion prompts are raw text: <eos> is one token, and is echoed as sent."""
    prompt, chat = "a<eos>b", {"messages": [{"role": "user", "content": "a<eos>b"}], "tools": [TOOL]}
    for more, expected_ids in (({}, [97, 257, 98]), ({"parse_special": False}, list(prompt.encode()))):
        assert server.post("/tokenize", prompt=prompt, **more).json()["tokens"] == expected_ids
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0, **more}
        response = server.post("/v1/completions", **body).json()
        choice, offsets = response["choices"][0], [0, 1, 6, 7] if 257 in expected_ids else [*range(8)]
        assert response["usage"]["prompt_tokens"] == len(expected_ids) and choice["text"].startswith(prompt)
        assert choice["logprobs"]["text_offset"] == offsets
    for more, text in ({}, b"f u:a<eos>b\na:"), ({"add_generation_prompt": False}, b"f u:a<eos>b\n"):
        assert bytes(server.post("/tokenize", **chat, **more).json()["tokens"]) == text


def test_posts_and_errors_are_logged(server):
    assert wait_until_idle(server)
    old_length = len(server.printed())
    server.post(**ENDLESS)
    server.get("/no%0Awhere")
    deadline = time.monotonic() + 10
    while len(lines := server.printed()[old_length:].splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)  # the line is logged after the response
    pattern = r"POST /v1/chat/completions 200 length, 22 \+ 278 tokens, [\d.]+ tokens/s, tau [1-5]\.\d\d"
    assert re.fullmatch(pattern, lines[0])
    assert lines[1] == r"GET /no\nwhere 404 no such route; see /docs"


def test_routes(server):
    (model,) = server.get("/v1/models").json()["data"]
    assert model == server.get("/v1/models/golden").json() and model["id"] == "golden"
    assert model["max_model_len"] == 300 and model["method"] == "eagle3"
    assert "chat_template" in server.get("/tokenizer_info").json()
    assert server.get("/v1/chat/completions").headers["Allow"] == "POST"
    for file in (*FILES, "/openapi.json", "/docs"):
        assert server.get(file).status_code == 200
    for path in ("/nothing", "/v1/models/other/one", "/page.py", "/../serve.py", "/%2e%2e/serve.py"):
        response = server.get(path)
        assert response.status_code == 404 and response.json()["error"]["type"] == "not_found_error"
    tokenized = server.post("/tokenize", prompt="the sea").json()
    assert tokenized == {"tokens": list(b"the sea"), "count": 7, "max_model_len": 300}
    for more, text in (([], "the sea"), ([257], "the sea<eos>"), ([319], "the sea")):  # 319: padding
        assert server.post("/detokenize", tokens=tokenized["tokens"] + more).json() == {"prompt": text}


def test_connections_are_refused_until_the_model_is_ready():
    with serve.bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


def test_full_queue_is_refused(server):
    """Twelve requests, 3 slots, 5 queued: 1 to 4 are refused, as some finish before others come."""
    assert wait_until_idle(server)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: server.post(**ENDLESS | {"max_tokens": 150}), range(12)))
    refused = [response for response in responses if response.status_code == 429]
    assert 1 <= len(refused) <= 4 and all(response.headers["Retry-After"] for response in refused)
    assert {response.json()["error"]["type"] for response in refused} == {"rate_limit_error"}


def test_disconnect_frees_the_slot(server):
    assert wait_until_idle(server)
    before = metrics(server)
    for _ in range(3):
        with server.stream(**ENDLESS) as events:
            next(events)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/chat/completions", json=ENDLESS, timeout=0.05)
    assert wait_until_idle(server, 2.0)
    name = "vllm:generation_tokens_total"  # 6 requests of 280 tokens if none were aborted
    assert metrics(server)[name] - before[name] < 6 * 280


def test_metrics_equal_the_usage(server):
    assert wait_until_idle(server)
    before = metrics(server)
    usage = server.post(**CHAT, max_tokens=50).json()["usage"]
    added = {name: value - before[name] for name, value in metrics(server).items() if name in before}
    assert added["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert added["vllm:generation_tokens_total"] == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert added["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert added["vllm:spec_decode_num_draft_tokens_total"] == accepted + rejected
    drafts = added["vllm:spec_decode_num_drafts_total"]
    assert drafts == added["eagle_steps_total"] and accepted + rejected == 15 * drafts
    assert added["vllm:time_to_first_token_seconds_count"] == 1
    # Each step emits a token besides the accepted ones, except the last step if the output ends before it.
    assert usage["completion_tokens"] - accepted - drafts - 1 in (-1, 0)


def test_api_key_cors_and_limits(golden, tmp_path):
    options = ("--api-key", "secret", "--cors", "http://a.page", "--max-body", "2000", "--time-limit", "0.5")
    options += ("--per-request-metrics", "--speculate", "none")
    authorized, path = {"Authorization": "Bearer secret"}, "/v1/chat/completions"
    with serving(golden, tmp_path / "log", *options) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}):
            response = server.post(headers=headers, **CHAT)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
            assert server.get("/v1/models", headers=headers).status_code == 401
        assert server.get("/v1/models", headers={"Authorization": "bearer secret"}).status_code == 200
        assert {server.get(path).status_code for path in ("/health", "/metrics", "/")} == {200}
        assert server.post(headers=authorized, **CHAT, max_tokens=2).json()["metrics"] is None  # no drafting
        for origin, allowed in (("http://a.page", "http://a.page"), ("http://b.page", None)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            response = httpx.options(server.url + path, headers=headers)
            assert response.headers.get("Access-Control-Allow-Origin") == allowed
        assert server.post(headers=authorized, messages=MESSAGES, user="x" * 3000).status_code == 413
        chunked = httpx.post(server.url + path, content=iter([b" " * 1500] * 2), headers=authorized)
        assert chunked.status_code == 413
        timed_out = server.post(headers=authorized, **ENDLESS | {"max_tokens": 1500})
        assert timed_out.status_code == 504 and "0.5 s" in timed_out.json()["error"]["message"]
        with server.stream(headers=authorized, **ENDLESS | {"max_tokens": 1500}) as events:
            *_, last, end = events
        assert end == "[DONE]" and "0.5 s" in json.loads(last)["error"]["message"]


def test_graceful_shutdown(golden, tmp_path):
    with serving(golden, tmp_path / "log", "--grace", "30", "--speculate", "none") as server:
        with server.stream(**ENDLESS) as events:
            next(events)
            server.process.send_signal(signal.SIGINT)
            while (refused := server.post(**CHAT, max_tokens=1)).status_code == 200:  # before the signal
                pass
            assert refused.status_code == server.get("/health").status_code == 503
            assert "shutting down" in refused.json()["error"]["message"] and refused.headers["Retry-After"]
            *_, last, end = events
        assert json.loads(last)["choices"][0]["finish_reason"] == "length" and end == "[DONE]"
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.printed() and "shutting down" in server.printed()


@pytest.mark.parametrize("grace, signals", (("0.3", 1), ("60", 2)))
def test_shutdown_aborts_requests(golden, tmp_path, grace, signals):
    """After --grace or a second signal, streams, plain responses and queued requests get an error."""
    options = "--grace", grace, "--slots", "2", "--speculate", "none"  # no time for measuring trees
    with serving(golden, tmp_path / "log", *options) as server:
        body = {**ENDLESS, "max_tokens": 1900}
        with concurrent.futures.ThreadPoolExecutor(4) as pool, server.stream(**body) as events:
            next(events)  # the stream has one of two slots, one request gets the other, two wait
            responses = [pool.submit(server.post, **body) for _ in range(3)]
            while metrics(server)["vllm:num_requests_waiting"] < 2:
                time.sleep(0.01)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
            *_, last, end = events
        assert end == "[DONE]" and "shutting down" in json.loads(last)["error"]["message"]
        for response in (future.result() for future in responses):
            assert response.status_code == 503 and response.headers["Retry-After"]
            assert "shutting down" in response.json()["error"]["message"]
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.printed()


# -- two ranks: same output as one process, clean exit -------------------------------------------------------


ON_RANKS = (
    "--speculate", "eagle3", "--tree", "8,2,3", "--slots", "3", "--max-seq-len", "300", "--dtype", "fp32"
)
BODIES = [
    {"seed": 1, "max_tokens": 40}, {"seed": 2, "temperature": 1.0, "max_tokens": 30},
    {"seed": 3, "temperature": 0.8, "top_p": 0.9, "max_tokens": 50, "stop": ["e"]},
    {"seed": 4, "max_tokens": 1}, {"seed": 5, "max_tokens": 24, "response_format": {"type": "json_object"}},
    {"seed": 6, "max_tokens": 60, "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 2},
]


def concurrent_texts(server) -> list[str]:
    """Return the texts of concurrent requests on three slots, while another client disconnects during a long
    stream.
    """
    def complete(i: int) -> str:
        messages = [{"role": "user", "content": f"tell me something about {i}"}]
        response = server.post(**{"messages": messages, "temperature": 0, **BODIES[i]}).json()
        return response["choices"][0]["message"]["content"]

    with concurrent.futures.ThreadPoolExecutor(7) as pool, server.stream(**ENDLESS) as events:
        texts = pool.map(complete, range(len(BODIES)))
        next(events)
    return [*texts]


def test_two_ranks_equal_one_process(golden, server, tmp_path):
    expected = concurrent_texts(server)
    with serving(golden, tmp_path / "log", *ON_RANKS, ranks=2) as server:
        bad = server.post("/v1/completions", prompt=[1, 99999], max_tokens=4)
        assert bad.status_code == 400
        assert concurrent_texts(server) == expected and concurrent_texts(server) == expected
        server.end()
        printed = server.printed()
    assert "2 ranks: each holds" in printed and printed.count("ready ") == 1 and "error: " not in printed
    assert "shutting down: finishing running requests" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
def test_server_exits_if_a_rank_dies(golden, tmp_path):
    """The stream ends with an error, and all ranks exit."""
    with serving(golden, tmp_path / "log", *ON_RANKS, ranks=2) as server:
        pid = server.process.pid
        ranks = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        (follower,) = (x for x in ranks if b"\0RANK=1\0" in Path(f"/proc/{x}/environ").read_bytes())
        with server.stream(**ENDLESS) as events:
            next(events)
            os.kill(follower, signal.SIGKILL)
            *_, reason, end = events
        assert end == "[DONE]" and "decoding failed" in reason
        assert server.process.wait(60) != 0  # well before collectives time out
        printed = server.printed()
        assert printed.count("error: rank 0 of 2 has lost another rank") == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)

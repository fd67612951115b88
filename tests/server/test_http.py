"""The server as a hostile or hasty client meets it: limits, keys, clients that go, ends."""
import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT
from helpers.serving import serving
from safetensors.torch import load_file, save_file

httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.slow
CHAT = {"messages": [{"role": "user", "content": "tell me something"}], "seed": 1}
ENDLESS = {**CHAT, "max_tokens": 280, "logit_bias": {"257": -100}}


def post(server, path="/v1/chat/completions", **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def figures(server) -> dict[str, float]:
    """The metrics that have one label."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def quiet(server, seconds: float = 10.0) -> bool:
    """Whether nothing runs or waits, soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        health = httpx.get(f"{server.url}/health").json()
        if health["running"] == health["waiting"] == 0:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"messages": []}', b'{"messages": [{"role": "me"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "n": 99}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": [""]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}',
    b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0, "max_tokens": 3}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1_0": 1}}',
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema",'
    b' "json_schema": {"name": "x", "schema": {"$ref": "#"}}}}',
    b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 3}}',
], ids=lambda body: body.decode("latin1")[-40:])
def test_bad_bodies_are_one_line_errors(server, body):
    found = httpx.post(
        f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    error = found.json()["error"]
    assert found.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("body,words", (
    (b'{"messages": ', "the body is no JSON: Expecting value (character 13)"),
    (json.dumps(CHAT | {"stop": ["x"] * 17}).encode(), "stop: List should have at most 16"),
    (json.dumps(CHAT | {"n": 0}).encode(), "n: Input should be greater"),
    (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
), ids=("cut", "union", "number", "deep"))
def test_errors_say_where(server, body, words):
    headers = {"Content-Type": "application/json"}
    found = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers)
    assert found.status_code == 400 and words in found.json()["error"]["message"]


def test_json_must_be_called_so(server):
    """What a page of another site may send without being asked is text, so text is refused."""
    for headers in ({"Content-Type": kind} for kind in ("text/plain", "application/x-www-form-urlencoded")):
        found = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
        assert found.status_code == 400
        assert "Content-Type: application/json" in found.json()["error"]["message"]


def test_what_is_null_is_not_given(server):
    names = (
        "speculate", "return_speculation", "stream", "stream_options", "n", "stop", "seed", "top_p", "model",
        "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "logit_bias",
        "max_completion_tokens",
    )
    found = post(server, **CHAT | dict.fromkeys(names), max_tokens=3)
    assert found.status_code == 200
    options = {"include_usage": None}
    assert post(server, **CHAT, max_tokens=3, stream=True, stream_options=options).status_code == 200


def test_more_than_could_ever_fit_is_refused_at_once(server):
    """Before the prompts are read: a hundred thousand of them took half a minute and a gigabyte."""
    begin = time.monotonic()
    found = post(server, "/v1/completions", prompt=["a"] * 100_000, n=16, max_tokens=1)
    assert found.status_code == 400 and "at most 8" in found.json()["error"]["message"]
    assert time.monotonic() - begin < 15


def test_a_prompt_counts_once_for_all_its_choices(server):
    usage = post(server, "/v1/completions", prompt=["the sea", "sand"], n=3, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens"] == 11 and usage["completion_tokens"] == 12


def test_offsets_are_places_in_the_text(server):
    """Also of tokens that are no whole character, and of those that are no part of the text."""
    ids = [*"é 猫x".encode(), 257, *b"ab"]
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 6, "temperature": 0}
    choice = post(server, "/v1/completions", **body).json()["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    assert found["text_offset"][: len(ids)] == [0, 0, 1, 2, 2, 2, 3, 4, 4, 5] and text.startswith("é 猫xab")
    for token, at in zip(found["tokens"][8:], found["text_offset"][8:]):
        assert "\ufffd" in token or text[at : at + len(token)] == token
    parts = [json.loads(line[6:])["choices"][0] for line in httpx.post(
        f"{server.url}/v1/completions", json=body | {"stream": True}
    ).text.splitlines() if line.startswith("data: {")]
    assert [x for part in parts for x in part["logprobs"]["text_offset"]] == found["text_offset"]


def test_models_by_name(server):
    assert httpx.get(f"{server.url}/v1/models/golden").json()["id"] == "golden"
    assert httpx.get(f"{server.url}/v1/models/other/one").status_code == 404
    assert httpx.get(f"{server.url}/v1/chat/completions").headers["Allow"] == "POST"
    assert httpx.head(f"{server.url}/").status_code == httpx.head(f"{server.url}/health").status_code == 200


def test_unknown_fields_are_ignored(server):
    found = post(
        server, **CHAT, max_tokens=3, user="me", store=True, service_tier="auto", reasoning_effort="low",
        parallel_tool_calls=False, verbosity="low", prompt_cache_key="x", metadata={"a": 1}, nothing=None,
    )
    assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ("/nothing", "/v1/chat", "/page.py", "/../serve.py", "/%2e%2e/serve.py"))
def test_there_is_nothing_else(server, path):
    found = httpx.get(f"{server.url}{path}")
    assert found.status_code == 404 and found.json()["error"]["type"] == "not_found_error"


def test_tokenize_and_back(server):
    found = post(server, "/tokenize", prompt="the sea").json()
    assert found["tokens"] == list(b"the sea") and found["count"] == 7 and found["max_model_len"] == 300
    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "the sea"}
    assert post(server, "/detokenize", tokens=[104, 257]).json()["prompt"].startswith("h<")  # a control token
    chat = post(server, "/tokenize", messages=CHAT["messages"]).json()
    assert bytes(chat["tokens"]) == b"u:tell me something\na:"
    assert post(server, "/tokenize").status_code == 400
    found = post(server, "/detokenize", tokens=[7, 100_000])
    assert found.status_code == 400 and "100000 is no token" in found.json()["error"]["message"]
    assert "chat_template" in httpx.get(f"{server.url}/tokenizer_info").json()


def test_more_than_fit_are_told_to_come_back(server):
    """Three places and a queue of five: of twelve at once, eight are answered."""
    assert quiet(server)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda _: post(server, **ENDLESS), range(12)))
    refused = [answer for answer in found if answer.status_code == 429]
    assert 1 <= len(refused) <= 4 and all(answer.headers["Retry-After"] for answer in refused)
    texts = {a.json()["choices"][0]["message"]["content"] for a in found if a.status_code == 200}
    assert len(texts) == 1
    assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}


@pytest.mark.parametrize("stream", (True, False))
def test_a_client_that_goes_frees_its_place(server, stream):
    assert quiet(server)
    before = figures(server)
    address = server.url.removeprefix("http://").split(":")
    for _ in range(6):
        body = json.dumps({**ENDLESS, "stream": stream}).encode()
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            if stream:
                client.recv(100)
            else:
                time.sleep(0.05)
    assert quiet(server, 2.0)
    after = figures(server)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 6 * 280
    assert post(server, **CHAT, max_tokens=2).status_code == 200


def test_figures_add_up(server):
    assert quiet(server)
    before = figures(server)
    usage = post(server, **CHAT, max_tokens=50).json()["usage"]
    after = figures(server)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("vllm:generation_tokens_total") == usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert grown("vllm:spec_decode_num_draft_tokens_total") == accepted + rejected
    drafts = grown("vllm:spec_decode_num_drafts_total")
    assert drafts == grown("eagle_steps_total") and accepted + rejected == 15 * drafts
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    # A step's own token is left out where the text ends before it.
    assert usage["completion_tokens"] - accepted - drafts - 1 in (-1, 0)


def test_a_key_is_asked_for(golden, tmp_path):
    options = ("--api-key", "secret", "--cors", "http://a.page", "--max-body", "2000", "--time-limit", "0.5")
    with serving(golden, tmp_path / "log", *options) as server:
        right, path = {"Authorization": "Bearer secret"}, f"{server.url}/v1/chat/completions"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}):
            found = httpx.post(path, json=CHAT, headers=headers)
            assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        lower = {"Authorization": "bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=lower).status_code == 200
        for path_of_all in ("/health", "/metrics", "/"):
            assert httpx.get(f"{server.url}{path_of_all}").status_code == 200
        body = {**CHAT, "max_tokens": 2}
        assert httpx.post(path, json=body, headers=right).status_code == 200
        # Other pages' scripts may call it, if they were named.
        for origin, allowed in (("http://a.page", "http://a.page"), ("http://b.page", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            found = httpx.options(path, headers=asked)
            assert found.headers.get("Access-Control-Allow-Origin") == allowed
        long = {**CHAT, "messages": [{"role": "user", "content": "x" * 3000}]}
        assert httpx.post(path, json=long, headers=right).status_code == 413
        pieces = httpx.post(path, content=iter([b" " * 1500] * 2), headers=right)
        assert pieces.status_code == 413
        late = httpx.post(path, json={**ENDLESS, "max_tokens": 1500}, headers=right, timeout=30)
        assert late.status_code == 504 and "0.5 seconds" in late.json()["error"]["message"]
        stream = {**ENDLESS, "max_tokens": 1500, "stream": True}
        with httpx.stream("POST", path, json=stream, headers=right) as events:
            *_, told, end = (line for line in events.iter_lines() if line)
        assert end == "data: [DONE]" and "0.5 seconds" in json.loads(told[6:])["error"]["message"]


def test_scores_that_are_no_numbers_are_an_error(golden, tmp_path):
    """No JSON can hold nan. Whoever asks for no scores gets a text all the same."""
    for file in golden.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["norm.weight"].fill_(torch.nan)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with serving(tmp_path, tmp_path / "log", "--no-verify") as server:
        few = {**CHAT, "max_tokens": 2}
        assert post(server, **few).status_code == 200
        for body in ({**few, "logprobs": True}, {**few, "logprobs": True, "top_logprobs": 2}):
            found = post(server, **body)
            assert found.status_code == 500 and "nan or infinite" in found.json()["error"]["message"]
        text = {"prompt": "x", "max_tokens": 2, "logprobs": 1}
        for body in (text, {**text, "echo": True, "max_tokens": 0}):
            assert post(server, "/v1/completions", **body).status_code == 500
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**text, "stream": True}) as events:
            *_, told, end = (line for line in events.iter_lines() if line)
        assert end == "data: [DONE]" and "nan or infinite" in json.loads(told[6:])["error"]["message"]
        assert "Traceback" not in server.said()


def test_a_second_server_says_why_it_does_not_start(server, golden):
    port = server.url.rsplit(":", 1)[1]
    done = subprocess.run(
        [sys.executable, "serve.py", "--checkpoint", golden, "--port", port], cwd=ROOT, capture_output=True,
        text=True, timeout=60,
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"--port {port}: another process listens there" in done.stderr


@pytest.mark.parametrize("which", (signal.SIGTERM, signal.SIGINT))
def test_requests_are_ended_before_the_server_is(golden, tmp_path, which):
    with serving(golden, tmp_path / "log", "--grace", "30") as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json={**ENDLESS, "stream": True}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(which)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert [e["choices"][0]["finish_reason"] for e in events][-1] == "length"
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.said() and "going down" in server.said()


def waiting(server):
    """How many requests have no place yet."""
    metrics = httpx.get(f"{server.url}/metrics").text
    return float(re.search(r"^vllm:num_requests_waiting\S* (\S+)$", metrics, re.MULTILINE)[1])


def test_no_longer_than_the_grace(golden, tmp_path):
    """Whoever is not done by then hears why, in the form of other errors: streams, those who wait for the
    whole, those without a place.
    """
    with serving(golden, tmp_path / "log", "--grace", "0.3", "--slots", "2") as server:
        body = {**ENDLESS, "max_tokens": 1900}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", timeout=60, json=body | {"stream": True}
            ) as stream:
                lines = stream.iter_lines()
                next(lines)  # the stream has a place; one of the others gets the second, two wait
                whole = [pool.submit(post, server, **body) for _ in range(3)]
                while waiting(server) < 2:
                    time.sleep(0.01)
                began = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                *_, told, end = (line for line in lines if line)
        assert end == "data: [DONE]" and "going down" in json.loads(told[6:])["error"]["message"]
        for answer in (each.result() for each in whole):
            assert answer.status_code == 503 and answer.headers["Retry-After"]
            assert "going down" in answer.json()["error"]["message"]
        assert server.process.wait(30) == 0 and time.monotonic() - began < 10
        assert "Traceback" not in server.said()

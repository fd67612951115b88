"""Messages as clients and files write them, and as chat templates take them."""
import json
from functools import partial

import jinja2
import pytest
from helpers.tokenizers import with_template

from common.errors import InputError
from server.protocol import ChatBody
from tokens.messages import THOUGHTS, arguments_of, ready

WHY = dict.fromkeys(THOUGHTS, "why")
EMPTY, NULL = ({"role": "assistant", "content": content} for content in ("", None))


def call(arguments, **more) -> dict:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def texts(*parts: str) -> list[dict]:
    return [{"type": "text", "text": part} for part in parts]


READY = {
    "call, no content": ({"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}', id="c")]},
                         {**NULL, "tool_calls": [call({"x": 1}, id="c")]}),
    "content absent": ({"role": "assistant", "thinking": "why", "tool_calls": [call(" ")]},
                       {**NULL, **WHY, "tool_calls": [call({})]}),
    "bare call": ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]},
                  {**NULL, "tool_calls": [{"name": "f", "arguments": {}}]}),
    "older call": ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}},
                   {**NULL, "tool_calls": [call({})]}),
    "refused": ({"role": "assistant", "content": None, "refusal": "no"},
                {"role": "assistant", "content": "no", "refusal": "no"}),
    "refused in parts": (
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, *texts("!")]},
        {"role": "assistant", "content": "no!"}),
    "older result": ({"role": "function", "name": "f", "content": "7"},
                     {"role": "tool", "name": "f", "content": "7"}),
    "parts": ({"role": "developer", "content": texts("a", "b"), "tool_calls": []},
              {"role": "system", "content": "ab"}),
    "thoughts in parts": (
        {"role": "assistant", "content": [{"type": "thinking", "thinking": texts("why")}, *texts("a")]},
        {"role": "assistant", "content": "a", **WHY}),
    "other fields": ({"role": "assistant", "content": "x", "reasoning": "why", "mood": "!", "refusal": None},
                     {"role": "assistant", "content": "x", **WHY, "mood": "!"}),
    "no thoughts": ({**EMPTY, "thinking": "", "reasoning": [1]}, {**EMPTY, "thinking": "", "reasoning": [1]}),
    "OpenRouter": ({"role": "assistant", "content": "x", "reasoning_details": texts("wh", "y")},
                   {"role": "assistant", "content": "x", **WHY, "reasoning_details": texts("wh", "y")}),
}


@pytest.mark.parametrize("name", READY)
def test_messages_as_templates_take_them(name):
    message, want = READY[name]
    before = json.dumps(message)
    assert ready([message]) == [want] == ready([want])
    assert json.dumps(message) == before  # a caller's messages stay his


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
CHAT = [
    {"role": "user", "content": texts("time", "?")},
    {"role": "assistant", "content": None, "reasoning": "why", "tool_calls": [call([], id="c")]},
    {"role": "tool", "tool_call_id": "c", "content": "12:00"}, {"role": "assistant", "content": "noon"},
]


def test_every_way_to_the_template_makes_messages_ready(bpe, tmp_path):
    """From Python and over HTTP."""
    tok = with_template(bpe, tmp_path, TEMPLATE)
    for ids in (tok.chat(CHAT), tok.chat(ChatBody(messages=CHAT).dicts)):
        assert tok.decode(ids) == "user:time?;assistant:why{};tool:12:00;assistant:noon;"


@pytest.mark.parametrize("given, found", (
    (" \n", {}), ("null", {}), ("[]", {}), ('"{\\"a\\": 1}"', {"a": 1}), ('{"a": "x\ny"}', {"a": "x\ny"}),
    ("broken", "broken"), ("[1]", "[1]"), ('{"a": NaN}', '{"a": NaN}'),
), ids=str)
def test_arguments_are_an_object_where_they_can_be(given, found):
    assert arguments_of(given) == found


# In templates of DeepSeek's kind only null content has calls, or arguments are joined to text; in others null
# would be written as None, and arguments are an object.
CONTENT = "{{ c.function.name + c.function.arguments if m.content is none else m.content }}"
HISTORIES = (
    CONTENT, "{{ c.function.name ~ c.function.arguments }}", "{{ c.function.arguments | string | trim }}",
    "{{ c.function.arguments.strip()[1:] + c.type + c.function.arguments[1:-1] }}",
    "{{ m.content }}{{ c.function.arguments | tojson }}",
    "{{ 'x' + m.content }}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
)


@pytest.mark.parametrize("form", HISTORIES)
@pytest.mark.parametrize("content", ({"content": None}, {}, {"content": ""}), ids=("null", "absent", "empty"))
def test_calls_of_a_history(bpe, tmp_path, form, content):
    """As jinja renders the client's own message; with an object, or null, where the template reads it."""
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + form + "{% endfor %}{% endfor %}"
    tok, given = with_template(bpe, tmp_path, template), '{"zone":"<|im_end|>é"}'
    value = given if "tojson" not in form and "items" not in form else json.loads(given)
    null = content.get("content", None if form == CONTENT else "")
    message = {"role": "assistant", "content": "" if null is None and form != CONTENT else null,
               "tool_calls": [call(value)]}
    chat = [{"role": "assistant", **content, "tool_calls": [call(given)]}]
    (environment := jinja2.Environment()).filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    want = environment.from_string(template).render(messages=[message])
    for ids in tok.chat(chat), tok.chat(ChatBody(messages=chat).dicts):
        assert tok.decode(ids) == want


FINAL = (  # the template's way with a message, and the message that goes on
    ("{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}", {"content": "alpha \n"}),
    ("{{ '<|im_start|>' + m.role + m.content | trim + '<|im_end|>' }}", {"content": " alpha "}),
    ("{{ m.role }}:{{ m.content }};", {"content": ""}), ("{{ m.content }};", {"content": "x<|im_end|>"}),
    ("{{ m.reasoning_content }}|{{ m.content }};", {"content": "a", "reasoning_content": "why"}),
)


@pytest.mark.parametrize("form, message", FINAL, ids=range(len(FINAL)))
def test_a_last_message_goes_on(bpe, tmp_path, form, message):
    """As in transformers, whichever way a client says so."""
    theirs = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    template = "{% for m in messages %}" + form + "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    tok = with_template(bpe, tmp_path, template)
    chat = [{"role": "user", "content": "go"}, {"role": "assistant", **message}]
    field = {"continue_final_message": True}
    ((want,), _) = theirs([chat], chat_template=template, add_generation_prompt=False, **field)

    def rendered(messages, **variables) -> str:
        return tok.decode(tok.chat(messages, **variables), tok.control.values())

    for variables in field, {**field, "add_generation_prompt": False}:
        assert rendered(chat, **variables) == want
        for body in variables, {"chat_template_kwargs": variables}:
            body = ChatBody(messages=chat, **body)
            assert body.continues and rendered(body.dicts, **body.variables) == want
    prefix = [chat[0], {**chat[1], "prefix": True}]
    assert rendered(prefix) == want and ChatBody(messages=prefix).continues
    assert "A:" not in tok.render(chat, add_generation_prompt=False)
    for messages, variables in (
        (chat, {**field, "add_generation_prompt": True}), (prefix, {"continue_final_message": False}),
        (prefix, {"add_generation_prompt": True}), ([{"role": "user", "content": "x", "prefix": True}], {}),
    ):
        with pytest.raises(InputError, match="contradict"):
            tok.chat(messages, **variables)


def test_a_message_that_a_template_changes_does_not_go_on(bpe, tmp_path):
    tok = with_template(bpe, tmp_path, "{% for m in messages %}{{ m.content.split('/')[-1] }}{% endfor %}")
    for content, words in ("a/b", "as it is"), (None, "has no content"):
        with pytest.raises(InputError, match=words):
            tok.chat([{"role": "assistant", "content": content, "tool_calls": [call({})]}],
                     continue_final_message=True)

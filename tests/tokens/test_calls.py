"""Calls of functions, as the models of each family write them, read from text that comes in pieces."""
import json

import pytest

from common.errors import InputError
from tokens.calls import BARE, CallStream, form_of, schema_of_calls

TAGGED, CODER, MISTRAL = ("<tool_call>",), ("<tool_call>", "<function="), ("[TOOL_CALLS]",)
SEED = ("<seed:tool_call>", "<function=")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
PARAMETERS = {
    "type": "object", "$defs": {"Unit": {"enum": [1, 2]}},
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "default": None}, "share": {"type": "number"},
        "now": {"type": "boolean"}, "where": {"type": ["object", "null"]}, "all": {"type": "array"},
        "most": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "unit": {"$ref": "#/$defs/Unit"},
        "any": {}, "either": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        "maybe": {"type": "integer", "nullable": True}, "damaged": {"anyOf": [3, {"$ref": "#/none"}]},
    },
}
TOOLS = {"f": PARAMETERS, "g": {}}


def read(form, text: str, size: int = 1000, **more):
    """Push a text in pieces -> (text before its end, text at its end, calls)."""
    stream = CallStream(form, TOOLS, **more)
    early = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    return early, rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def tag(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def coder(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{x}\n</parameter>\n" for key, x in parameters.items())
    return f"<function={name}>\n{inner}</function>"


def keyed(name: str, **parameters: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{x}</arg_value>\n" for key, x in parameters.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


F, G = '{"name": "f", "arguments": {"city": "é<"}}', '{"name": "g", "arguments": {}}'
IS_F, IS_G = ("f", '{"city": "é<"}'), ("g", "{}")
NAN = '{"name": "f", "arguments": {"days": NaN}}'
LLAMA = '{"name": "f", "parameters": {"city": "é<"}}', '{"name": "g", "parameters": {}}'
CALLS = {
    "two": (TAGGED, "Let me see.\n" + tag(f"\n{F}\n") + "\n" + tag(G), "Let me see.\n", [IS_F, IS_G]),
    "in one tag": (TAGGED, tag(f"\n{F}\n{G}\n"), "", [IS_F, IS_G]),
    "list": (TAGGED, tag(f"[{F}, {G}]") + " so", " so", [IS_F, IS_G]),
    "not closed": (TAGGED, f"<tool_call>{F}", "", [IS_F]),
    "closing tag inside": (TAGGED, tag('{"name": "f", "arguments": {"city": "</tool_call>"}}'), "",
                           [("f", '{"city": "</tool_call>"}')]),
    "text of arguments": (TAGGED, tag('{"name": "f", "arguments": "{}"}'), "", [("f", "{}")]),
    "other key": (TAGGED, tag(LLAMA[0]), "", [IS_F]),
    "OpenAI's form": (TAGGED, tag(f'{{"type": "function", "function": {F}}}'), "", [IS_F]),
    "no arguments": (TAGGED, tag('{"name": "g"}{"name": "g", "arguments": null}'), "", [IS_G, IS_G]),
    "tag as a word": (TAGGED, f"A <tool_call> is a call: {tag(G)}", "A <tool_call> is a call: ", [IS_G]),
    "after thoughts": (TAGGED, f"<think>{tag(F)}?</think>{tag(G)}", f"<think>{tag(F)}?</think>", [IS_G]),
    "before thoughts": (TAGGED, f"{tag(G)}<think>{tag(F)}", f"<think>{tag(F)}", [IS_G]),
    "Coder": (CODER, tag("\n" + coder("f", city="Paris", days="3") + "\n"), "",
              [("f", '{"city": "Paris", "days": 3}')]),
    "Coder without tags": (CODER, "So.\n" + coder("g") + "\n" + coder("f", days="1"), "So.\n",
                           [IS_G, ("f", '{"days": 1}')]),
    "Coder with JSON": (CODER, '<function=f>{"days": 1}</function>', "", [("f", '{"days": 1}')]),
    "Coder, tags inside": (CODER, tag(coder("f", city="</tool_call> </parameter> x </function>")), "",
                           [("f", '{"city": "</tool_call> </parameter> x </function>"}')]),
    "Mistral": (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [IS_F, IS_G]),
    "newer Mistral, without its tags": (MISTRAL, '[TOOL_CALLS]f{"days": 1}[TOOL_CALLS] g [ARGS] {}', "",
                                        [("f", '{"days": 1}'), IS_G]),
    "newer Mistral": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "",
                      [("f", "{}"), IS_G]),
    "Nemotron": (("<TOOLCALL>",), f"<TOOLCALL>[{F}, {G}]</TOOLCALL>", "", [IS_F, IS_G]),
    "Phi": (("<|tool_call|>",), f"<|tool_call|>[{F}]<|/tool_call|>", "", [IS_F]),
    "word of a thought": (TAGGED, f"I use the <think> tag.\n{tag(F)}", "I use the <think> tag.\n", [IS_F]),
    "word of a thought, later": (TAGGED, f"Hm: <think> {tag(F)} so {tag(G)}", "Hm: <think>  so ",
                                 [IS_F, IS_G]),
    "thought in a line": (TAGGED, f"Hm: <think>{tag(F)}</think>{tag(G)}", f"Hm: <think>{tag(F)}</think>",
                          [IS_G]),
    **{f"thought {name}": (TAGGED, f"<{name}>{tag(F)}</{name}>{tag(G)}", f"<{name}>{tag(F)}</{name}>", [IS_G])
       for name in ("thinking", "thought", "reasoning", "seed:think")},
    "thought of Kimi": (TAGGED, f"◁think▷{tag(F)}◁/think▷{tag(G)}", f"◁think▷{tag(F)}◁/think▷", [IS_G]),
    "thought of Mistral": (MISTRAL, f"[THINK][TOOL_CALLS]{F}[/THINK][TOOL_CALLS]{G}",
                           f"[THINK][TOOL_CALLS]{F}[/THINK]", [IS_G]),
    "no number in one tag": (TAGGED, tag(f"{NAN}{G}"), NAN, [IS_G]),
    "other numbers that are no JSON": (
        TAGGED, "".join(tag(F.replace('"é<"', x)) for x in ("01", "+1", ".5", "1.", "-Infinity")) + tag(G),
        "".join(tag(F.replace('"é<"', x)) for x in ("01", "+1", ".5", "1.", "-Infinity")), [IS_G]),
    "no number, Mistral": (MISTRAL, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{\"x\": NaN}",
                           "[TOOL_CALLS]g[ARGS]{\"x\": NaN}", [("f", "{}")]),
    "a call, then one cut off": (TAGGED, f"<tool_call>{G}{F[:-3]}", F[:-3], [IS_G]),
    "a brace too many": (TAGGED, tag(G + "}"), "", [IS_G]),
    "line end in a text": (TAGGED, tag('{"name": "f", "arguments": {"city": "a\nb"}}'), "",
                           [("f", '{"city": "a\\nb"}')]),
    "name as function": (TAGGED, tag(F.replace('"name"', '"function"')), "", [IS_F]),
    "arguments as a list": (TAGGED, tag('{"name": "g", "arguments": []}'), "", [IS_G]),
    "Coder, not closed": (CODER, "<tool_call>\n<function=f>\n<parameter=city>\nRome\n<parameter=days>\n3\n"
                          "</function>\n</tool_call>", "", [("f", '{"city": "Rome", "days": 3}')]),
    "Coder, function not closed": (
        CODER, tag("<function=f><parameter=city>Rome</parameter>") + tag(coder("g")), "",
        [("f", '{"city": "Rome"}'), IS_G]),
    "Coder, nothing closed": (CODER, "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</tool_call>\n"
                              + tag(coder("f", days="1")), "",
                              [("f", '{"city": "Rome"}'), ("f", '{"days": 1}')]),
    "Coder, quoted": (CODER, '<function="f">\n<parameter=\'days\'>\n3\n</parameter>\n</function>', "",
                      [("f", '{"days": 3}')]),
    "Seed": (SEED, f"So. <seed:tool_call>{coder('f', days='3')}</seed:tool_call>\n", "So. ",
             [("f", '{"days": 3}')]),
    "GLM": (TAGGED, "So.\n" + keyed("f", city="Paris, 3", days="3") + "\n" + keyed("g"), "So.\n",
            [("f", '{"city": "Paris, 3", "days": 3}'), IS_G]),
    "GLM, tags inside": (TAGGED, keyed("f", city="</tool_call>\n</arg_value> x"), "",
                         [("f", '{"city": "</tool_call>\\n</arg_value> x"}')]),
    "GLM, a word": (TAGGED, f"<tool_call>name</tool_call> is a call: {tag(G)}",
                    "<tool_call>name</tool_call> is a call: ", [IS_G]),
    "DeepSeek": (DEEPSEEK, "So." + deepseek('f<｜tool▁sep｜>{"city": "é<"}', "g<｜tool▁sep｜>{}"), "So.",
                 [IS_F, IS_G]),
    "older DeepSeek": (
        DEEPSEEK, deepseek('function<｜tool▁sep｜>f\n```json\n{"city": "é<"}\n```',
                           "function<｜tool▁sep｜>g\n```json\n{}\n```") + "\n", "", [IS_F, IS_G]),
    "DeepSeek, not closed": (DEEPSEEK, "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}", "", [IS_G]),
    "fence in tags": (TAGGED, tag(f"\n```json\n{F}\n```\n") + " so", " so", [IS_F]),
    "fence without a closing tag": (MISTRAL, f"[TOOL_CALLS]```json\n[{F}]\n```", "", [IS_F]),
    "Llama, fence": (BARE, f"```json\n{LLAMA[0]}\n{LLAMA[1]}\n```\n", "", [IS_F, IS_G]),
    "Llama, fence without a name": (BARE, f"\n```\n[{LLAMA[0]}]\n```", "", [IS_F]),
    "Llama, semicolon": (BARE, " " + "; ".join(LLAMA), "", [IS_F, IS_G]),
    "Llama, lines": (BARE, "\n".join(LLAMA) + "\n", "", [IS_F, IS_G]),
    "Llama, list": (BARE, f"[{', '.join(LLAMA)}]", "", [IS_F, IS_G]),
}


@pytest.mark.parametrize("size", (1, 3, 1000))
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, size):
    form, text, words, calls = CALLS[name]
    early, rest, found = read(form, text, size)
    assert (early + rest, found) == (words, calls)


@pytest.mark.parametrize("form, text", (
    (TAGGED, "no call, a < b"), (TAGGED, "almost <tool_cal"), (TAGGED, "<tool_call>broken"), (TAGGED, ""),
    (TAGGED, tag('{"name": 3, "arguments": {}}')), (TAGGED, tag('{"name": ["g"]}')), (None, tag(F)),
    (TAGGED, tag('{"name": "f", "arguments": {"days": NaN}}')), (TAGGED, tag('{"name": "h"}')),
    (TAGGED, tag('{"name": "f", "arguments": {"days": 1e999}}')), (TAGGED, tag("[" * 100_000)),
    (TAGGED, tag('{"name": "f", "arguments": {"city": "\\ud800"}}')), (TAGGED, tag("[]")),
    (TAGGED, f"<think>I could {tag(F)}"), (TAGGED, f'<tool_call>{{"name": "f", "arguments": "{tag(G)}'),
    (CODER, f"<tool_call>\n<function=f>\n<parameter=city>\nas {tag(F)}{tag(G)} cut off"),
    (BARE, "Hello {you}"), (BARE, '{"name": "h"}'), (BARE, '{"a": 1} and more'), (BARE, f"{LLAMA[0]} so"),
    (BARE, f"```json\n{LLAMA[0]}\n``` so"), (BARE, "```python\n{}"), (BARE, "```json\n[1]\n```"),
    (BARE, "``"),
    (BARE, f"So:\n```json\n{LLAMA[0]}\n```"), (TAGGED, f"```json\n{F}\n```"), (TAGGED, "<tool_call>f"),
    (TAGGED, keyed("f", city="x")[:-12]), (TAGGED, tag("f<arg_key>city</arg_key><arg_value>x")),
    (TAGGED, tag("f<arg_key>city</arg_key><arg_value>x<arg_key>days</arg_key><arg_value>3</arg_value>")),
    (DEEPSEEK, deepseek("f<｜tool▁sep｜>{")), (DEEPSEEK, deepseek("function<｜tool▁sep｜>f\n{}")),
    (BARE, "[1, 2]"), (BARE, f"{LLAMA[0]}; {NAN}"),
    (CODER, "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>"),
), ids=range(35))
@pytest.mark.parametrize("size", (1, 1000))
def test_other_text_is_no_call(form, text, size):
    early, rest, calls = read(form, text, size)
    assert early + rest == text and not calls


def test_thoughts_that_the_prompt_has_opened():
    text = f"{tag(F)}</think>\n{tag(G)}"
    assert read(TAGGED, text, 1, prompt="assistant\n<think>\n") == (f"{tag(F)}</think>\n", "", [IS_G])


@pytest.mark.parametrize("name, text, value", (
    ("city", "3", "3"), ("city", "null", "null"), ("days", "3", 3), ("days", "3.0", 3), ("days", "x", "x"),
    ("share", "3", 3), ("share", "0.5", 0.5), ("share", "1e999", "1e999"), ("now", "true", True),
    ("now", "True", True), ("now", "1", "1"), ("where", '{"a": [1]}', {"a": [1]}),
    ("where", "{'a': None}", {"a": None}), ("where", "null", None), ("all", "(1, 2)", [1, 2]),
    ("all", "{1}", "{1}"), ("all", "[" * 9999, "[" * 9999), ("most", "7", 7), ("most", "None", None),
    ("unit", "2", 2), ("any", "3", "3"), ("either", "3", 3), ("either", "x", "x"), ("either", '"x"', '"x"'),
    ("maybe", "null", None), ("damaged", "3", "3"), ("unknown", "3", "3"),
), ids=range(27))
def test_parameters_have_the_types_of_the_schema(name, text, value):
    _, rest, calls = read(CODER, coder("f", **{name: text}))
    assert not rest and json.loads(calls[0][1]) == {name: value}
    assert type(json.loads(calls[0][1])[name]) is type(value)


def test_the_template_decides_the_form():
    start = "{% if tools %}{{ tools }}"
    for words, form in (
        ("<tool_call>", TAGGED), ("<tool_call><function=x>", CODER), ("[TOOL_CALLS]", MISTRAL),
        ("<TOOLCALL>", ("<TOOLCALL>",)), ("<|tool_call|>", ("<|tool_call|>",)),
        ("".join(DEEPSEEK), DEEPSEEK), ("<seed:tool_call><function=x>", SEED),
        ('{"name": x, "parameters": y} ipython', BARE),
    ):
        assert form_of(start + words) == form
    for template in (None, "{{ messages }}", start):
        with pytest.raises(InputError, match="defines no calls"):
            form_of(template)


def test_the_grammar_of_calls_follows_references(bpe):
    """Two functions name different definitions alike; a function without parameters gets none."""
    from tokens.grammar import Grammars
    from tokens.tokenizer import Tokenizer

    def unit(*values):
        properties = {"u": {"$ref": "#/$defs/U"}}
        return {"$defs": {"U": {"enum": [*values]}}, "properties": properties, "required": ["u"]}

    tokenizer = Tokenizer.load(bpe)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [2])
    schema = schema_of_calls({"f": unit("x"), "g": unit("y"), "h": {}})
    for name, arguments, fits in (
        ("f", '{"u":"x"}', True), ("g", '{"u":"y"}', True), ("f", '{"u":"y"}', False), ("h", "{}", True),
        ("h", '{"u":"x"}', False), ("i", "{}", False),
    ):
        guide = grammars.guide(schema)
        guide.take(tokenizer.encode(f'{{"name":"{name}","arguments":{arguments}}}', bos=False))
        assert (guide.error is None) == fits, (name, arguments)

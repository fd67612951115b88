"""Tool calls in each family's format, parsed from streamed text."""
import json

import pytest

from common.errors import InputError
from tokens.calls import CallStream, call_format, schema_of_calls
from tokens.grammar import Grammars

# Parts of chat templates that select the tool call format.
TAGGED, CODER, MISTRAL = "<tool_call>", "<tool_call><function=x>", "[TOOL_CALLS]"
SEED, NEMOTRON, PHI = "<seed:tool_call><function=x>", "<TOOLCALL>", "<|tool_call|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
LLAMA = '{"name": x, "parameters": y} ipython'
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


def parse(template: str, text: str, size: int = 1000) -> tuple[str, list[tuple[str, str]]]:
    """Parse a text in pieces of `size` characters. Returns the other text and (name, arguments)."""
    stream = CallStream(call_format("{{ tools }}" + template), {"f": PARAMETERS, "g": {}})
    early = "".join(stream.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = stream.finish()
    return early + rest, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def tag(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def coder(name: str, **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{x}\n</parameter>\n" for key, x in parameters.items())
    return f"<function={name}>\n{inner}</function>"


def glm(name: str, **parameters: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{x}</arg_value>\n" for key, x in parameters.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


# F, G: calls of the request's functions f and g; IS_F, IS_G: the same, parsed. H: a call of another function.
F, G = '{"name": "f", "arguments": {"city": "é<"}}', '{"name": "g", "arguments": {}}'
IS_F, IS_G = ("f", '{"city": "é<"}'), ("g", "{}")
F3, IS_F3 = coder("f", days="3"), ("f", '{"days": 3}')
NAN = '{"name": "f", "arguments": {"days": NaN}}'
H = F.replace('"f"', '"h"')
LLAMA_F, LLAMA_G, LLAMA_H = (call.replace("arguments", "parameters") for call in (F, G, H))
CALLS = {
    "two calls": (TAGGED, "Let me see.\n" + tag(f"\n{F}\n") + "\n" + tag(G), "Let me see.\n", [IS_F, IS_G]),
    "list": (TAGGED, tag(f"[{F}, {G}]") + " so", " so", [IS_F, IS_G]),
    "not closed": (TAGGED, f"<tool_call>{F}", "", [IS_F]),
    "closing tag inside": (TAGGED, tag(F.replace("é<", "</tool_call>")), "",
                           [("f", '{"city": "</tool_call>"}')]),
    "OpenAI's template": (TAGGED, tag(f'{{"type": "function", "function": {LLAMA_F}}}'), "", [IS_F]),
    "no arguments": (TAGGED, tag('{"name": "g"}{"name": "g", "arguments": null}'), "", [IS_G, IS_G]),
    "quoted tag": (TAGGED, f"A <tool_call> is a call: {tag(G)}", "A <tool_call> is a call: ", [IS_G]),
    "before reasoning": (TAGGED, f"{tag(G)}<think>{tag(F)}", f"<think>{tag(F)}", [IS_G]),
    "quoted reasoning tag": (TAGGED, f"Hm: <think> {tag(F)} so {tag(G)}", "Hm: <think>  so ", [IS_F, IS_G]),
    **{f"reasoning, {begin}": (TAGGED, f"{begin}{tag(F)}{end}{tag(G)}", f"{begin}{tag(F)}{end}", [IS_G])
       for begin, end in (("<think>", "</think>"), ("Hm: <think>", "</think>"), ("◁think▷", "◁/think▷"),
                          ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))},
    "Coder": (CODER, tag("\n" + coder("f", city="Paris", days="3") + "\n"), "",
              [("f", '{"city": "Paris", "days": 3}')]),
    "Coder without tags": (CODER, "So.\n" + coder("g") + "\n" + F3, "So.\n", [IS_G, IS_F3]),
    "Coder with JSON": (CODER, '<function=f>{"days": 3}</function>', "", [IS_F3]),
    "Coder, tags inside": (CODER, tag(coder("f", city="</tool_call> </parameter> x </function>")), "",
                           [("f", '{"city": "</tool_call> </parameter> x </function>"}')]),
    "Coder, not closed": (CODER, "<tool_call>\n<function=f>\n<parameter=city>\nRome\n<parameter=days>\n3\n"
                          "</function>\n</tool_call>", "", [("f", '{"city": "Rome", "days": 3}')]),
    "Coder, nothing closed": (CODER, "<tool_call>\n<function=f>\n<parameter=city>\nRome\n</tool_call>\n"
                              + tag(F3), "", [("f", '{"city": "Rome"}'), IS_F3]),
    "Coder, names in quotes": (CODER, F3.replace("=f", '="f"').replace("=days", "='days'"), "", [IS_F3]),
    "Seed": (SEED, f"So. <seed:tool_call>{F3}</seed:tool_call>\n", "So. ", [IS_F3]),
    "GLM": (TAGGED, "So.\n" + glm("f", city="Paris, 3", days="3") + "\n" + glm("g"), "So.\n",
            [("f", '{"city": "Paris, 3", "days": 3}'), IS_G]),
    "GLM, tags inside": (TAGGED, glm("f", city="</tool_call>\n</arg_value> x"), "",
                         [("f", '{"city": "</tool_call>\\n</arg_value> x"}')]),
    "GLM, quoted tags": (TAGGED, f"{tag('name')} is a call: {tag(G)}", f"{tag('name')} is a call: ", [IS_G]),
    "Mistral": (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [IS_F, IS_G]),
    "newer Mistral": (MISTRAL, "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "",
                      [("f", "{}"), IS_G]),
    "Mistral without tags": (MISTRAL, '[TOOL_CALLS]f{"days": 3}[TOOL_CALLS] g [ARGS] {}', "", [IS_F3, IS_G]),
    "Nemotron": (NEMOTRON, f"<TOOLCALL>[{F}, {G}]</TOOLCALL>", "", [IS_F, IS_G]),
    "Phi": (PHI, f"<|tool_call|>[{F}]<|/tool_call|>", "", [IS_F]),
    "DeepSeek": (DEEPSEEK, "So." + deepseek('f<｜tool▁sep｜>{"city": "é<"}', "g<｜tool▁sep｜>{}"), "So.",
                 [IS_F, IS_G]),
    "older DeepSeek": (
        DEEPSEEK, deepseek('function<｜tool▁sep｜>f\n```json\n{"city": "é<"}\n```',
                           "function<｜tool▁sep｜>g\n```json\n{}\n```") + "\n", "", [IS_F, IS_G]),
    "NaN": (TAGGED, tag(f"{NAN}{G}"), NAN, [IS_G]),
    "a call, then one cut off": (TAGGED, f"<tool_call>{G}{F[:-3]}", F[:-3], [IS_G]),
    "extra brace": (TAGGED, tag(G + "}"), "", [IS_G]),
    "code fence in tags": (TAGGED, tag(f"\n```json\n{F}\n```\n") + " so", " so", [IS_F]),
    "Llama": (LLAMA, f" {LLAMA_F}; {LLAMA_G}", "", [IS_F, IS_G]),
    **{f"without tags, {template}": (template, text, after, [IS_F])
       for template in (TAGGED, CODER, MISTRAL, LLAMA)
       for text, after in ((f"\n{F}", ""), (f"```json\n{F}\n```\nDone.", "Done."), (f"[{LLAMA_F}]", ""))},
    "without tags, then with": (TAGGED, f"{F}\n{tag(G)}", "", [IS_F, IS_G]),
    "without tags, then JSON": (TAGGED, f'{F}\n{{"a": 1}}', '{"a": 1}', [IS_F]),
    "without tags, after reasoning": (TAGGED, f"<think>Hm.</think>\n\n{F}", "<think>Hm.</think>", [IS_F]),
    "JSON, then a call": (TAGGED, '{"a": 1} ' + tag(G), '{"a": 1} ', [IS_G]),
    "Llama, fence": (LLAMA, f"```json\n{LLAMA_F}\n{LLAMA_G}\n```\n", "", [IS_F, IS_G]),
    "Llama, fence without a name": (LLAMA, f"\n```\n[{LLAMA_F}]\n```", "", [IS_F]),
}
BROKEN = '{"name": "f", "arguments": 5}'
NO_CALLS = (
    (TAGGED, "no call, a < b"), (TAGGED, "almost <tool_cal"), (TAGGED, "<tool_call>broken"), (TAGGED, ""),
    (TAGGED, tag('{"name": 3, "arguments": {}}')), (TAGGED, tag(NAN)), (TAGGED, tag('{"name": "h"}')),
    (TAGGED, tag('{"name": "f", "arguments": {"days": 1e999}}')), (TAGGED, tag("[" * 100_000)),
    (TAGGED, tag('{"name": "f", "arguments": {"city": "\\ud800"}}')), (TAGGED, tag("[]")),
    (TAGGED, f"<think>I could {tag(F)}"), (TAGGED, f'<tool_call>{{"name": "f", "arguments": "{tag(G)}'),
    (TAGGED, f"So:\n```json\n{F}\n```"), (TAGGED, glm("f", city="x")[:-12]),
    (TAGGED, tag("f<arg_key>city</arg_key><arg_value>x<arg_key>days</arg_key><arg_value>3</arg_value>")),
    (CODER, f"<tool_call>\n<function=f>\n<parameter=city>\nas {tag(F)}{tag(G)} cut off"),
    (LLAMA, "Hello {you}"), (LLAMA, '{"name": "h"}'), (LLAMA, f"{LLAMA_H} so"), (LLAMA, "[1, 2]"),
    (TAGGED, f"So: {F}"), (TAGGED, H), (TAGGED, f"{F[:-3]}"), (TAGGED, f'{{"a": {F}}}'), (TAGGED, ' \n{"na'),
    (TAGGED, f'{{"a": 1}} {F}'), (TAGGED, f"{BROKEN}\n{F}\n{BROKEN}"),
    (LLAMA, "``"), (LLAMA, f"```json\n{LLAMA_H}\n``` so"), (LLAMA, f"So:\n```json\n{LLAMA_F}\n```"),
    (DEEPSEEK, deepseek("f<｜tool▁sep｜>{")), (DEEPSEEK, deepseek("function<｜tool▁sep｜>f\n{}")),
)
CALLS |= {f"no call {n}": (template, text, text, []) for n, (template, text) in enumerate(NO_CALLS)}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_separated_from_text(name):
    template, text, expected_text, calls = CALLS[name]
    for size in (1, 3, 1000):
        assert parse(template, text, size) == (expected_text, calls), f"in pieces of {size}"


@pytest.mark.parametrize("name, text, value", (
    ("city", "3", "3"), ("city", "null", "null"), ("days", "3.0", 3), ("days", "x", "x"), ("share", "3", 3),
    ("share", "0.5", 0.5), ("share", "1e999", "1e999"), ("now", "True", True), ("now", "1", "1"),
    ("where", "{'a': None}", {"a": None}), ("where", "null", None), ("all", "(1, 2)", [1, 2]),
    ("all", "{1}", "{1}"), ("all", "[" * 9999, "[" * 9999), ("most", "7", 7), ("most", "None", None),
    ("unit", "2", 2), ("any", "3", "3"), ("either", "3", 3), ("either", '"x"', '"x"'), ("damaged", "3", "3"),
    ("maybe", "null", None), ("unknown", "3", "3"),
), ids=range(23))
def test_arguments_get_the_types_of_the_schema(name, text, value):
    (rest, ((_, arguments),)) = parse(CODER, coder("f", **{name: text}))
    assert (rest, arguments) == ("", json.dumps({name: value}))


def test_templates_without_tool_calls_are_rejected():
    for template in (None, TAGGED, "{{ tools }}"):
        with pytest.raises(InputError, match="unknown tool call format"):
            call_format(template)


def test_schema_of_calls_resolves_references(byte_tokenizer):
    """f and g have different $defs of the same name; h has no parameters and accepts none."""
    def unit(value):
        properties = {"u": {"$ref": "#/$defs/U"}}
        return {"$defs": {"U": {"const": value}}, "properties": properties, "required": ["u"]}

    schema = schema_of_calls({"f": unit("x"), "g": unit("y"), "h": {}})
    for name, arguments, is_valid in (
        ("f", '{"u":"x"}', True), ("g", '{"u":"y"}', True), ("f", '{"u":"y"}', False), ("h", "{}", True),
        ("h", '{"u":"x"}', False), ("i", "{}", False),
    ):
        guide = Grammars(byte_tokenizer, 258, [257]).guide(schema)
        guide.advance(f'{{"name":"{name}","arguments":{arguments}}}'.encode())
        assert (guide.error is None) == is_valid, (name, arguments)

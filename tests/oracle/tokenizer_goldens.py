#!/usr/bin/env python3
"""Make the goldens of src/tokenize.rs with the Python libraries.

    python tokenizer_goldens.py --tokenizer tokenizer.json --out fixtures/goldens/tokenizer

Needs `tokenizers` and `transformers` with jinja2. The output folder holds the templates
(`spark.jinja`, `dialect.jinja`); next to them this writes

    tokenizer.json    the tokenizer used, without line breaks
    encode.json       texts: ids, the pieces of the pre-tokenizer in bytes, the text decoded again
    chat.json         requests: the rendered prompt and, for the Spark format, its ids
    expressions.json  one-line templates over one value: what they print

Nothing in the output depends on the day or the machine: a second run writes the same bytes as long
as the libraries agree.
"""

import argparse
import json
import os
import random
from datetime import datetime

import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

BOS, EOS, PAD, UNK = "<｜start▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<unk>"
FIXED_DAY = datetime(2025, 1, 1)

TEXTS = {
    "empty": "",
    "english": "The quick brown fox jumps over the lazy dog. It's 5 o'clock, isn't it?",
    "code": "def f(x: int) -> str:\n\treturn f\"{x!r:>10}\"  # 50% done\n\n\nclass A(B):\n    pass\n",
    "chinese": "今天天气很好，我们去公园散步吧。价格是128.50元！",
    "japanese": "こんにちは、世界。カタカナとひらがなー々〆",
    "korean_arabic_hindi": "안녕하세요 مرحبا नमस्ते สวัสดี",
    "mixed_scripts": "GPU显存不足，请use小batch。第3章chapter",
    "emoji": "ok 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ☺️ done",
    "combining": "e\u0301 a\u0308 Zalgo\u0335\u0321 \u00e9",
    "digits": "0 12 345 6789 1234567890 3.14159 1e-05 0x1F ½ ² ٣٤٥ ⅷ",
    "spaces": "a  b   c    d     e\t\tf \t g  ",
    "leading_space": "  leading and trailing   ",
    "newlines": "one\ntwo\n\nthree\n\n\n\nfour\n",
    "crlf": "one\r\ntwo\r\n\r\nthree\rfour\n\rfive",
    "odd_spaces": "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\ufeffh",
    "punctuation": "!!??...---===+++ #hash @name $var %TEMP% ^a &b *c (d) [e] {f} |g| ~h `i` \\j",
    "symbol_letters": "-Werror --flag=on .5 $HOME/bin <b>bold</b> a->b a=>b",
    "quotes": "“curly” ‘single’ «guillemets» „low“ 'don''t'",
    "url": "https://example.org/a/b?c=d&e=f#g user@example.org",
    "added_inside": "a<tool_call>b",
    "added_spaced": "a <tool_call> b  <arg_key>\n",
    "added_role": "<|User|>hi",
    "added_adjacent": "<|User|><|Bot|><think></think><tool_call></tool_call>",
    "added_partial": "<tool_call <|User| <think </thin> <tool_call><",
    "added_nested": "<<tool_call>> <arg_key><arg_key>k</arg_key></arg_key>",
    "special_inside": f"a{BOS}b{EOS}{PAD}c{UNK}",
    "special_lookalike": "<|start_of_sentence|> <｜start_of_sentence｜> ｜▁",
    "special_only": BOS,
    "unknown_byte": "a\u0006b",
    "unknown_bytes": "\u0006\u0006 \u0006",
    "control": "".join(map(chr, range(32))) + "\u007f\u0080\u009f",
    "replacement": "a\ufffdb\ufffd",
    "astral": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠀀 \U0010fffd",
    "long_word": "antidisestablishmentarianism" * 60,
    "long_chinese": "的" * 200,
    "long_spaces": " " * 300 + "x" + "\n" * 50,
    "json": '{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2, 3], "x": null}}',
}

ALPHABET = (list("aeinorstAEINT0123456789") + list("  \t\n\r.,;:!?-_'\"<>|/&()") + list("éüßñ中文字漢語あいアー가각я")
            + ["👍", "\u0301", "\u200d", "\u3000", "\u00a0", "…", "“", "±", "€", "<tool_call>", "<think>", "<|User|>",
               BOS, EOS, "the ", " and"])

TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a city <b>now</b> & later, it's \"free\"; 天气 ☀️",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "Name, e.g. Zürich or 北京"},
            "unit": {"type": "string", "enum": ["°C", "°F"], "default": None},
            "tolerance": {"type": "number", "minimum": 1e-5, "maximum": 1e16, "default": 1.0},
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 0},
            "all": {"type": "boolean", "default": True}}, "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "zero", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}},
]

CALLS = [
    {"type": "function", "function": {"name": "get_weather", "arguments": {
        "city": "Zürich <&>' \"x\"\nline", "count": 3, "tolerance": 1e-5, "big": 1e16, "one": 1.0, "third": 1 / 3,
        "negative": -7, "all": True, "none": None, "off": False, "unit": {"z": [1, 2.5, "ä"], "a": {}},
        "items": [], "keys": "k"}}},
    {"type": "function", "function": {"name": "zero", "arguments": {}}},
]

U = {"role": "user", "content": "What's the weather in 北京?"}
CONVERSATIONS = {
    "no_system": [U],
    "system": [{"role": "system", "content": "Answer in Chinese.\nBe brief."}, U],
    "empty_system": [{"role": "system", "content": ""}, U],
    "several_turns": [U, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "  And tomorrow? \n"}],
    "reasoning": [U, {"role": "assistant", "reasoning_content": "The user asks\nabout weather.", "content": "Sunny."}, U],
    "reasoning_null": [U, {"role": "assistant", "reasoning_content": None, "content": "Sunny."}, U],
    "call": [U, {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}],
    "calls": [U, {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm", "tool_calls": CALLS}],
    "call_without_function": [U, {"role": "assistant", "content": "", "tool_calls": [CALLS[1]["function"]]}],
    "tool_result": [U, {"role": "assistant", "content": "", "tool_calls": CALLS},
                    {"role": "tool", "content": "{\"t\": 21.5}"}, {"role": "tool", "content": "nothing"}, U],
    "tool_results_last": [U, {"role": "assistant", "content": "", "tool_calls": CALLS},
                          {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}],
    "tool_turns_apart": [U, {"role": "tool", "content": "a"}, U, {"role": "tool", "content": "b"}],
    "markers_in_text": [{"role": "user", "content": f"say <tool_call> and {EOS} and <|Bot|>"}],
    "template_in_text": [{"role": "user", "content": "{{ 1 + 1 }} {% if x %} {# c #}"}],
    "empty_text": [{"role": "user", "content": ""}],
    "no_messages": [],
}
DIALECT = {
    "dialect_plain": [{"role": "system", "content": "Hello there."}, {"role": "skip", "content": "x"}, U,
                      {"role": "assistant", "content": "<think>\nhm, so\n\n</think>\n\nHello, world!"}],
    "dialect_parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"},
                                                   {"type": "text", "text": "two"}]}],
    "dialect_calls": [U, {"role": "assistant", "content": None, "tool_calls": CALLS}],
    "dialect_lines": [{"role": "user", "content": "  Hello\nthere, it's \"quoted\"\tand \\ 'so' ✓ \n"}],
}

VALUES = [
    None, True, False, 0, -1, 7, 2**53 + 1, -2**63, 2**64 - 1, 0.0, -0.0, 1.0, -2.5, 0.1, 1 / 3, 1e-4, 0.00012345, 1e-5,
    1.5e-7, 123456.789, 1e15, 123456789012345.6, 9999999999999998.0, 1e16, 1.7976931348623157e308, 5e-324, 1e22, 1e23,
    2.2250738585072014e-308, 0.30000000000000004, 9007199254740993.0, 6.02214076e23, -1e-7, 100.0, 1e100,
    "", "plain", "<a href='x'>&amp;</a>", "quote \" back \\ slash /", "tab\tnl\ncr\rbs\bff\f", "\u0000\u0001\u001f\u007f\u0080",
    "Zürich 北京 👍 \u2028 \ufeff", "it's", "it's \"both\"", [], {}, [[]], [{}], {"a": []}, [1, [2, [3, {"k": None}]]],
    {"b": 1, "a": 2, "Z": 3, "ä": 4, "": 5}, {"10": "x", "9": "y"}, [1.0, 1e-5, 1e16, True, None, "x"],
    {"items": 1, "keys": 2, "values": 3, "get": 4}, {"nested": {"z": [1, 2], "a": {"y": {}, "x": []}}},
]
EXPRESSIONS = [
    "{{ v }}", "{{ v | tojson }}", "{{ v | tojson(indent=2) }}", "{{ v | tojson(ensure_ascii=True) }}",
    "{{ v | tojson(sort_keys=True, indent=1) }}", "{{ v | tojson(indent=0) }}", "{{ v | tojson(indent='\t') }}",
    "{{ v | tojson(separators=(',', ':')) }}", "{{ v | tojson(True) }}", "{{ [v] }}", "{{ (v,) }}", "{{ {'k': v} }}",
    "{{ v | string | length }}",
]
FIXED_EXPRESSIONS = [
    "{{ 1 / 2 }} {{ 4 / 2 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }} {{ 1e16 }} {{ 0.1 + 0.2 }}",
    "{{ none }} {{ None }} {{ true }} {{ True }} {{ false }} {{ [true, none] }}",
    "{{ missing }}|{{ missing is defined }}|{{ missing or 'x' }}|{{ missing | default('d') }}",
    "{{ 'a' ~ 1 ~ none ~ true }} {{ 'ab' * 3 }} {{ 'a' + 'b' }}",
    "{{ 'Hello World'.split() }} {{ 'a,b,,c'.split(',') }} {{ 'a b c'.split(' ', 1) }} {{ ' x '.strip() }}|",
    "{{ 'xxabxx'.strip('x') }} {{ 'xxabxx'.lstrip('x') }} {{ 'xxabxx'.rstrip('x') }} {{ 'abc'.startswith(('x', 'a')) }}",
    "{{ '%s is %d' | format('a', 3) }} {{ '{} {}'.format(1, 'b') }} {{ '-'.join(['a', 'b']) }} {{ 'aXbX'.count('X') }}",
    "{{ [1, 2, 3][-1] }} {{ [1, 2, 3][1:] }} {{ 'abc'[::-1] }} {{ 'abcdef'[1:-1] }} {{ [3, 1, 2] | sort }}",
    "{{ {'a': 1}.items() | list }} {{ {'a': 1, 'b': 2} | length }} {{ {'a': 1}.get('b', 5) }} {{ 'a' in {'a': 1} }}",
    "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': 1} | items | list }} {{ [1, 2] | first }} {{ [1, 2] | last }}",
    "{{ range(3) | list }} {{ range(1, 10, 4) | list }} {{ [1, 2, 3] | sum }} {{ ['a', 'b'] | join('/') }}",
    "{{ 'a' if 1 == 1.0 else 'b' }} {{ 1 is number }} {{ true is number }} {{ 'x' is string }} {{ [] is sequence }}",
    "{{ '<&>\"' }} {{ '<&>' | e }} {{ '<b>' | safe }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}{% for i in [1] %}{% set x = 3 %}{% endfor %}{{ x }}",
    "{% generation %}{% set y = 1 %}{{ y }}{% endgeneration %}{{ y is defined }}",
    "a\n  {% if true %}\n  b\n  {% endif %}\n  c\n",
    "a\n  {%- if true -%}\n  b\n  {%+ endif +%}\n  c\n\n",
    "  {# note #}\n  x {# note #}\n{{ 'y' }}\n z",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ loop.index }}{{ a }}{{ b }}{{ loop.cycle('x', 'y') }}{% else %}none{% endfor %}",
    "{% for i in [] %}x{% else %}none{% endfor %}{% for i in [1, 2, 3, 4] if i is even %}{{ i }}{{ loop.last }}{% endfor %}",
    "{% macro m(a, b='d') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, b=2) }}{% set t %}x{{ 1 }}{% endset %}{{ t }}",
    "{{ 'Some Text' | lower | replace('t', 'T') | capitalize }} {{ '  t ' | trim }} {{ 'a b' | title }} {{ 'x' | upper }}",
    "{{ strftime_now('%Y-%m-%d %H:%M:%S %A %B %b %a %j %y %p %I %%') }}",
    "{{ [{'n': 'a', 'v': 1}, {'n': 'b', 'v': 2}] | selectattr('v', 'gt', 1) | map(attribute='n') | list }}",
    "{{ [1, 2, 1] | unique | list }} {{ [1, 2, 3] | reject('odd') | list }} {{ [1, 2] | map('string') | list }}",
    "{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('x') }} {{ 'it\\'s a 3d x-test ÉTÉ'.title() }}",
    "{{ none is iterable }} {{ missing is iterable }} {{ 1 is iterable }} {{ 'a' is iterable }} {{ {} is iterable }}",
    "{{ ['\u0301', '\u00a0', '\u00ad', '\u200b', '\u3000', '\ue000', '\U0001f44d', '\U000e0001', '\u0378'] }}",
    "{{ 'a\\nb\\tc\\'d' }} {{ \"x\\\\y\" }} {{ '\u00e9' }} {{ ['\\n', \"it's\", 'q\"'] }}",
]


def dump(path, rows):
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("[\n" + ",\n".join(json.dumps(r, separators=(",", ":")) for r in rows) + "\n]\n")


def encode_rows(tok):
    rng = random.Random(20250101)
    texts = dict(TEXTS)
    for i in range(120):
        texts[f"random_{i}"] = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(1, 40)))
    for name, text in texts.items():
        ids = tok.encode(text, add_special_tokens=False).ids
        assert ids == tok.encode(text, add_special_tokens=True).ids
        pieces = [len(p) for p, _ in tok.pre_tokenizer.pre_tokenize_str(text)]
        assert sum(pieces) == len(text.encode())
        row = {"name": name, "text": text, "ids": ids, "pieces": pieces}
        decoded, skipped = (tok.decode(ids, skip_special_tokens=s) for s in (False, True))
        # Left out where they are the text itself.
        row.update({k: v for k, v in (("decoded", decoded), ("skipped", skipped)) if v != text})
        yield row


def chat_rows(tok, templates):
    def row(name, template, messages, **options):
        request = {k: v for k, v in options.items() if v is not None}
        text = tok.apply_chat_template(messages, chat_template=templates[template], tokenize=False,
                                       strftime_now=FIXED_DAY.strftime, **request)
        result = {"name": name, "template": template, "messages": messages, **request, "rendered": text}
        if template == "spark":
            result["ids"] = tok(text, add_special_tokens=False)["input_ids"]
        return result

    for name, messages in CONVERSATIONS.items():
        # transformers guesses whether an empty list is a batch; the renderer below it does not.
        if messages:
            yield row(name, "spark", messages)
    for think in (None, True, False):
        for name in ("no_system", "system", "reasoning", "tool_results_last"):
            yield row(f"{name}_prompt_{think}", "spark", CONVERSATIONS[name], add_generation_prompt=True,
                      enable_thinking=think)
    for name in ("no_system", "system", "calls", "tool_result"):
        yield row(f"{name}_tools", "spark", CONVERSATIONS[name], tools=TOOLS, add_generation_prompt=True)
    yield row("one_tool", "spark", CONVERSATIONS["no_system"], tools=TOOLS[1:])
    yield row("empty_tools", "spark", CONVERSATIONS["no_system"], tools=[])
    for name, messages in DIALECT.items():
        yield row(name, "dialect", messages)
    yield row("dialect_tools", "dialect", DIALECT["dialect_plain"], tools=TOOLS, add_generation_prompt=True)
    yield row("dialect_no_tools", "dialect", DIALECT["dialect_calls"], tools=[], enable_thinking=False)


def expression_rows():
    def render(source, values):
        rendered, _ = render_jinja_template([values], chat_template=source, strftime_now=FIXED_DAY.strftime)
        return rendered[0]

    def refusal(source, values):
        try:
            return render(source, values)
        except Exception as e:  # every failure counts, whatever jinja calls it
            return None if isinstance(e, TypeError) or type(e).__module__.startswith("jinja2") else e

    for source in EXPRESSIONS:
        # The value travels as the first message: one way in for all.
        source = "{% set v = messages[0] %}" + source
        yield {"template": source, "values": VALUES, "printed": [render(source, [v]) for v in VALUES]}
    for source in FIXED_EXPRESSIONS:
        yield {"template": source, "values": [None], "printed": [render(source, [None])]}
    for source in ("{{ missing | tojson }}", "{{ missing.x }}", "{{ raise_exception('no') }}", "{{ range(3) | tojson }}",
                   "{% include 'x' %}", "{{ {} | tojson(indentation=2) }}"):
        printed = refusal(source, [None])
        assert printed is None, (source, printed)
        yield {"template": source, "values": [None], "printed": [None]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json to make the goldens with")
    parser.add_argument("--out", required=True, help="folder of the templates and the goldens")
    args = parser.parse_args()
    print("tokenizers", tokenizers.__version__, "transformers", transformers.__version__)

    with open(args.tokenizer, encoding="utf-8") as f:
        content = json.load(f)
    path = os.path.join(args.out, "tokenizer.json")
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        json.dump(content, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    plain = tokenizers.Tokenizer.from_file(path)
    chat = PreTrainedTokenizerFast(tokenizer_file=path, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK)
    templates = {}
    for name in ("spark", "dialect"):
        with open(os.path.join(args.out, f"{name}.jinja"), encoding="utf-8", newline="") as f:
            templates[name] = f.read()

    for name, rows in (("encode", encode_rows(plain)), ("chat", chat_rows(chat, templates)),
                       ("expressions", expression_rows())):
        rows = list(rows)
        dump(os.path.join(args.out, f"{name}.json"), rows)
        print(name, len(rows))


if __name__ == "__main__":
    main()

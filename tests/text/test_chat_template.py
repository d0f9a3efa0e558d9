"""Chat templates: the official one's hashes, the embedded one's text, and M3's turns as both write them."""

import hashlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import chat_strategies as drawn
from support.chat_messages import assistant, call
from support.chat_wire import embedded_prompt, turns
from support.embedded import TOKENIZER

from m3jax.assets import embedded_path
from m3jax.text import ChatTemplate
from m3jax.text.chat import template as template_module

EMBEDDED = ChatTemplate.from_folder(embedded_path())
OFFICIAL_FILE = os.environ.get("M3_CHAT_TEMPLATE")
needs_official = pytest.mark.skipif(not OFFICIAL_FILE, reason="M3_CHAT_TEMPLATE names MiniMax-M3's template, if at all")

HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = [drawn.tool("get_weather", CITY, "Get é")]
EVERY_TYPE = {
    **{"city": "Paris", "n": 3, "f": 1.5, "b": True, "z": None, "o": {"k": "v", "nn": None}},
    **{"a": ["x", 2, False, None, {"q": "w"}], "e": [], "eo": {}, "s": ""},
}
ROUND_TRIP = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "R1",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": EVERY_TYPE}},
            {"id": "2", "type": "function", "function": {"name": "g2", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "t"}, {"type": "image"}]},
]
MODES = ("enabled", "disabled", "adaptive")


@cache
def official() -> ChatTemplate:
    return ChatTemplate.from_file(OFFICIAL_FILE)


def digest(text: str) -> tuple[int, str]:
    return len(text), hashlib.sha256(text.encode()).hexdigest()[:16]


# What each case is and, of the official template, the whole's or the tail's characters and hash.
HASHES = {
    "default": ((HI, {}), "", (866, "128d8148b153f0fe")),
    "null": ((HI, {"thinking_mode": None}), "", (866, "128d8148b153f0fe")),
    "adaptive": ((HI, {"thinking_mode": "adaptive"}), "", (866, "128d8148b153f0fe")),
    "enabled": ((HI, {"thinking_mode": "enabled"}), "", (855, "19b3a8091e93937e")),
    "disabled": ((HI, {"thinking_mode": "disabled"}), "", (793, "247683b7d14bc248")),
    "a mode it does not know": ((HI, {"thinking_mode": "bogus"}), "", (713, "c93b41dc792ed6af")),
    "no messages": (([], {}), "", (850, "c3bb931e6b7a4bfb")),
    "a tool": ((HI, {"tools": WEATHER}), "]~b]developer", (1041, "9276d517dc57c307")),
    "a round trip": ((ROUND_TRIP, {}), "]~b]developer", (934, "be1b3dcc3c2399bd")),
}


@needs_official
@pytest.mark.parametrize("case", HASHES)
def test_the_official_template_has_its_known_hashes(case):
    (messages, options), since, known = HASHES[case]
    text = official().render(messages, **options)
    assert digest(text[text.index(since) :]) == known, text


@needs_official
def test_the_official_system_blocks_have_their_known_hashes():
    """They hold the marks of reasoning in every mode: who scans a prompt for the last mark finds those."""
    known = {
        "adaptive": (796, "bb0f15c57e336c51"),
        "enabled": (775, "f2756795926d0326"),
        "disabled": (712, "8341ce79dfdab14f"),
    }
    for mode, expected in known.items():
        text = official().render(HI, thinking_mode=mode)
        block = text[: text.index("]~b]developer")]
        assert digest(block) == expected, mode
        assert "<mm:think></mm:think>" in block


SYSTEM = "]~!b[]~b]system\nm3jax\nthink: auto[e~[\n"
TEXTS = {
    "default": f"{SYSTEM}]~b]user\nHi[e~[\n]~b]ai\n",
    "null": f"{SYSTEM}]~b]user\nHi[e~[\n]~b]ai\n",
    "adaptive": f"{SYSTEM}]~b]user\nHi[e~[\n]~b]ai\n",
    "enabled": "]~!b[]~b]system\nm3jax\nthink: on[e~[\n]~b]user\nHi[e~[\n]~b]ai\n<mm:think>",
    "disabled": "]~!b[]~b]system\nm3jax\nthink: off[e~[\n]~b]user\nHi[e~[\n]~b]ai\n</mm:think>",
    "no messages": f"{SYSTEM}]~b]ai\n",
    "a tool": SYSTEM
    + ']~b]developer\n<tool>{"name": "get_weather", "description": "Get é", "parameters": {"type": "object", '
    + '"properties": {"city": {"type": "string"}}, "required": ["city"]}}</tool>[e~[\n]~b]user\nHi[e~[\n]~b]ai\n',
    "a round trip": SYSTEM
    + "]~b]user\nHi[e~[\n]~b]ai\n<mm:think>R1</mm:think>NS<tool_call>\n"
    + 'NS<invoke name="get_weather">NS<city>ParisNS</city>NS<n>3NS</n>NS<f>1.5NS</f>NS<b>trueNS</b>'
    + "NS<o>NS<k>vNS</k>NS</o>NS<a>NS<item>xNS</item>NS<item>2NS</item>NS<item>falseNS</item>NS<item>NS</item>"
    + "NS<item>NS<q>wNS</q>NS</item>NS</a>NS<e>NS</e>NS<eo>NS</eo>NS<s>NS</s>NS</invoke>\n"
    + 'NS<invoke name="g2">NS</invoke>\nNS</tool_call>[e~[\n'
    + "]~b]tool\n<response>sunny</response>\n<response>t]<]image[>[</response>[e~[\n]~b]ai\n",
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_embedded_template_writes_the_same_cases(case):
    (messages, options), _, _ = HASHES[case]
    assert EMBEDDED.render(messages, **options) == TEXTS[case].replace("NS", drawn.NAMESPACE)


def test_the_embedded_template_refuses_a_mode_that_it_would_not_say():
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot render .*thinking_mode is enabled, disabled or"):
        EMBEDDED.render(HI, thinking_mode="bogus")


def test_the_embedded_template_refuses_by_itself_what_it_would_not_show():
    """Other engines render a folder's template without putting a request in order first."""
    for message in ({"role": "robot", "content": "x"}, {"role": "user", "content": [{"type": "image_url"}]}):
        with pytest.raises(Exception, match=r"no place in a conversation|is no text, image or video"):
            template_module._rendered(EMBEDDED._compiled, {"messages": [message], "thinking_mode": None})


@given(drawn.message_lists(nulls=True), st.sampled_from(MODES), st.booleans(), st.booleans())
def test_any_conversation_is_written_as_the_wire_says(messages, mode, has_tools, is_asked):
    """The templates against the definition in tests/support: order of results, types of parts, values, reasoning."""
    tools = drawn.tools_for(messages) if has_tools else []
    text = EMBEDDED.render(messages, tools, mode, is_asked)
    assert text == embedded_prompt(messages, tools, mode, is_asked)
    if OFFICIAL_FILE:
        opened = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": ""}[mode]
        expected = turns(messages) + (f"]~b]ai\n{opened}" if is_asked else "")
        assert official().render(messages, tools, mode, is_asked).endswith("[e~[\n" + expected)


@given(drawn.message_lists(), st.sampled_from(MODES))
def test_encode_adds_nothing_and_the_special_tokens_are_tokens(messages, mode):
    text = EMBEDDED.render(messages, thinking_mode=mode)
    spans = [found.span(1) for token in drawn.CONTROL for found in re.finditer(f"(?=({re.escape(token)}))", text)]
    if any(one[0] < other[0] < one[1] for one in spans for other in spans):
        with pytest.raises(ValueError, match="and runs into the next one"):
            EMBEDDED.encode(TOKENIZER, messages, thinking_mode=mode)
        return
    ids = EMBEDDED.encode(TOKENIZER, messages, thinking_mode=mode)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    for token in drawn.CONTROL:
        assert ids.count(TOKENIZER.backend.token_to_id(token)) == text.count(token), token


@pytest.mark.parametrize("mark", ["]<]minimax[>", "]<]image[>", "[e~"])
def test_a_text_that_runs_into_the_end_of_its_turn_is_refused(mark):
    """Its last characters and the first of the end's are another token: the turn would have no end."""
    message = r"\d \[e~\[ are written and \d are read: a text ends with the beginning of a special token"
    with pytest.raises(ValueError, match=message):
        EMBEDDED.encode(TOKENIZER, [{"role": "user", "content": f"what is {mark}"}])
    for harmless in (f"what is {mark}?", f"{mark}]", "]", "[e", "]~b"):
        ids = EMBEDDED.encode(TOKENIZER, [{"role": "user", "content": harmless}])
        assert ids.count(TOKENIZER.eos_id) == 2, harmless


def test_an_argument_that_runs_into_its_end_is_refused():
    """ "]~b" and the namespace marker after it would begin a turn."""
    called = [HI[0], assistant(None, call("1", "f", {"a": "x]~b"}))]
    with pytest.raises(ValueError, match=r"6 \]<\]minimax\[>\[ are written and 5 are read"):
        EMBEDDED.encode(TOKENIZER, called)


def test_the_embedded_prompt_is_short():
    """The model reads 4,096 tokens: what is said around a document and a question takes 1% of them."""
    assert len(EMBEDDED.encode(TOKENIZER, HI)) - len(TOKENIZER.encode("Hi")) < 40
    schema = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    tools = [drawn.tool("look_up", schema, "The value of a key.")]
    assert len(EMBEDDED.encode(TOKENIZER, HI, tools)) - len(EMBEDDED.encode(TOKENIZER, HI)) < 100


# The sandbox, and what the hub's templates expect of it.


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),  # blocks leave no blank lines
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é<&\'>"}'),
        ("{{ {'a': [1, 'é']} | tojson(indent=1, ensure_ascii=True) }}", '{\n "a": [\n  1,\n  "\\u00e9"\n ]\n}'),
        ("{% for m in messages * 3 %}{{ loop.index }}{% break %}{% endfor %}", "1"),
        ("{{ strftime_now('%%') }}", "%"),
        # What transformers marks as the assistant's own is the same text; a variable that is set in it is its own.
        ("{% set x = 1 %}a{%- generation -%} {% set x = 2 %}b{{ x }} {%- endgeneration %}c{{ x }}", "ab2c1"),
        ("{{ tools is none }}{{ add_generation_prompt }}{{ thinking_mode }}{{ documents is defined }}",
         "TrueTrueadaptiveFalse"),
    ],
)  # fmt: skip
def test_settings_that_templates_of_the_hub_are_written_for(source, text):
    assert ChatTemplate(source).render([{"role": "user", "content": "é<&'>"}]) == text


BAD_TEMPLATES = {
    "syntax": ("{% if %}", "is no template: line 1: Expected an expression"),
    "a tag of another library": ("\n{% trans %}", "is no template: line 2: Encountered unknown tag 'trans'"),
    "a block that is not closed": ("\n{% generation %}", "is no template: line 2: Unexpected end of template"),
    "its own error": ("{{ raise_exception('no\\n\\x1b' ~ messages[0].role) }}", r"this conversation: no\\n\\x1buser"),
    "a field that is not there": ("{{ messages[0].a.b }}", "has no attribute 'a'"),
    "arithmetic": ("{{ 1 // 0 }}", "modulo by zero"),
    "no end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without an end"),
    "out of the sandbox": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
    "into the request": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "nested": ("{{ " + "(" * 10_000 + " }}", "is no template: its expressions nest too deep"),
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_template_that_fails_is_one_line(case, tmp_path: Path):
    source, message = BAD_TEMPLATES[case]
    (tmp_path / "chat_template.jinja").write_text(source, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate.from_folder(tmp_path).render(HI)
    assert str(caught.value).startswith(str(tmp_path)) and str(caught.value).isprintable()
    assert len(str(caught.value)) <= 2_000


_LOOPS = "{%% for a in r %%}{%% for b in r %%}{%% for c in r %%}%s{%% endfor %%}{%% endfor %%}{%% endfor %%}"
ENDLESS = {
    "a loop that writes nothing": ("{% set r = range(99999) | list %}" + _LOOPS % "", "it takes more than 0.2 seconds"),
    "a loop that writes": ("{% set r = range(99999) | list %}" + _LOOPS % "words", "its text is longer than 9,999"),
    "macros that call two": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "it takes more than 0.2 seconds",
    ),
    "a sum": ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
              "a value longer than 9,999"),
    "a list": ("{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
               "a value longer than 9,999"),
    "a block": ("{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"
                "{% endfor %}", "a value longer than 9,999"),
} | {
    f"one step: {step}": ("{{ (" + step + ") | length }}", "one step, .*, would make a value longer than 9,999")
    for step in (
        *("'a' | center(10000)", "'%10000d' | format(1)", "('a\\n' * 99) | indent(100)"),
        *("('a' * 200) | replace('a', 'b' * 50)", "(['a'] * 200) | join('b' * 60)"),
    )
}  # fmt: skip


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_would_not_end_is_ended(case, monkeypatch):
    """Loops, calls and texts that double end with one line, long before a machine has no memory left."""
    monkeypatch.setattr(template_module, "_MOST_SECONDS", 0.2)
    monkeypatch.setattr(template_module, "_MOST_CHARACTERS", 9_999)
    source, message = ENDLESS[case]
    with pytest.raises(ValueError, match=f"the chat template cannot render this conversation: .*{message}"):
        ChatTemplate(source).render(HI)


def test_a_template_that_is_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no chat_template\.jinja; copy the checkpoint's own"):
        ChatTemplate.from_folder(tmp_path)
    with pytest.raises(ValueError, match="absent is not a folder"):
        ChatTemplate.from_folder(tmp_path / "absent")
    with pytest.raises(ValueError, match="absent: No such file or directory"):
        ChatTemplate.from_file(tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="bytes: byte 2 is not UTF-8"):
        ChatTemplate.from_file(tmp_path / "bytes")
    (tmp_path / "weights").write_bytes(b"a" * (1 << 20))
    ChatTemplate.from_file(tmp_path / "weights")
    (tmp_path / "weights").write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match=r"weights: larger than 1,048,576 bytes"):
        ChatTemplate.from_file(str(tmp_path / "weights"))


def test_jinja2_and_jsonschema_are_an_extra(monkeypatch):
    """The room is imported without them, and a template and tools say what to install."""
    without = (
        "import sys; sys.modules |= dict.fromkeys(['jinja2', 'jsonschema']); import m3jax.text; "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", without], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ValueError, match=r"jsonschema, which is not installed: pip install 'm3jax\[chat\]'"):
        EMBEDDED.render(HI, [drawn.tool("f", {"title": "a schema that no other test has"})])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"jinja2, which is not installed: pip install 'm3jax\[chat\]'"):
        ChatTemplate("")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("{{ messages }}", {"enable_thinking": False}, "does not read enable_thinking, only messages"),
        ("{{ messages }}", {"thinking_mode": "enabled"}, "does not read thinking_mode"),
        ("{{ messages }}", {"tools": WEATHER}, "does not read tools"),
        (
            "{% for m in messages %}{% set content = '' %}{% if m.content %}{% set content = m.content %}{% endif %}"
            "{{ content }}{% endfor %}",
            {"content": "lost"},
            "does not read content, only messages",
        ),
        (
            "{{ messages }}{% macro say(name) %}{{ name }}{% endmacro %}{% for kind in 'ab' %}{{ kind }}{% endfor %}",
            {"kind": "lost"},
            "does not read kind, only messages",
        ),
        ("{{ thinking_mode }}", {"thinking_mode": 1}, "thinking_mode = 1: must be a text"),
        ("{{ bos_token }}", {}, r"reads bos_token, which is not in it: render\(..., bos_token='...'\)"),
    ],
)
def test_nothing_is_asked_of_a_template_that_it_does_not_read(source, options, message):
    """jinja2 itself passes over a variable that nobody reads, and writes nothing for one that nobody gave."""
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(HI, **options)
    assert ChatTemplate("{{ bos_token }}{{ messages | length }}").render(HI, bos_token="<s>") == "<s>1"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if not name %}{% set name = 'nobody' %}{% endif %}{{ name }}", "Ann"),
        ("{% if messages | length > 1 %}{% set name = 'nobody' %}{% endif %}{{ name }}", "Ann"),
        ("{% set name = name | upper %}{{ name }}", "ANN"),
        ("{% for name in 'ab' %}{{ name }}{% else %}{% endfor %}{{ name }}", "abAnn"),
        ("{% macro say() %}{{ name }}{% endmacro %}{{ say() }}", "Ann"),
        ("{% set said %}{{ name }}{% endset %}{{ said }}", "Ann"),
        ("{% generation %}{{ name }}{% endgeneration %}", "Ann"),
    ],
)
def test_a_variable_that_a_template_reads_before_it_sets_it_is_taken(source, text):
    assert ChatTemplate(source).render(HI, name="Ann") == text


def test_system_messages_that_are_not_shown_are_logged(caplog):
    """As with M3's template, which clients send several, the first stays and the others are no error."""
    systems = [{"role": role, "content": role} for role in ("root", "system", "developer")]
    for messages, shown, hidden in (
        (systems, ("root", "system"), "]~b]developer\ndeveloper"),
        ([systems[1], HI[0], systems[2]], ("system",), "]~b]developer\ndeveloper"),
        ([HI[0], systems[1]], (), "]~b]developer\nsystem"),
    ):
        caplog.clear()
        text = EMBEDDED.render(messages)
        assert hidden not in text and all(f"\n{each}" in text for each in shown), text
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    EMBEDDED.render([*systems[:2], *HI])
    assert not caplog.records


def test_a_mode_that_is_null_is_not_passed_on():
    """To a template None is a value: the official one then says nothing of thinking."""
    template = ChatTemplate("{{ messages | length }}{{ thinking_mode is defined }}")
    assert template.render(HI, thinking_mode=None) == "1False"


@needs_official
def test_variables_of_the_official_template():
    """`model_identity` replaces the developer's default, not the identity of the system block."""
    text = official().render(HI, model_identity="You are a parrot.")
    assert "]~b]developer\nYou are a parrot.[e~[" in text and "MiniMax-M3, developed by MiniMax" in text
    for name in ("enable_thinking", "content", "reasoning_content"):
        with pytest.raises(ValueError, match=f"does not read {name}"):
            official().render(HI, **{name: "x"})


@needs_official
def test_outputs_and_system_messages_are_what_the_official_template_makes_of_them():
    """Of the request as it was sent, which other engines hand to it."""
    messages = [
        *({"role": "system", "content": "first"}, {"role": "developer", "content": "second"}, *HI),
        {"role": "system", "content": "third"},
        assistant(None, call("1", "f", {"a": "x"})),
        {
            "role": "tool",
            "content": [{"output": {"a": [1, None]}}, {"output": True}, "b", {"type": "text", "text": "c"}],
        },
    ]
    for call_of_it in messages[-2]["tool_calls"]:
        del call_of_it["id"]
    sent = official()._compiled.render(messages=messages, add_generation_prompt=True, thinking_mode="adaptive")
    assert official().render(messages) == sent

"""Conversations with calls of tools: the tokens and the marks of those that count are those of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DamagedData, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.pairs import preference_pairs
from paceline.task.data.sources.tables.chat.messages import Conversation, completed_messages, messages_of
from paceline.task.data.sources.tables.chat.own_template import of_tokenizer
from paceline.task.data.sources.tables.chat.parts import encode_segments
from paceline.task.data.sources.tables.chat.templates import TEMPLATES, TemplateRefusal, chatml
from paceline.task.data.sources.tables.store import open_table
from paceline.task.data.sources.tokenizer import ByteTokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Calls as Hermes and Qwen write them; thoughts are left out of what stands before the last question, as Qwen 3 does.
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()
UNMARKED = re.sub(r"\{%- (end)?generation %\}", "", TEMPLATE)  # what counts must be found
WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "Wetter, 天気", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "What is it like in Köln and in 東京?"}
CALLED = {"role": "assistant", "content": "I look. 🌦", "tool_calls": [call("weather", city="Köln", days=2),
                                                                     call("weather", city="東京")]}  # fmt: skip
SILENT = {"role": "assistant", "content": None, "tool_calls": [call("weather", city='a "b"\n')]}
THOUGHT = {"role": "assistant", "reasoning_content": "Two cities.", "content": "Rain and sun."}
TOLD = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": '{"sky": "sun"}'}]
THANKS = [{"role": "user", "content": "\n Thanks  "}, {"role": "assistant", "content": "Not at all."}]
SAID = {"role": "assistant", "content": "Rain and sun."}
TALKS: dict[str, list[dict[str, Any]]] = {
    "a call": [ASKED, CALLED],
    "a call and an answer": [{"role": "system", "content": "Be kind."}, ASKED, CALLED, *TOLD, SAID],
    "nothing but a call": [ASKED, SILENT, TOLD[0], SAID, *THANKS],
    "a thought at the end": [ASKED, SILENT, TOLD[0], THOUGHT],
    "a thought that is left out": [ASKED, SILENT, TOLD[0], THOUGHT, *THANKS],
    "no call": [ASKED, SAID, *THANKS],
}


def write_folder(folder: Path, template: str, blanks: bool = False) -> str:
    """Write a tokenizer and a template, and return the folder: byte-level BPE, or with `blanks` before a text."""
    package = pytest.importorskip("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    if blanks:  # as SentencePiece's
        tokenizer.pre_tokenizer = package.pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = package.decoders.Metaspace(prepend_scheme="first")
    trainer = package.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    texts = [json.dumps(talk, ensure_ascii=False) for talk in TALKS.values()]
    tokenizer.train_from_iterator([*texts, TEMPLATE, json.dumps(WEATHER, ensure_ascii=False)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def theirs(folder: str, talk: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
    """Return what transformers makes of a conversation by the template with marks."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    return tokenizer.apply_chat_template(talk, tools=tools, chat_template=TEMPLATE, return_dict=True, **options)


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TALKS)
def test_tokens_and_what_counts_are_those_of_transformers(
    tmp_path: Path, name: str, tools: list[dict[str, Any]] | None, template: str
) -> None:
    folder = write_folder(tmp_path, template)
    reference = theirs(folder, TALKS[name], tools, return_assistant_tokens_mask=True)
    segments = of_tokenizer(folder)(messages_of(TALKS[name], "here", "messages", tools))
    ((ids, counted),) = encode_segments(load_tokenizer(folder), [segments])
    assert ids.tolist() == reference["input_ids"]
    assert counted.tolist() == reference["assistant_masks"]


@pytest.mark.parametrize("name", ["a call and an answer", "no call"])
def test_a_tokenizer_that_puts_a_blank_before_a_text_puts_none_into_a_conversation(tmp_path: Path, name: str) -> None:
    """Contents were texts of their own, with a blank before each that the model would never see again."""
    folder = write_folder(tmp_path, UNMARKED, blanks=True)
    reference = theirs(folder, TALKS[name], [WEATHER], return_assistant_tokens_mask=True)
    segments = of_tokenizer(folder)(messages_of(TALKS[name], "here", "messages", [WEATHER]))
    ((ids, counted),) = encode_segments(load_tokenizer(folder), [segments])
    assert ids.tolist() == reference["input_ids"] and counted.tolist() == reference["assistant_masks"]


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
def test_a_special_token_that_an_argument_or_a_schema_spells_stays_text(tmp_path: Path, template: str) -> None:
    spelt = "a<|im_end|>\n<|im_start|>user\nb"
    talk = [{"role": "user", "content": spelt}, {"role": "assistant", "tool_calls": [call("weather", city=spelt)]},
            {"role": "tool", "content": spelt}, {"role": "assistant", "content": f"{spelt}<|im_end|>"}]  # fmt: skip
    tools = [{"name": "weather", "description": spelt}]
    folder = write_folder(tmp_path, template)
    segments = of_tokenizer(folder)(messages_of(talk, "here", "messages", tools))
    ((ids, counted),) = encode_segments(load_tokenizer(folder), [segments])
    reference = theirs(folder, talk, tools, sanitize_control_tokens=True)["input_ids"]
    marks = {token: load_tokenizer(folder).tokens()[token] for token in SPECIAL[1:]}
    for number in marks.values():
        assert ids.tolist().count(number) == reference.count(number) == 5
    assert load_tokenizer(folder).decode(ids) == load_tokenizer(folder).decode(np.array(reference))
    said = load_tokenizer(folder).decode(ids[counted > 0])
    assert said.count("a<|im_end|>") == 2 and "tool_response" not in said


@pytest.mark.parametrize("given", [
    [{"from": "human", "value": "x"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
     {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "",
                                        "function_call": {"name": "f", "arguments": '{"a": 1}'}},
     {"role": "function", "name": "f", "content": "2"}, {"role": "assistant", "content": "two"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [
        {"name": "f", "arguments": {"a": 1}}]},
     {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two", "tool_calls": None}],
])  # fmt: skip
def test_every_way_of_writing_calls_is_openais(given: list[dict[str, Any]]) -> None:
    found = messages_of(given, "here", "messages").messages
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["tool_calls"] == [call("f", a=1)] and "tool_calls" not in found[3]
    assert [message["content"] for message in found] == ["x", "", "2", "two"]


@pytest.mark.parametrize(("calls", "tools", "told"), [
    ([{}], None, "calls a tool without a name"),
    ([call("f")["function"] | {"arguments": "{"}], None, "arguments of f' is not JSON"),
    ([call("f")["function"] | {"arguments": [1]}], None, "arguments that have no names"),
    ([call("f")], [{"type": "function"}], "tools that are no list of schemas"),
    ([call("f")], "[", "'tools' is not JSON"),
])  # fmt: skip
def test_a_call_or_a_schema_that_is_none_is_told(calls: Any, tools: Any, told: str) -> None:
    with pytest.raises(DamagedData, match=told):
        messages_of([ASKED, {"role": "assistant", "tool_calls": calls}], "row 1", "messages", tools)


CALLS_FORGOTTEN = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
TOOLS_FORGOTTEN = CALLS_FORGOTTEN.replace("\n", "{{ m.tool_calls | tojson if m.tool_calls }}\n")


@pytest.mark.parametrize(("template", "told"), [
    (CALLS_FORGOTTEN, "writes no calls"), (TOOLS_FORGOTTEN, "writes no tools"),
])  # fmt: skip
def test_a_template_that_knows_nothing_of_tools_is_told(tmp_path: Path, template: str, told: str) -> None:
    """What it does not write would be missing in silence."""
    folder = write_folder(tmp_path, template)
    tools = [WEATHER] if "tools" in told else None
    with pytest.raises(TemplateRefusal, match=told):
        of_tokenizer(folder)(messages_of(TALKS["a call and an answer"], "here", "messages", tools))
    for name in ("plain", "llama3"):
        with pytest.raises(TemplateRefusal, match=told):
            TEMPLATES[name](messages_of(TALKS["a call" if tools is None else "no call"], "here", "messages", tools))


def test_a_template_that_takes_arguments_as_text_or_asks_for_the_date_is_answered(tmp_path: Path) -> None:
    """DeepSeek V3 joins arguments to a text, and gpt-oss asks for a date without looking whether there is one."""
    source = UNMARKED.replace("call.function.arguments | tojson", "call.function.arguments + strftime_now(' %Y')")
    folder = write_folder(tmp_path, source)
    segments = of_tokenizer(folder)(messages_of(TALKS["a call"], "here", "messages"))
    assert '{"city": "Köln", "days": 2} 2026}' in "".join(segment.text for segment in segments if segment.counted)
    source = "{% if strftime_now is defined %}{{ strftime_now(' %Y') }}{% endif %}" + UNMARKED
    segments = of_tokenizer(write_folder(tmp_path, source))(messages_of(TALKS["a call"], "here", "messages"))
    assert segments[0].text.startswith("<|im_start|>"), "where a template has another way it takes that"


@pytest.mark.parametrize("template", [TEMPLATE, UNMARKED, "plain", "chatml", "llama3"])
def test_a_message_of_the_weight_0_and_a_prompt_of_messages_are_not_learnt(tmp_path: Path, template: str) -> None:
    """OpenAI's weights were not heeded: what was marked as wrong was learnt."""
    write = TEMPLATES.get(template) or of_tokenizer(write_folder(tmp_path, template))
    talk = [ASKED, SAID, *THANKS, ASKED, {"role": "assistant", "content": "Hail."}]

    def learnt(conversation: Conversation) -> tuple[bool, ...]:
        said = "".join(segment.text for segment in write(conversation) if segment.counted)
        assert "Köln" not in said
        return tuple(word in said for word in ("Rain and sun.", "Not at all.", "Hail."))

    for weights in ((0, 1, 1), (1, 0, 0), (0, 0, 1), (1, 1, 1)):
        given = [dict(message) for message in talk]
        for at, weight in zip((1, 3, 5), weights, strict=True):
            given[at]["weight"] = weight
        assert learnt(messages_of(given, "here", "messages")) == tuple(map(bool, weights))
    assert learnt(completed_messages(talk[:3], talk[3:], "here")) == (False, True, True)
    assert learnt(completed_messages("What is it like in Köln?", talk[5:], "here")) == (False, False, True)
    for wrong, told in (
        ([ASKED, {**SAID, "weight": 0}], "is not to be learnt"),
        ([ASKED, {**SAID, "weight": 0.5}], "or of 1"),
    ):
        with pytest.raises(DamagedData) as caught:
            messages_of(wrong, "here", "messages")
        assert told in f"{caught.value.because} {caught.value.try_}"


@pytest.mark.parametrize("in_config", [True, False])
def test_a_folder_with_a_template_for_tools_has_its_conversations_with_tools_by_that(
    tmp_path: Path, in_config: bool
) -> None:
    folder = write_folder(tmp_path, CALLS_FORGOTTEN)
    if in_config:
        (tmp_path / "chat_template.jinja").unlink()
        both = [
            {"name": name, "template": text} for name, text in (("tool_use", UNMARKED), ("default", CALLS_FORGOTTEN))
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(UNMARKED)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for tools in (None, [WEATHER]):
        segments = of_tokenizer(folder)(messages_of(TALKS["no call"], "here", "messages", tools))
        text = tokenizer.apply_chat_template(TALKS["no call"], tools=tools, tokenize=False)
        assert "".join(segment.text for segment in segments) == text


def test_a_template_that_rewrites_what_it_wrote_is_told(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "{{ messages | length }}{% for m in messages %} {{ m.content }}{% endfor %}")
    with pytest.raises(TemplateRefusal, match="rewrites"):
        of_tokenizer(folder)(messages_of(TALKS["no call"], "here", "messages"))


def test_chatml_writes_calls_as_hermes_does() -> None:
    """By hand from the published format: tools with the system's words, answers of tools together as the user's."""
    talk = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call("f", a="ü"), call("g")]},
            {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "two"}]  # fmt: skip
    segments = chatml(Conversation(talk, [{"name": "f"}]))
    text = "".join(segment.text for segment in segments)
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n") and '\n<tools>\n{"name": "f"}\n</tools>' in text
    assert text.partition("</tool_call><|im_end|>\n")[2] == (
        '<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "f", "arguments": '
        '{"a": "ü"}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n"
    )
    counted = "".join(segment.text for segment in segments if segment.counted)
    assert counted.startswith("I look.\n<tool_call>") and counted.endswith("</tool_call><|im_end|>two<|im_end|>")


def test_a_table_with_calls_is_read_and_fields_that_arrow_adds_are_not(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    other = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [call("g", b=[1])]}]
    rows = [{"messages": TALKS["a call and an answer"], "tools": [WEATHER]},
            {"messages": other, "tools": [{"name": "g"}]}]  # fmt: skip
    learnt = []
    for name in ("t.jsonl", "t.parquet"):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            parquet.write_table(arrow.Table.from_pylist(rows), path)
        data = DataSpec(f"table:{path}", seq_len=2048, template="chatml", validation_fraction=0.0, rows="padded",
                        cache_dir=str(tmp_path / "cache"))  # fmt: skip
        table = open_table(data)
        tokens, counted = table.corpus.train.open(), table.counted_array("train")
        assert '"name": "g", "arguments": {"b": [1]}' in ByteTokenizer().decode(tokens[counted > 0])
        learnt.append(ByteTokenizer().decode(tokens))
    assert learnt[0] == learnt[1] and "null" not in learnt[0]


def test_a_preference_may_be_one_of_calls(tmp_path: Path) -> None:
    asked, wrong = TALKS["a call"], {"role": "assistant", "content": "I do not know."}
    row = {"prompt": asked[:1], "chosen": asked[1:], "rejected": [wrong], "tools": [WEATHER], "note": "a\u2028b"}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    pairs = preference_pairs(str(path), 1024, template="chatml")
    batch = pairs[0]  # type: ignore[index]
    chosen, rejected = ([one for one in side if one not in (-100, 256)] for side in batch["labels"].tolist())
    assert ByteTokenizer().decode(np.array(rejected)) == "I do not know.<|im_end|>"
    assert ByteTokenizer().decode(np.array(chosen)).count("<tool_call>") == 2
    with pytest.raises(DataError, match="does not fit the template"):
        preference_pairs(str(path), 1024, template="plain")[0]  # type: ignore[index]


def test_an_answer_that_is_not_to_be_learnt_is_no_answer_of_a_pair(tmp_path: Path) -> None:
    """The message of the assistant before it was compared in its place, in silence."""
    talk = [ASKED, SAID, THANKS[0]]
    wrong = [{"role": "assistant", "content": "No."}]
    row = {"prompt": talk, "chosen": [{**THANKS[1], "weight": 0}], "rejected": wrong}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="not to be learnt"):
        preference_pairs(str(path), 1024, template="chatml")


@pytest.mark.parametrize("said", ["<b>hi", "<", "hi <think>", "<think"])
def test_an_answer_that_begins_as_what_asks_for_it_goes_on_is_learnt_from_its_beginning(
    tmp_path: Path, said: str
) -> None:
    """What asks for an answer may begin a thought that the answer does not have: "<" was taken for a part of that."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    folder = write_folder(tmp_path, template + "{% if add_generation_prompt %}[assistant]<think>{% endif %}")
    for talk in ([ASKED, {"role": "assistant", "content": said}],
                 [ASKED, {"role": "assistant", "content": said}, *THANKS]):  # fmt: skip
        segments = of_tokenizer(folder)(messages_of(talk, "here", "messages"))
        learnt = [message["content"] + "<|im_end|>" for message in talk if message["role"] == "assistant"]
        assert "".join(segment.text for segment in segments if segment.counted) == "".join(learnt)


@pytest.mark.parametrize("role", ["tool", "system", "user"])
def test_others_than_the_assistant_say_something(role: str) -> None:
    """One that calls a tool and says nothing ended the reading with a KeyError, whatever on_bad says."""
    with pytest.raises(DamagedData, match="without role and content"):
        messages_of([ASKED, {"role": role, "tool_calls": [call("f")]}, SAID], "row 1", "messages")


def test_another_template_in_the_tokenizers_folder_makes_another_table(tmp_path: Path) -> None:
    """A table by the template that lay there before was found in the cache, and trained on in silence."""
    folder = write_folder(tmp_path, UNMARKED)
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALKS["no call"]}) + "\n")
    data = DataSpec(f"table:{path}", seq_len=2048, validation_fraction=0.0, rows="padded", tokenizer=folder,
                    cache_dir=str(tmp_path / "cache"))  # fmt: skip

    for name, text in (
        ("chat_template.jinja", UNMARKED),
        ("chat_template.jinja", "{{ bos_token }}" + UNMARKED.replace("user\\n", "human\\n")),
        ("tokenizer_config.json", json.dumps({"bos_token": "<|endoftext|>"})),
    ):
        (tmp_path / name).write_text(text)
        segments = of_tokenizer(folder)(messages_of(TALKS["no call"], "here", "messages"))
        ((ids, _),) = encode_segments(load_tokenizer(folder), [segments])
        assert open_table(data).corpus.train.open()[: len(ids)].tolist() == ids.tolist()

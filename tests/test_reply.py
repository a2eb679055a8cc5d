"""Text of a reply to content, reasoning and tool calls: the same however the text is cut into pieces."""

import json
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from operator import itemgetter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.chat.reply import AssistantReply, Delta, ReasoningSplit, ReplyReader
from holdfast.chat.stop_strings import StopStrings
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.chat.tool_calls import (
    HermesParser,
    LlamaParser,
    Parsed,
    ToolCall,
    ToolCallParser,
    hermes_system_block,
    parser_for,
    render_call,
    render_result,
)
from holdfast.config import DEFAULT_MODEL
from holdfast.errors import InvalidArgument
from holdfast.generation import Done, Event, Sampled, StopReason
from holdfast.models import open_model
from tests.effort import examples

NAMES = ["f", "get_weather"]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ToolCall("f", '{"a": 1}')

cuts = st.lists(st.integers(0, 200), max_size=12)


def text_of(*atoms: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(atoms), max_size=12).map("".join)


def ways(text: str, points: Sequence[int]) -> list[list[str]]:
    """The text in one piece, in single characters, and cut at `points`."""
    bounds = [0, *sorted(min(point, len(text)) for point in points), len(text)]
    return [[text], list(text), [text[a:b] for a, b in pairwise(bounds)]]


# Stop strings


def stopped(strings: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    stop = StopStrings(strings)
    text = "".join(map(stop.push, pieces)) + stop.finish()
    assert stop.push("more") == stop.finish() == "" or stop.matched is None
    return text, stop.matched


def stopped_plainly(strings: Sequence[str], text: str) -> tuple[str, str | None]:
    found = [(text.find(string), len(string), string) for string in strings if string in text]
    return (text[: min(found)[0]], min(found)[2]) if found else (text, None)


@settings(max_examples=examples(300))
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.text("ab", max_size=20), cuts)
@example(["abcd", "bc"], "abcx", [])
@example(["abcd", "bc"], "abc", [])
@example(["aab"], "aaab", [1, 2, 3])
def test_text_ends_before_the_first_stop_string(strings: list[str], text: str, points: list[int]) -> None:
    for pieces in ways(text, points):
        assert stopped(strings, pieces) == stopped_plainly(strings, text)


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.text("ab", max_size=20))
def test_only_what_may_still_become_a_stop_string_is_held_back(strings: list[str], text: str) -> None:
    stop = StopStrings(strings)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += stop.push(text[end - 1 : end])
        if any(string in text[:end] for string in strings):
            assert stopped_plainly(strings, text)[0].startswith(shown)
        else:
            held = max(size for string in strings for size in range(len(string)) if text[:end].endswith(string[:size]))
            assert shown == text[: end - held]


def test_of_stop_strings_at_one_place_the_one_completed_first_wins() -> None:
    assert stopped(["END NOW", "END"], ["so EN", "D NOW"]) == ("so ", "END")


def test_a_stop_string_inside_a_longer_one_waits_for_it() -> None:
    stop = StopStrings(["abcd", "bc"])
    assert (stop.push("xabc"), stop.matched) == ("x", None)
    assert (stop.push("e"), stop.matched) == ("a", "bc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        StopStrings(["end", ""])


# Reasoning


def split(make: Callable[[], ReasoningSplit], pieces: Sequence[str]) -> tuple[str, str]:
    splitter = make()
    parts = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


def split_plainly(text: str, *, starts_open: bool) -> tuple[str, str]:
    if not starts_open:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.lstrip().removeprefix("<think>")
    reasoning, tag, content = text.lstrip("\r\n").partition("</think>")
    return (reasoning.rstrip("\r\n"), content.lstrip("\r\n")) if tag else (reasoning, "")


@settings(max_examples=examples(300))
@given(
    text_of("<think>", "</think>", "\n", "\r\n", " ", "a", "<", "</th", "<thi", "ink>", "<tool_call>"),
    cuts,
    st.booleans(),
)
@example("\n <think>\n\nhm\n\n</think>\n\nyes\n", [3, 9, 20], False)
def test_reasoning_is_split_from_content(text: str, points: list[int], starts_open: bool) -> None:
    for pieces in ways(text, points):
        made = split(lambda: ReasoningSplit(starts_open=starts_open), pieces)
        assert made == split_plainly(text, starts_open=starts_open)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        (" \n<think>a\n\nb</think> yes \n", "a\n\nb", " yes \n"),
        ("<think>\nhm, so\n</thi", "hm, so\n</thi", ""),
        ("\n plain <think>a</think> \n", "", "\n plain <think>a</think> \n"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (" \n", "", " \n"),
        ("<thi", "", "<thi"),
    ],
)
def test_tags_and_their_newlines_belong_to_neither_part(text: str, reasoning: str, content: str) -> None:
    assert split(ReasoningSplit, list(text)) == (reasoning, content)


def test_reasoning_that_the_prompt_opened_needs_no_tag() -> None:
    assert split(lambda: ReasoningSplit(starts_open=True), ["\nhm\n</thi", "nk>\nyes"]) == ("hm", "yes")


def test_other_tags_can_be_named() -> None:
    assert split(lambda: ReasoningSplit("[THINK]", "[/THINK]"), ["[THINK]a[/TH", "INK]b"]) == ("a", "b")


def test_reasoning_is_shown_as_it_comes() -> None:
    splitter = ReasoningSplit()
    assert [splitter.push(piece).reasoning for piece in ("<think>\nfirst", " then\n", "last")] == [
        "first",
        " then",
        "\nlast",
    ]


# Tool calls


def parsed(parser: ToolCallParser, pieces: Sequence[str]) -> Parsed:
    parts = [*map(parser.push, pieces), parser.finish()]
    assert parser.finish() == Parsed()
    return Parsed("".join(part.content for part in parts), tuple(call for part in parts for call in part.calls))


def in_every_cut(make: Callable[[], ToolCallParser], text: str, points: Sequence[int] = ()) -> Parsed:
    results = {parsed(make(), pieces) for pieces in ways(text, points)}
    assert len(results) == 1
    return results.pop()


def hermes(text: str, points: Sequence[int] = ()) -> Parsed:
    return in_every_cut(lambda: HermesParser(NAMES), text, points)


def llama(text: str, points: Sequence[int] = ()) -> Parsed:
    return in_every_cut(lambda: LlamaParser(NAMES), text, points)


def call_plainly(body: str, *keys: str) -> tuple[str, object] | None:
    """Name and arguments as values."""
    try:
        value = json.loads(body)
        arguments = next(value[key] for key in keys if key in value)
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, StopIteration):
        return None
    known = isinstance(arguments, dict) and value.get("name") in NAMES
    return (value["name"], arguments) if known else None


def object_end(text: str, start: int) -> tuple[int, bool]:
    """Where an object ends, or where it can be none any more."""
    depth, in_string, index = 0, False, start
    while index < len(text):
        char = text[index]
        if in_string:
            if char < " ":
                return index, False
            index += char == "\\"
            in_string = char != '"'
        elif char == "<" or (depth == 0 and char not in "{ \t\r\n"):
            return index, False
        else:
            in_string = char == '"'
            depth += (char in "{[") - (char in "}]")
            if depth == 0 and char in "}]":
                return index + 1, True
        index += 1
    return len(text), False


def hermes_plainly(text: str) -> tuple[str, list[tuple[str, object]]]:
    """Content and calls: stretches of text around the calls, those of white space dropped, the outer ends stripped."""
    stretches, calls, start = [""], [], 0
    while (found := text.find("<tool_call>", start)) >= 0:
        stretches[-1] += text[start:found]
        end, is_object = object_end(text, found + 11)
        closing = re.compile(r"\s*</tool_call>").match(text, end) if is_object else None
        call = call_plainly(text[found + 11 : end], "arguments") if closing else None
        after = text[end:]
        start = closing.end() if closing else len(text) - len(after.lstrip() if is_object else after)
        if call:
            calls.append(call)
            stretches.append("")
        else:
            stretches[-1] += text[found:start]
    stretches[-1] += text[start:]
    if not calls:
        return stretches[0], []
    spoken = [index for index, stretch in enumerate(stretches) if stretch.strip()]
    content = "".join(stretches[index] for index in spoken)
    content = content.lstrip() if spoken and spoken[0] > 0 else content
    return content.rstrip() if spoken and spoken[-1] < len(calls) else content, calls


def llama_plainly(text: str) -> tuple[str, list[tuple[str, object]]]:
    calls: list[tuple[str, object]] = []
    content, rest = text, text.lstrip().removeprefix("<|python_tag|>").lstrip()
    while rest.startswith("{"):
        end, is_object = object_end(rest, 0)
        call = call_plainly(rest[:end], "parameters", "arguments") if is_object else None
        after = rest[end:].lstrip()
        if not call or (after and after[0] != ";"):
            break
        calls.append(call)
        content = rest = after[1:].lstrip()
    return content, calls


hermes_texts = text_of(
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL.replace('"f"', '"unknown"'),
    CALL.replace("}}", "}"),
    '{"name": "f", "arguments": {"x": "<tool_call>"}}',
    '{"name": "get_weather", "arguments": "{}"}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "\n",
    " ",
    "Hi",
    "<",
    "</tool",
)


@settings(max_examples=examples(400))
@given(hermes_texts, cuts)
@example('<tool_call>{"name": "f", "arguments": {}}<' + CALL, [])
def test_hermes_calls_come_out_as_from_the_whole_text(text: str, points: list[int]) -> None:
    found = hermes(text, points)
    assert (found.content, [(c.name, json.loads(c.arguments)) for c in found.calls]) == hermes_plainly(text)


@given(st.lists(st.sampled_from(["Hi", "a < b", "\n", "<tool_call>{]", "</tool_call>", CALL])), cuts)
def test_hermes_loses_nothing_but_calls_and_white_space(parts: list[str], points: list[int]) -> None:
    found = hermes("".join(parts), points)
    assert list(found.calls) == [F] * parts.count(CALL)
    assert re.sub(r"\s", "", found.content) == re.sub(r"\s", "", "".join(part for part in parts if part != CALL))


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        (CALL, "", 1),
        (f"\n\n{CALL}\n{CALL}\n", "", 2),
        (f"Let me see.\n\n{CALL}\n", "Let me see.", 1),
        (f"{CALL}\nThere.\n", "There.\n", 1),
        (f" A\n{CALL}\n{CALL} B ", " A\n B ", 2),
        ("  no call \n", "  no call \n", 0),
    ],
)
def test_white_space_next_to_calls_is_content_only_between_texts(text: str, content: str, num_calls: int) -> None:
    assert hermes(text) == Parsed(content, (F,) * num_calls)


@pytest.mark.parametrize(
    "block",
    [
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_ca',
        '<tool_call>{"name": "f", "arguments": {"a": 1}} \n x</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}</tool_call>",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        "<tool_call>f(a=1)</tool_call>",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_ca",
    ],
)
def test_a_hermes_block_that_is_no_call_is_content_verbatim(block: str) -> None:
    text = f" Hm:\n{block}"
    for pieces in ([text], list(text)):
        assert parsed(HermesParser(NAMES), pieces) == Parsed(text)


def test_a_broken_hermes_block_leaves_the_next_call_whole() -> None:
    for broken in ('<tool_call>{"name": "f, "arguments": {}}</tool_call>', '<tool_call>{"name": "f"', "<tool_call>"):
        assert hermes(f"{broken}\n{CALL}") == Parsed(broken, (F,))


def test_a_closing_tag_inside_an_argument_does_not_end_the_call() -> None:
    arguments = '{"text": "</tool_call> and \\"<tool_call>{"}'
    assert hermes(render_call("f", arguments)) == Parsed("", (ToolCall("f", arguments),))


@pytest.mark.parametrize(
    "arguments", ["{}", '{ "b" : 1.50,"a":[ true ] }', '{"a": "\\u00e9é"}', '{"n": ' + "9" * 5000 + "}"]
)
def test_arguments_keep_the_model_s_spelling(arguments: str) -> None:
    assert hermes(f'<tool_call>{{"arguments":{arguments} ,"id": 3, "name":"f"}}</tool_call>').calls == (
        ToolCall("f", arguments),
    )
    assert llama(f'{{"name": "f", "parameters": {arguments}}}').calls == (ToolCall("f", arguments),)


def test_arguments_may_be_an_object_inside_a_string() -> None:
    body = json.dumps({"name": "f", "arguments": ' {"a": "\\u00e9"} '})
    assert hermes(f"<tool_call>{body}</tool_call>").calls == (ToolCall("f", '{"a": "\\u00e9"}'),)
    assert llama(body).calls == (ToolCall("f", '{"a": "\\u00e9"}'),)


@given(st.lists(st.text("ab<>{ \n", max_size=6), max_size=8))
def test_plain_text_is_held_back_only_for_a_tag_or_white_space(pieces: list[str]) -> None:
    parser, shown, text = HermesParser(NAMES), "", ""
    for piece in pieces:
        text += piece
        shown += parser.push(piece).content
        assert shown == re.sub(r"\s*<?\Z", "", text)


def test_a_hermes_call_is_given_when_its_closing_tag_is() -> None:
    parser = HermesParser(NAMES)
    assert parser.push(CALL[:-1]) == Parsed()
    assert parser.push(CALL[-1:]) == Parsed("", (F,))


# Llama's


LLAMA_CALL = '{"name": "f", "parameters": {"a": 1}}'


@settings(max_examples=examples(400))
@given(
    text_of(
        LLAMA_CALL,
        '{"name": "get_weather", "arguments": {"city": "; <|python_tag|>"}}',
        '{"name": "unknown", "parameters": {}}',
        "<|python_tag|>",
        "<|python",
        ";",
        ";",
        "\n",
        " ",
        "{",
        "Hi",
        "<",
    ),
    cuts,
)
def test_llama_calls_come_out_as_from_the_whole_text(text: str, points: list[int]) -> None:
    found = llama(text, points)
    assert (found.content, [(c.name, json.loads(c.arguments)) for c in found.calls]) == llama_plainly(text)


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (LLAMA_CALL, 1),
        (f" \n{LLAMA_CALL}\n", 1),
        (f"<|python_tag|>{LLAMA_CALL}", 1),
        (f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL};\n", 2),
        (LLAMA_CALL.replace("parameters", "arguments"), 1),
    ],
)
def test_a_reply_that_is_llama_calls_as_a_whole_has_no_content(text: str, num_calls: int) -> None:
    assert llama(text) == Parsed("", (F,) * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        f"Sure: {LLAMA_CALL}",
        f"{LLAMA_CALL} is the call",
        LLAMA_CALL[:-1],
        " \n" + LLAMA_CALL.replace("f", "unknown", 1) + f"; {LLAMA_CALL}",
        '{"answer": 42}\n',
        "<|python_tag|>print(1)",
        "<|python_tag|>",
        "<|python",
        "<b>bold</b>",
        " \n",
    ],
)
def test_a_reply_that_is_not_llama_calls_is_content_verbatim(text: str) -> None:
    assert llama(text) == Parsed(text)


def test_what_is_no_call_after_a_llama_call_is_content() -> None:
    assert llama(f"{LLAMA_CALL}; {LLAMA_CALL[:-1]}\n") == Parsed(f"{LLAMA_CALL[:-1]}\n", (F,))


def test_llama_decides_on_plain_text_at_the_first_character() -> None:
    parser = LlamaParser(NAMES)
    assert [parser.push(piece).content for piece in (" \n", "H", "i ", "<", "{")] == ["", " \nH", "i ", "<", "{"]


def test_a_llama_call_is_given_when_a_separator_follows() -> None:
    parser = LlamaParser(NAMES)
    assert parser.push(LLAMA_CALL) == Parsed()
    assert parser.push(" ;") == Parsed("", (F,))


# Tools as text


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ '<|python_tag|>' + call }}", LlamaParser),
        ("""'Respond in the format {"name": function name, "parameters": dictionary of argument name}'""", LlamaParser),
        ("""<tool_call> {"name": ..., "arguments": ...} and "parameters": too""", HermesParser),
        ("{% if tool.parameters %}{{ tool['parameters'] }}{% endif %}", HermesParser),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", HermesParser),
    ],
)
def test_the_template_says_which_calls_to_expect(template: str, parser: type) -> None:
    assert type(parser_for(template, NAMES)) is parser


def test_the_chosen_parser_knows_the_names() -> None:
    assert parsed(parser_for("", ["f"]), [CALL]).calls == (F,)
    assert parsed(parser_for("", ["g"]), [CALL]) == Parsed(CALL)


def test_the_system_block_has_each_tool_on_a_line_and_says_how_to_call() -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "größe {0}\nsecond"}} for name in NAMES]
    lines = hermes_system_block(tools).splitlines()
    begin, end = lines.index("<tools>"), lines.index("</tools>")
    assert [json.loads(line) for line in lines[begin + 1 : end]] == tools
    assert "größe" in lines[begin + 1]
    assert lines[end + 3 :] == [
        "<tool_call>",
        '{"name": <function-name>, "arguments": <args-json-object>}',
        "</tool_call>",
    ]


def test_no_tools_make_no_system_block() -> None:
    assert hermes_system_block([]) == ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3), st.booleans(), cuts)
def test_a_rendered_call_is_read_back_as_it_was(
    name: str, arguments: dict[str, object], is_ascii: bool, points: list[int]
) -> None:
    spelled = json.dumps(arguments, ensure_ascii=is_ascii)
    found = in_every_cut(lambda: HermesParser([name]), render_call(name, spelled), points)
    assert found == Parsed("", (ToolCall(name, spelled),))


def test_arguments_that_are_no_object_are_rendered_as_a_string() -> None:
    assert json.loads(render_call("f", "[1").split("\n")[1]) == {"name": "f", "arguments": "[1"}
    assert json.loads(render_call("f", " ").split("\n")[1]) == {"name": "f", "arguments": {}}


def test_a_result_is_a_sentence_without_tags() -> None:
    assert render_result("21 °C") == "The result of the call is: 21 °C\n\nAnswer my question in one sentence."


# The whole reply


def read(make: Callable[[], ReplyReader], pieces: Sequence[str]) -> tuple[Delta, str | None]:
    reader = make()
    parts = [*map(reader.push, pieces), reader.finish()]
    whole = Delta(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
    )
    return whole, reader.stopped_by


def full() -> ReplyReader:
    return ReplyReader(["STOP", "\nUser:"], ReasoningSplit(), HermesParser(NAMES))


@settings(max_examples=examples(300))
@given(text_of("<think>", "</think>", CALL, CALL[:30], "STOP", "ST", "\nUs", "er:", "\n", " ", "Hi"), cuts)
def test_a_reply_is_the_plain_stages_in_a_row(text: str, points: list[int]) -> None:
    before, stop = stopped_plainly(["STOP", "\nUser:"], text)
    reasoning, content = split_plainly(before, starts_open=False)
    content, calls = hermes_plainly(content)
    for pieces in ways(text, points):
        assert read(full, pieces) == (Delta(content, reasoning, tuple(F for _ in calls)), stop)


def test_a_reply_has_its_reasoning_content_and_calls_apart() -> None:
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\nSTOP and more"
    assert read(full, list(text)) == (Delta("Let me see.", "hm", (F,)), "STOP")


def streamed(text: str, points: Sequence[int]) -> tuple[list[tuple[str, str]], AssistantReply, int]:
    """What is sent of a reply in these batches, neighbours of one kind joined; and in how many pieces."""
    tokenizer = default_tokenizer()
    tokens = [Sampled(token=id, logprob=0.0, sampling_logprob=0.0) for id in tokenizer.encode(text)]
    ends = sorted({0, len(tokens), *(point % (len(tokens) + 1) for point in points)})
    batches: list[list[Event]] = [[*tokens[first:end]] for first, end in pairwise(ends)]
    batches[-1].append(done())
    reply, sent, num = AssistantReply(tokenizer, full()), list[tuple[str, str]](), 0
    for batch in batches:
        pieces = list(reply.take(batch))
        num += len(pieces)
        for piece in pieces:
            calls = "".join(call["function"]["name"] for call in piece.calls)
            parts = [("content", piece.content), ("reasoning", piece.reasoning), ("calls", calls)]
            for kind, part in filter(itemgetter(1), parts):
                before = sent.pop()[1] if sent and sent[-1][0] == kind else ""
                sent.append((kind, before + part))
        if reply.is_stopped:
            break
    return sent, reply, num


@cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(open_model(DEFAULT_MODEL))


def done() -> Done:
    counts = {"history_length": 9, "num_dropped": 0, "prefill_tokens": 1, "prefill_duration_s": 0.0}
    return Done(stop_reason=StopReason.EOS, num_generated=9, total_duration_s=0.0, seed=1, **counts)


MIXED = f"<think>\nhm, well\n</think>\n\nLet me see.\n{CALL}\nAnd then\n{CALL}\nagain. STOP and more"


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 100), max_size=40))
@example([])
def test_a_reply_is_the_same_in_any_batches_and_its_parts_stay_in_order(points: list[int]) -> None:
    one_by_one, plain, _ = streamed(MIXED, range(100))
    sent, reply, _ = streamed(MIXED, points)
    assert sent == one_by_one
    assert [kind for kind, _ in sent] == ["reasoning", "content", "calls", "content", "calls", "content"]
    assert (reply.tokens, reply.num_reasoning, reply.stop_reason) == (plain.tokens, plain.num_reasoning, None)


def test_a_batch_of_one_kind_is_one_piece() -> None:
    _, reply, num = streamed("A reply without anything else in it.", [])
    assert len(reply.tokens) > 5
    assert num == 1
    assert reply.stop_reason is StopReason.EOS


def test_a_stop_string_inside_a_call_leaves_the_call_as_content() -> None:
    assert read(lambda: ReplyReader(["}}"], None, HermesParser(NAMES)), [CALL]) == (
        Delta(CALL.partition("}}")[0]),
        "}}",
    )


def test_a_call_whose_end_was_held_for_a_stop_string_comes_at_the_finish() -> None:
    reader = ReplyReader([">!"], None, HermesParser(NAMES))
    assert not reader.push(CALL)
    assert reader.finish() == Delta(calls=(F,))


@given(st.lists(st.text()))
def test_with_nothing_asked_for_text_passes_untouched_and_at_once(pieces: list[str]) -> None:
    reader = ReplyReader((), None, None)
    assert [reader.push(piece) for piece in pieces] == [Delta(piece) for piece in pieces]
    assert reader.finish() == Delta()
    assert reader.stopped_by is None


def test_a_delta_is_true_when_it_has_something() -> None:
    assert not Delta()
    assert Delta("a")
    assert Delta(reasoning="a")
    assert Delta(calls=(F,))


# Work


def seconds(make: Callable[[], StopStrings | ReplyReader], start: str, piece: str, num: int) -> float:
    """The CPU time for `start` and then `num` times `piece`."""

    def once() -> float:
        reader = make()
        reader.push(start)
        begin = time.process_time()
        for _ in range(num):
            reader.push(piece)
        reader.finish()
        return time.process_time() - begin

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    ("make", "start", "char"),
    [
        pytest.param(lambda: StopStrings([f"{'a' * 300}{i}" for i in range(16)]), "", "a", id="stop-almost"),
        pytest.param(lambda: StopStrings([f"{'a' * 300}{i}" for i in range(16)]), "", "b", id="stop-never"),
        pytest.param(lambda: ReplyReader((), ReasoningSplit()), "", "\n", id="blank-start"),
        pytest.param(lambda: ReplyReader((), ReasoningSplit()), "<think>a", "\n", id="blank-reasoning"),
        pytest.param(lambda: ReplyReader((), None, HermesParser(NAMES)), "a", "\n", id="blank-content"),
        pytest.param(lambda: ReplyReader((), None, HermesParser(NAMES)), "", "<", id="tag-almost"),
        pytest.param(lambda: ReplyReader((), None, HermesParser(NAMES)), '<tool_call>{"', "a", id="long-argument"),
        pytest.param(lambda: ReplyReader((), None, HermesParser(NAMES)), "<tool_call>{", "{", id="deep-argument"),
        pytest.param(lambda: ReplyReader((), None, HermesParser(NAMES)), CALL[:-12], "\n", id="blank-after-object"),
        pytest.param(lambda: ReplyReader((), None, LlamaParser(NAMES)), '{"', "a", id="llama-long"),
        pytest.param(lambda: ReplyReader((), None, LlamaParser(NAMES)), LLAMA_CALL, " ", id="llama-blank"),
    ],
)
def test_work_is_linear_in_the_text(make: Callable[[], ReplyReader], start: str, char: str) -> None:
    # Ten times the text: linear work takes 10 times as long; rescanning or recopying it takes towards 100.
    assert seconds(make, start, char * 100, 10_000) < 30 * seconds(make, start, char * 100, 1_000) + 0.05


def test_work_a_piece_does_not_grow_with_what_is_held_for_a_stop_string() -> None:
    short, long = (seconds(lambda size=size: StopStrings(["a" * size + "b"]), "", "a", 5_000) for size in (20, 2_000))
    assert long < 15 * short + 0.05

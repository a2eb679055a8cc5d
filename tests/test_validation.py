"""A reply is recorded only if it is exactly right; whatever else comes is refused, and nothing else is raised."""

import base64
import copy
import io
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.backends.sglang import SGLangReader
from holdfast.backends.validation import MAX_DEPTH, Asked, CheckedReply, check_sglang, check_vllm
from holdfast.backends.vllm import VLLMReader
from holdfast.errors import UpstreamAborted, UpstreamError, UpstreamInvalid
from holdfast.sessions.record import place_of, without
from tests.effort import examples

VOCABULARY = 100
PROMPT = [3, 1, 4]
SGLANG: dict[str, Any] = {
    "id": "chat-1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße", "tool_calls": None},
            "finish_reason": "stop",
            "meta_info": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "weight_version": "v7",
                "output_token_logprobs": [[-0.5, 17, "G"], [0.0, 99, None]],
            },
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
VLLM: dict[str, Any] = {
    "id": "chat-1",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "reasoning": "so"},
            "finish_reason": "length",
            "token_ids": [17, 99],
            "logprobs": {
                "content": [{"token": "token_id:17", "logprob": -0.5}, {"token": "token_id:99", "logprob": -1}]
            },
        }
    ],
    "prompt_token_ids": PROMPT,
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}

Json = dict[str, Any]
Path = tuple[str | int, ...]

CHOICE: Path = ("choices", 0)
MESSAGE: Path = (*CHOICE, "message")
META: Path = (*CHOICE, "meta_info")
ENTRIES: Path = (*META, "output_token_logprobs")
CONTENT: Path = (*CHOICE, "logprobs", "content")
DELETE = object()


def asked_for(payloads: Iterable[str] = (), **options: Any) -> Asked:
    return Asked(input_ids=PROMPT, vocab_size=VOCABULARY, payloads=dict.fromkeys(payloads, 0), **options)


def sglang(reply: Any, asked: Iterable[str] = (), **options: Any) -> CheckedReply:
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return check_sglang(body, asked_for(asked, **options))


def vllm(reply: Any, asked: Iterable[str] = (), **options: Any) -> CheckedReply:
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return check_vllm(body, asked_for(asked, **options))


def changed(reply: Json, path: Path, value: Any) -> Json:
    result = copy.deepcopy(reply)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    if value is DELETE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def test_a_right_sglang_reply_is_read() -> None:
    done = sglang(SGLANG).completion
    assert done.token_ids == (17, 99)
    assert done.logprobs == (-0.5, 0.0)
    assert done.message == {"role": "assistant", "content": "Grüße", "tool_calls": None}
    assert (done.finish_reason, done.prompt_tokens, done.completion_tokens) == ("stop", 3, 2)
    assert done.weight_version == "v7"
    assert done.routed_experts is None


def test_a_right_vllm_reply_is_read_and_null_content_is_stored_as_empty() -> None:
    done = vllm(VLLM).completion
    assert done.token_ids == (17, 99)
    assert done.logprobs == (-0.5, -1.0)
    assert done.message == {"role": "assistant", "content": "", "reasoning": "so"}
    assert (done.prompt_tokens, done.completion_tokens) == (3, 2)


def test_entries_may_have_two_parts_or_three() -> None:
    reply = changed(SGLANG, ENTRIES, [[-0.5, 17], [-1, 99, "x"]])
    assert sglang(reply).completion.logprobs == (-0.5, -1.0)


def test_a_logprob_may_exceed_zero_by_rounding_only() -> None:
    assert sglang(changed(SGLANG, (*ENTRIES, 0, 0), 3e-6)).completion.logprobs[0] == 3e-6
    with pytest.raises(UpstreamInvalid):
        sglang(changed(SGLANG, (*ENTRIES, 0, 0), 0.01))


BAD_TOKENS = [True, 1.0, "1", None, -1, VOCABULARY, 2**70, [1], {}]
BAD_LOGPROBS = [True, "-1", None, float("nan"), float("inf"), float("-inf"), 0.5, [], {}]
COMMON: list[tuple[Path, Any]] = [
    (("choices",), DELETE),
    (("choices",), None),
    (("choices",), []),
    (("choices",), {}),
    (("choices",), "one"),
    (("choices", 0), None),
    (MESSAGE, DELETE),
    *((MESSAGE, value) for value in (None, [], "hi", 1)),
    ((*MESSAGE, "role"), DELETE),
    *(((*MESSAGE, "role"), value) for value in (None, "user", 1, [])),
    *(((*MESSAGE, "content"), value) for value in (1, True, [], {}, ["a"])),
    *(((*MESSAGE, "tool_calls"), value) for value in (1, "x", {}, [1])),
    ((*CHOICE, "finish_reason"), DELETE),
    *(((*CHOICE, "finish_reason"), value) for value in (None, 1, {}, [])),
]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *COMMON,
        (META, DELETE),
        *((META, value) for value in (None, [], "x", 3)),
        (ENTRIES, DELETE),
        *((ENTRIES, value) for value in (None, {}, "x", 3)),
        *(((*ENTRIES, 0), value) for value in ([], [-0.5], None, 17, {}, "ab")),
        *(((*ENTRIES, 1, 1), value) for value in BAD_TOKENS),
        *(((*ENTRIES, 1, 0), value) for value in BAD_LOGPROBS),
        ((*META, "completion_tokens"), DELETE),
        *(((*META, "completion_tokens"), value) for value in (True, None, "2", 2.0, 1, 3, -1)),
    ],
)
def test_a_malformed_sglang_reply_is_refused(path: Path, value: Any) -> None:
    with pytest.raises(UpstreamInvalid):
        sglang(changed(SGLANG, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *COMMON,
        *((("prompt_token_ids",), value) for value in (DELETE, None, [3, 1], [3, 1, 5], [3, 1, True], "314")),
        *(((*CHOICE, "token_ids"), value) for value in (DELETE, None, [17], [17, 99, 1], [17, 98])),
        *(((*CHOICE, "token_ids", 1), value) for value in BAD_TOKENS),
        *(((*CONTENT, 1, "logprob"), value) for value in [*BAD_LOGPROBS, DELETE]),
        *(((*CONTENT, 1, "token"), value) for value in (DELETE, "token_id:98", "x", 99, "token_id:099")),
        *(((*CHOICE, "logprobs"), value) for value in (DELETE, None, {}, {"content": None}, {"content": []})),
        *((("usage",), value) for value in (DELETE, None, {}, {"completion_tokens": True})),
        *((("usage", "completion_tokens"), value) for value in (DELETE, 1, 3, 2.0, None)),
    ],
)
def test_a_malformed_vllm_reply_is_refused(path: Path, value: Any) -> None:
    with pytest.raises(UpstreamInvalid):
        vllm(changed(VLLM, path, value))


@pytest.mark.parametrize("check", [sglang, vllm])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{} {}",
        b'{"choices": NaN}',
        b"\xef\xbb\xbf{}",
        b"data: [DONE]",
        b"\x00" * 10,
        b"<html></html>",
    ],
)
def test_what_is_no_json_object_is_refused(check: Callable[[bytes], CheckedReply], body: bytes) -> None:
    with pytest.raises(UpstreamInvalid):
        check(body)


@pytest.mark.parametrize(("check", "reply"), [(sglang, SGLANG), (vllm, VLLM)])
class TestBothFormats:
    def test_two_choices_are_refused(self, check: Any, reply: Json) -> None:
        with pytest.raises(UpstreamInvalid, match="2 choices"):
            check(changed(reply, ("choices",), reply["choices"] * 2))

    def test_an_abort_is_told_apart_even_where_the_rest_is_missing(self, check: Any, reply: Json) -> None:
        with pytest.raises(UpstreamAborted) as caught:
            check(changed(reply, (*CHOICE, "finish_reason"), "abort"))
        assert caught.value.retry_after_s
        with pytest.raises(UpstreamAborted):
            check({"choices": [{"finish_reason": "abort", "message": None}]})

    def test_bytes_that_are_no_text_are_refused_wherever_they_stand(self, check: Any, reply: Json) -> None:
        body = json.dumps(changed(reply, ("unread",), "MARK")).encode()
        assert check(body)
        with pytest.raises(UpstreamInvalid, match="not JSON"):
            check(body.replace(b"MARK", b"\xff\xfe"))

    def test_bare_constants_are_refused_wherever_they_stand(self, check: Any, reply: Json) -> None:
        for constant in (b"NaN", b"Infinity", b"-Infinity"):
            with pytest.raises(UpstreamInvalid):
                check(json.dumps(changed(reply, ("unread",), "MARK")).encode().replace(b'"MARK"', constant))

    @pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 5000, 200_000])
    @pytest.mark.parametrize("place", [("unread",), (*MESSAGE, "unread")])
    def test_deep_nesting_is_refused_wherever_it_stands(self, check: Any, reply: Json, depth: int, place: Path) -> None:
        body = json.dumps(changed(reply, place, "MARK")).encode()
        with pytest.raises(UpstreamInvalid, match="nested too deeply"):
            check(body.replace(b'"MARK"', b"[" * depth + b"]" * depth))

    def test_brackets_in_text_are_no_nesting(self, check: Any, reply: Json) -> None:
        assert check(changed(reply, ("unread",), '"\\"[{' * 1000))

    def test_wide_is_not_deep(self, check: Any, reply: Json) -> None:
        assert check(changed(reply, ("unread",), [[[i]] for i in range(1000)]))


PAYLOAD_NAMES = ("routed_experts", "indexer_topk")
THREE_ROWS = base64.b64encode(bytes(3 * 4))  # one int32 each
FOUR_ROWS = base64.b64encode(bytes(4 * 4)).decode()


def said(body: bytes, place: Any) -> Any:
    """What stands at a place."""
    return None if place is None else json.loads(body[slice(*place)])


def test_only_the_payloads_that_we_asked_for_are_cut_and_every_other_byte_stays() -> None:
    before = b'{ "choices":[{"message":{"role":"assistant","content":"\\"routed_experts\\": 1 \xc3\xa9",'
    before += b'"routed_experts":"AA=="},'
    rest = b'"finish_reason":"stop","meta_info":{"completion_tokens":1 ,"output_token_logprobs":[[-1, 5]]'
    payload = b'\n, "routed_experts" :\t"' + THREE_ROWS + b'"'
    after = b' , "x": 1.50 }}], "sglext": {'
    extension = b'"routed_experts":"' + THREE_ROWS + b'" ,'
    end = b' "cached":null}, "big": 1e5}\n'
    body = before + rest + payload + after + extension + end
    checked = sglang(body, asked={"routed_experts"})
    assert checked.body == before + rest + b"\n" + after + end
    assert said(body, checked.completion.routed_experts) == THREE_ROWS.decode()
    assert without(body, checked.completion.cut) == checked.body
    kept = sglang(body, asked={"routed_experts"}, keep_payloads=True)
    assert (kept.body is body, kept.completion.cut) == (True, ())
    assert sglang(body).body is body
    assert sglang(body).completion.routed_experts is None


def test_a_value_that_is_no_view_into_the_body_has_no_place_in_it() -> None:
    body = b'{"a": [1, 2], "b": [1, 2]}'
    values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert [place_of(values[name], body) for name in "ab"] == [(6, 12), (19, 25)]
    for value, other in ((msgspec.Raw(b"[1, 2]"), body), (values["a"], bytes(bytearray(body))), (values["a"], b"[")):
        with pytest.raises(RuntimeError, match="not a view into the body"):
            place_of(value, other)


def test_a_payload_may_be_a_list() -> None:
    body = json.dumps(changed(SGLANG, (*META, "indexer_topk"), [[1, 2]] * 4)).encode()
    checked = sglang(body, asked=["indexer_topk"])
    assert said(body, checked.completion.indexer_topk) == [[1, 2]] * 4
    assert checked.body == json.dumps(SGLANG).encode()


@pytest.mark.parametrize("payload", [1, True, {}, 1.5])
def test_a_payload_that_is_neither_text_nor_list_is_refused(payload: Any) -> None:
    with pytest.raises(UpstreamInvalid, match="must be a string or a list"):
        sglang(changed(SGLANG, (*META, "routed_experts"), payload), asked=["routed_experts"])


def test_vllms_routed_experts_are_cut_too() -> None:
    body = json.dumps(changed(VLLM, (*CHOICE, "routed_experts"), FOUR_ROWS)).encode()
    checked = vllm(body, asked=["routed_experts"])
    assert said(body, checked.completion.routed_experts) == FOUR_ROWS
    assert checked.body == json.dumps(VLLM).encode()


spaces = st.text(" \t\r\n", max_size=3)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
payloads = st.just("AAAA" * 4) | st.integers(1, 3).map(lambda width: [list(range(width))] * 3)


@st.composite
def spelled(draw: st.DrawFn, members: list[tuple[str, str]]) -> str:
    """An object of these members, spelled with any white space that JSON allows."""
    space = lambda: draw(spaces)  # noqa: E731
    parts = [f"{space()}{json.dumps(name)}{space()}:{space()}{value}{space()}" for name, value in members]
    return "{" + ",".join(parts) + "}" if parts else "{" + space() + "}"


@given(st.data())
@settings(max_examples=examples(100))
def test_cutting_equals_parsing_without_the_members(data: st.DataObject) -> None:
    meta = [("completion_tokens", "1"), ("output_token_logprobs", "[[-1,5]]")]
    wanted = {name: data.draw(payloads) for name in data.draw(st.sets(st.sampled_from(PAYLOAD_NAMES)))}
    extra = [(name, json.dumps(value, ensure_ascii=data.draw(st.booleans()))) for name, value in wanted.items()]
    members = data.draw(st.permutations(meta + extra))
    message = '{"role":"assistant","content":' + json.dumps(data.draw(texts)) + ',"routed_experts":[1]}'
    choice = [("message", message), ("finish_reason", '"stop"'), ("meta_info", data.draw(spelled(members)))]
    sglext = [*data.draw(st.permutations(extra)), *data.draw(st.sampled_from([[], [("other", "[]")]]))]
    top = [("choices", f"[{data.draw(spelled(data.draw(st.permutations(choice))))}]")]
    top += [("sglext", data.draw(spelled(sglext)))]
    body = data.draw(spelled(data.draw(st.permutations(top)))).encode()

    checked = sglang(body, asked=wanted)
    expected = json.loads(body)
    for place in (expected["choices"][0]["meta_info"], expected["sglext"]):
        for name in wanted:
            place.pop(name, None)
    assert json.loads(checked.body) == expected
    assert without(body, checked.completion.cut) == checked.body
    for name, value in wanted.items():
        assert said(body, getattr(checked.completion, name)) == value


def paths(value: Any, here: Path = ()) -> list[Path]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, part in inner for path in paths(part, (*here, key)))]


@given(st.data())
@settings(max_examples=examples(500))
def test_anything_but_a_right_reply_is_refused_and_nothing_else_is_raised(data: st.DataObject) -> None:
    check, reply = data.draw(st.sampled_from([(sglang, SGLANG), (vllm, VLLM)]))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(reply)))
        if not path:
            reply = data.draw(values)
            break
        reply = changed(reply, path, data.draw(st.just(DELETE) | values))
    asked = data.draw(st.sets(st.sampled_from(PAYLOAD_NAMES)))
    must_hold(lambda: check(reply, asked=asked))


@given(st.data())
@settings(max_examples=examples(500))
def test_damaged_bytes_are_refused_and_nothing_else_is_raised(data: st.DataObject) -> None:
    check, reply = data.draw(st.sampled_from([(sglang, SGLANG), (vllm, VLLM)]))
    body = json.dumps(reply, ensure_ascii=False).encode()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body = body[:at] + data.draw(st.binary(max_size=4)) + body[at + data.draw(st.integers(0, 4)) :]
    must_hold(lambda: check(body, asked=PAYLOAD_NAMES))


@pytest.mark.slow
def test_a_hundred_thousand_random_replies_are_refused_or_right() -> None:
    source = random.Random(5)
    wrong = [None, True, 0, 1, -1, 2.5, "", "x", "abort", [], {}, [[]], float("nan"), float("inf"), 2**80, DELETE]
    for _ in range(100_000):
        check, reply = source.choice([(sglang, SGLANG), (vllm, VLLM)])
        for _ in range(source.randint(1, 2)):
            reply = changed(reply, source.choice(paths(reply)[1:]), source.choice(wrong))
        body = bytearray(json.dumps(reply).encode())
        if source.random() < 0.3:
            body[source.randrange(len(body))] = source.randrange(256)
        must_hold(lambda: check(bytes(body), asked=PAYLOAD_NAMES))  # noqa: B023


def must_hold(check: Callable[[], CheckedReply]) -> None:
    """Refused in our own words, or right in every respect."""
    try:
        done = check().completion
    except UpstreamError:
        return
    assert len(done.token_ids) == len(done.logprobs) == done.completion_tokens
    assert all(type(token) is int and 0 <= token < VOCABULARY for token in done.token_ids)
    assert all(type(logprob) is float and -1e308 < logprob < 0.001 for logprob in done.logprobs)
    assert done.message["role"] == "assistant"
    assert isinstance(done.message["content"], str)
    assert isinstance(done.finish_reason, str)
    json.dumps(done.message, allow_nan=False).encode()


EVENT = {"meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 5, "x"]], "finish_reason": None}}
GENERATE = {
    "prompt_token_ids": PROMPT,
    "choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}],
}
COMPLETION = {
    "choices": [
        {
            "prompt_token_ids": PROMPT,
            "token_ids": [5],
            "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}]},
        }
    ],
    "usage": {"completion_tokens": 1},
}


def reader(kind: str) -> Any:
    if kind == "sglang":
        return SGLangReader(vocab_size=VOCABULARY, prompt=PROMPT, num_top=2)
    return VLLMReader(vocab_size=VOCABULARY, prompt=PROMPT, num_top=2, has_generate=kind == "generate")


@given(st.data())
@settings(max_examples=examples(300))
def test_a_damaged_event_is_refused_and_nothing_else_is_raised(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["sglang", "generate", "completion"]))
    event = {"sglang": EVENT, "generate": GENERATE, "completion": COMPLETION}[kind]
    assert [sampled.token for sampled in reader(kind).read(json.dumps(event).encode()).sampled] == [5]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(event)))
        if path:
            event = changed(event, path, data.draw(st.just(DELETE) | values))
    try:
        piece = reader(kind).read(json.dumps(event).encode())
    except UpstreamError:
        return
    for sampled in piece.sampled:
        assert type(sampled.token) is int
        assert 0 <= sampled.token < VOCABULARY
        assert -1e308 < sampled.logprob < 0.001
        for token, logprob in sampled.top:
            assert 0 <= token < VOCABULARY
            assert -1e308 < logprob < 0.001
    assert 0 <= piece.num_cached <= len(PROMPT)


@pytest.mark.parametrize("count", [-1, 4, 2**63])
def test_more_cached_tokens_than_the_prompt_has_are_refused(count: int) -> None:
    event = {**EVENT, "meta_info": {**EVENT["meta_info"], "cached_tokens": count}}
    with pytest.raises(UpstreamInvalid, match="cached tokens of a prompt of 3"):
        reader("sglang").read(json.dumps(event).encode())
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": count}}
    with pytest.raises(UpstreamInvalid, match="cached tokens of a prompt of 3"):
        reader("generate").read(json.dumps({**GENERATE, "usage": usage}).encode())


@pytest.mark.parametrize("top", [[-0.5, 100], [-0.5, -1], [-0.5, 2**40], [2.0, 5]])
def test_likeliest_tokens_that_are_none_are_refused(top: list[Any]) -> None:
    event = {**EVENT, "meta_info": {**EVENT["meta_info"], "output_top_logprobs": [[top]]}}
    with pytest.raises(UpstreamInvalid):
        reader("sglang").read(json.dumps(event).encode())


def test_a_stream_that_takes_back_a_token_is_refused() -> None:
    follow = reader("sglang")
    follow.read(json.dumps(EVENT).encode())
    entries = [[-1.0, 6, "y"], [-1.0, 7, "z"]]
    with pytest.raises(UpstreamInvalid, match="already streamed"):
        follow.read(json.dumps({"meta_info": {"completion_tokens": 2, "output_token_logprobs": entries}}).encode())


@pytest.mark.parametrize("told", [{"completion_tokens": 3}, {"completion_tokens": 0}, {"prompt_tokens": 2}])
def test_a_stream_whose_counts_disagree_is_refused(told: Json) -> None:
    with pytest.raises(UpstreamInvalid):
        reader("sglang").read(json.dumps({"meta_info": EVENT["meta_info"] | told}).encode())


def test_a_stream_from_another_prompt_is_refused() -> None:
    with pytest.raises(UpstreamInvalid, match="not the ones that were sent"):
        reader("generate").read(json.dumps(GENERATE | {"prompt_token_ids": [3, 1]}).encode())


# What a reply says about its prompt, its end and its length


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*META, "prompt_tokens"), 1),
        ((*META, "prompt_tokens"), 4),
        ((*META, "prompt_tokens"), "3"),
        (("usage", "prompt_tokens"), 1),
        (("usage", "completion_tokens"), 3),
        (("prompt_token_ids",), [3, 1]),
        ((*CHOICE, "prompt_token_ids"), [3, 1, 5]),
        ((*CHOICE, "token_ids"), [17, 98]),
    ],
)
def test_an_sglang_reply_to_another_prompt_or_of_other_tokens_is_refused(path: Path, value: Any) -> None:
    with pytest.raises(UpstreamInvalid):
        sglang(changed(SGLANG, path, value))


@pytest.mark.parametrize("path", [("usage", "prompt_tokens"), (*CHOICE, "prompt_token_ids")])
def test_a_vllm_reply_whose_usage_or_choice_tells_of_another_prompt_is_refused(path: Path) -> None:
    with pytest.raises(UpstreamInvalid):
        vllm(changed(VLLM, path, [3, 1] if path[-1] == "prompt_token_ids" else 2))


def test_what_a_reply_does_not_say_about_its_prompt_is_not_asked() -> None:
    silent = changed(changed(SGLANG, (*META, "prompt_tokens"), DELETE), ("usage",), DELETE)
    assert sglang(silent).completion.token_ids == (17, 99)
    assert sglang(changed(SGLANG, (*CHOICE, "prompt_token_ids"), PROMPT)).completion.token_ids == (17, 99)


@pytest.mark.parametrize("content", ["hello", "", None])
def test_a_reply_without_tokens_is_refused(content: str | None) -> None:
    empty = changed(changed(SGLANG, ENTRIES, []), (*META, "completion_tokens"), 0)
    with pytest.raises(UpstreamInvalid, match="no tokens"):
        sglang(changed(changed(empty, ("usage",), DELETE), (*MESSAGE, "content"), content))
    none = changed(changed(VLLM, (*CHOICE, "token_ids"), []), CONTENT, [])
    with pytest.raises(UpstreamInvalid, match="no tokens"):
        vllm(changed(changed(none, ("usage", "completion_tokens"), 0), (*MESSAGE, "content"), content))


@pytest.mark.parametrize("reason", ["", "error", "content_filter", "STOP", "anything"])
def test_an_unknown_finish_reason_is_refused(reason: str) -> None:
    for check, reply in ((sglang, SGLANG), (vllm, VLLM)):
        with pytest.raises(UpstreamInvalid, match="finish_reason"):
            check(changed(reply, (*CHOICE, "finish_reason"), reason))
    with pytest.raises(UpstreamInvalid, match="finish_reason"):
        sglang(changed(SGLANG, (*META, "finish_reason"), {"type": reason}))


@pytest.mark.parametrize(
    ("choice", "meta", "error"),
    [
        ("stop", "stop", None),
        ("tool_calls", "stop", None),
        ("tool_calls", "tool_calls", None),
        ("length", "length", None),
        ("stop", "length", UpstreamInvalid),
        ("length", "stop", UpstreamInvalid),
        ("stop", "abort", UpstreamAborted),
    ],
)
def test_both_finish_reasons_of_a_reply_must_agree(choice: str, meta: str, error: type[UpstreamError] | None) -> None:
    reply = changed(SGLANG, (*META, "finish_reason"), {"type": meta, "matched": 2})
    reply = changed(reply, (*CHOICE, "finish_reason"), choice)
    if error is None:
        assert sglang(reply).completion.finish_reason == choice
        return
    with pytest.raises(error):
        sglang(reply)


def test_more_tokens_than_were_requested_are_refused() -> None:
    for check, reply in ((sglang, SGLANG), (vllm, VLLM)):
        assert check(reply, max_tokens=2)
        with pytest.raises(UpstreamInvalid, match="at most 1"):
            check(reply, max_tokens=1)


@pytest.mark.parametrize("number", [b"1e999", b"-1E+400", b"9" * 5000, b"9" * 310 + b".5"])
def test_a_number_that_nobody_can_read_is_refused_wherever_it_is(number: bytes) -> None:
    for check, reply in ((sglang, SGLANG), (vllm, VLLM)):
        body = json.dumps(changed(reply, ("unread",), "MARK")).encode()
        assert check(body.replace(b"MARK", number))  # in a string it is text
        assert check(body.replace(b'"MARK"', b"1e99"))
        with pytest.raises(UpstreamInvalid):
            check(body.replace(b'"MARK"', number))


# Training payloads on arrival: 3 given and 2 sampled tokens make 4 rows


def npy(rows: Any) -> str:
    file = io.BytesIO()
    np.save(file, np.asarray(rows))
    return base64.b64encode(file.getvalue()).decode()


def int32(num_values: int) -> str:
    return base64.b64encode(bytes(4 * num_values)).decode()


BAD_PAYLOADS: dict[str, Any] = {
    "missing": DELETE,
    "null": None,
    "not base64": "????",
    "cut base64": int32(8)[:-3],
    "half a number": base64.b64encode(bytes(18)).decode(),
    "empty": "",
    "an empty list": [],
    "rows of nothing": [[], [], [], []],
    "too few values": int32(7),
    "too few rows": [[1, 2]] * 3,
    "too many rows": [[1, 2]] * 5,
    "ragged": [[1], [2, 3], [4], [5]],
    "floats": [[0.5]] * 4,
    "text": [["a"]] * 4,
    "beyond 32 bits": [[2**40]] * 4,
    "a .npy file of floats": npy([[0.5]] * 4),
    "a .npy file of 3 rows": npy([[1]] * 3),
    "a .npy file of a number": npy(7),
    "a cut .npy file": npy([[1]] * 4)[:-8],
    "a .npy file of terabytes": base64.b64encode(
        b"\x93NUMPY\x01\x00\x76\x00"
        + b"{'descr': '<i8', 'fortran_order': False, 'shape': (4, 99999999999999), }".ljust(118)
    ).decode(),
}


@pytest.mark.parametrize("name", BAD_PAYLOADS)
def test_a_payload_that_does_not_fit_the_tokens_is_refused(name: str) -> None:
    payload = BAD_PAYLOADS[name]
    here = {"routed_experts": "x"}
    for check, reply, place in ((sglang, SGLANG, META), (vllm, VLLM, CHOICE)):
        whole = changed(reply, place, reply["choices"][0].get("meta_info", reply["choices"][0]) | here)
        whole = changed(whole, (*place, "routed_experts"), payload)
        with pytest.raises(UpstreamInvalid, match="routed_experts"):
            check(whole, asked=["routed_experts"])
        assert check(whole)  # what nobody asked for is not ours to judge


@pytest.mark.parametrize(
    "payload", [int32(4), int32(24), [[1, 2]] * 4, [[[1], [2]]] * 4, npy(np.zeros((4, 2, 3), "u1"))]
)
def test_a_payload_that_fits_is_taken_in_any_spelling(payload: Any) -> None:
    body = json.dumps(changed(SGLANG, (*META, "routed_experts"), payload)).encode()
    assert said(body, sglang(body, asked=["routed_experts"]).completion.routed_experts) == payload
    escaped = body.replace(b"AA", b"\\u0041A", 1)
    assert said(escaped, sglang(escaped, asked=["routed_experts"]).completion.routed_experts) == payload


def test_a_payload_may_leave_out_the_rows_that_are_on_record() -> None:
    def check(num_known: int, payload: Any, row_shape: tuple[int, ...]) -> None:
        asked = Asked(
            input_ids=PROMPT,
            vocab_size=VOCABULARY,
            payloads={"routed_experts": num_known},
            row_shapes={"routed_experts": row_shape},
        )
        check_sglang(json.dumps(changed(SGLANG, (*META, "routed_experts"), payload)).encode(), asked)

    for payload in (int32(4), int32(8), [[1, 2]] * 2, [[1, 2]] * 4):
        check(2, payload, (2,))
    check(2, int32(12), (3, 2))
    for payload in (int32(2), int32(5), int32(6), int32(10), [[1, 2]], [[1, 2]] * 3, [[1, 2, 3]] * 4):
        with pytest.raises(UpstreamInvalid, match="rows of shape"):
            check(2, payload, (2,))


@pytest.mark.parametrize("kind", ["sglang", "generate", "completion"])
@pytest.mark.parametrize("reason", ["", "error", "anything"])
def test_a_stream_with_an_unknown_finish_reason_is_refused(kind: str, reason: str) -> None:
    event = {"sglang": EVENT, "generate": GENERATE, "completion": COMPLETION}[kind]
    path, value = ((("meta_info", "finish_reason"), {"type": reason}), ((*CHOICE, "finish_reason"), reason))[
        kind != "sglang"
    ]
    with pytest.raises(UpstreamInvalid, match="finish_reason"):
        reader(kind).read(json.dumps(changed(event, path, value)).encode())


@pytest.mark.parametrize("kind", ["generate", "completion"])
def test_a_stream_whose_usage_or_later_events_tell_of_another_prompt_is_refused(kind: str) -> None:
    event = {"generate": GENERATE, "completion": COMPLETION}[kind]
    for later in ({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}, _other_prompt(event)):
        follow = reader(kind)
        follow.read(json.dumps(event).encode())
        with pytest.raises(UpstreamInvalid, match="sent"):
            follow.read(json.dumps(later).encode())


def _other_prompt(event: Json) -> Json:
    return changed(event, (*CHOICE, "prompt_token_ids"), [9, 9, 9])

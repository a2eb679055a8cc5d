"""A reply is recorded only if it is exactly right; whatever else comes is refused, and nothing else is raised."""

import base64
import copy
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
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

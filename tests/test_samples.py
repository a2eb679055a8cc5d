"""Samples against the plain truth: every token looked up in its turn, one by one."""

import base64
import contextlib
import doctest
import io
import itertools
import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.chats.samples import assembly as assembling
from holdfast.chats.samples import formats
from holdfast.chats.samples.assembly import Options, SessionFacts, assemble, from_spans
from holdfast.chats.samples.certificate import certify, problems
from holdfast.chats.samples.formats import Format, decode, encode, read_format
from holdfast.chats.samples.sample import EmptyReason, Export, Masked, Sample, Status, prefix_cache_info, spec_info
from holdfast.chats.tree import Node, Tree
from holdfast.cli import main
from holdfast.errors import InvalidArgument, SamplesUnusable, Unimplemented
from holdfast.generation import Sampled, StopReason
from holdfast.sessions.history import History
from holdfast.sessions.record import Recalled, TemplateInputs, TurnFacts
from tests.effort import examples

GOLDEN = Path(__file__).parent / "golden" / "samples.safetensors"
SESSION = SessionFacts(
    session_id="5e5510", group="g", label="l", metadata={"task": "ünïcode", "n": 1}, summary={"max_trim_tokens": 0}
)


def attach(tree: Tree, parent: Node, given: list[int], sampled: list[int], **more: Any) -> Node:
    """A turn whose logprobs tell its number and position, both kinds of them."""
    number = len(tree.nodes) + 1
    tokens = [
        Sampled(token=token, logprob=-number - at / 8, sampling_logprob=-number - at / 16 - 0.5)
        for at, token in enumerate(sampled)
    ]
    return tree.attach(
        parent,
        messages=[{"role": "user", "content": ""}],
        reply={"role": "assistant", "content": ""},
        root=TemplateInputs(),
        given=given,
        sampled=tokens,
        finish_reason=more.pop("finish_reason", "stop"),
        facts=TurnFacts(**{"logprob_kind": "raw", "weight_versions": ("3", "4"), **more}),
    )


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree()
    ids = st.integers(0, 2**31 - 1)
    for _ in range(draw(st.integers(0, 8))):
        parent = draw(st.sampled_from([tree.root, *tree.nodes, tree.tip]))
        low = draw(st.integers(1, 6))
        node = attach(
            tree,
            parent,
            draw(st.lists(ids, min_size=0 if parent.end else 1, max_size=5)),
            draw(st.lists(ids, max_size=5)),
            finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
            weight_versions=(str(low), str(low + draw(st.integers(0, 1)))),
            sampling={"temperature": draw(st.floats(0, 2)), "logit_bias": {10: 1.0, 9: -1.0}},
        )
        node.turn.reward = draw(st.none() | st.floats(-1, 1))
    return tree


LIMITS = st.none() | st.integers(1, 20)


def by_number(tree: Tree, sample: Sample) -> list[Node]:
    return [tree.nodes[turn.number - 1] for turn in sample.turns]


@settings(max_examples=examples(100))
@given(trees(), st.sampled_from(["tip", "all"]), LIMITS, st.none() | st.integers(0, 6))
def test_tokens_mask_and_logprobs_are_those_of_the_turns(
    tree: Tree, branch: str, limit: int | None, minimum: int | None
) -> None:
    options = Options(branch=branch, max_seq_len=limit, min_weight_version=minimum)
    seen: set[int] = set()
    export = assemble(tree, options, SESSION)
    for sample in export.samples:
        nodes = by_number(tree, sample)
        assert nodes == nodes[-1].path()
        truth = []  # token, is sampled, is trained, logprob
        for node in nodes:
            is_trained = node.number not in seen and int(node.turn.facts.weight_versions[0]) >= (minimum or 0)
            truth += [(token, False, False, 0.0) for token in node.turn.given]
            for token, logprob in zip(node.turn.sampled, node.turn.sampling_logprobs, strict=True):
                truth.append((token, True, is_trained, logprob if is_trained else 0.0))
        truth = truth[: len(sample.tokens)]
        first = next(at for at, row in enumerate(truth) if row[1])
        assert sample.tokens.tolist() == [row[0] for row in truth]
        assert sample.loss_mask.tolist() == [int(row[2]) for row in truth[first:]]
        assert sample.rollout_log_probs.tolist() == [row[3] for row in truth[first:]]
        assert limit is None or len(sample.tokens) <= limit
        assert nodes[-1].number not in seen  # no branch is repeated once it is cut
        seen |= {node.number for node in nodes}
    assert problems(export) == []


@given(trees())
def test_every_sampled_token_is_trained_exactly_once_over_all_branches(tree: Tree) -> None:
    export = assemble(tree, Options(branch="all"))
    trained = [turn.number for sample in export.samples for turn in sample.turns if turn.num_trained]
    assert sorted(trained) == [node.number for node in tree.nodes if node.turn.sampled]
    assert sum(int(sample.loss_mask.sum()) for sample in export.samples) == sum(len(n.turn.sampled) for n in tree.nodes)


@settings(max_examples=examples(100))
@given(trees(), st.data())
def test_a_limit_leaves_out_whole_turns_or_shortens_the_first_and_never_lies_about_the_end(
    tree: Tree, data: st.DataObject
) -> None:
    limit = data.draw(st.integers(1, max((node.end for node in tree.nodes), default=1)))
    export = assemble(tree, Options(branch="all", max_seq_len=limit))
    for sample in export.samples:
        nodes = by_number(tree, sample)
        assert len(sample.tokens) <= limit
        for turn, node in zip(sample.turns, nodes, strict=True):
            is_whole = turn.end == node.end
            assert turn.is_cut is not is_whole
            assert turn.finish_reason == (node.turn.finish_reason if is_whole else "length")
            assert is_whole or not any(before.turn.sampled for before in node.path()[:-1])
        if sample.num_left_out or sample.turns[-1].is_cut:
            assert sample.status is Status.TRUNCATED
    fitting = [n for n in tree.nodes if n.turn.sampled and n.end - len(n.turn.sampled) < limit]
    assert bool(export.samples) == bool(fitting)
    if not export.samples:
        was_sampled = any(node.turn.sampled for node in tree.nodes)
        assert export.empty_reason is (EmptyReason.ALL_TRUNCATED if was_sampled else EmptyReason.NO_RECORDS)


@given(trees())
def test_a_turn_is_trained_on_the_way_to_its_first_retry_however_the_tree_grows(tree: Tree) -> None:
    def followers() -> dict[int, int]:
        """For each turn that is trained and goes on: the turn that follows it there."""
        paths = [sample.turns for sample in assemble(tree, Options(branch="all")).samples]
        pairs = [pair for path in paths for pair in itertools.pairwise(path)]
        return {turn.number: after.number for turn, after in pairs if turn.num_trained}

    before = followers()
    for parent in [tree.root, *tree.nodes]:
        attach(tree, parent, [1], [2])
    after = followers()
    assert {number: after[number] for number in before} == before


def same(one: Export, other: Export) -> bool:
    return encode(one, Format.JSON) == encode(other, Format.JSON)


def without_record(export: Export) -> Export:
    samples = tuple(replace(sample, logprobs=None, sampling_logprobs=None) for sample in export.samples)
    return replace(export, samples=samples)


@given(trees(), st.sampled_from(Format), LIMITS)
def test_every_format_gives_back_what_was_written_byte_for_byte(tree: Tree, form: Format, limit: int | None) -> None:
    options = Options(branch="all", max_seq_len=limit, metadata={"step": 7})
    written = assemble(tree, options, replace(SESSION, reward=0.5), detokenize=str)
    payload = encode(written, form)
    read = decode(payload)
    assert encode(read, form) == payload
    assert same(read, without_record(written) if form is Format.SAFETENSORS else written)
    assert problems(read) == []
    for sample in read.samples:
        assert sample.metadata == {"task": "ünïcode", "n": 1, "step": 7}
        assert (sample.session_id, sample.group, sample.label, sample.reward) == ("5e5510", "g", "l", 0.5)


@given(trees(), st.data())
def test_any_flipped_bit_of_an_array_in_the_file_is_noticed(tree: Tree, data: st.DataObject) -> None:
    payload = bytearray(encode(assemble(tree, Options(branch="all"))))
    (size,) = struct.unpack("<Q", payload[:8])
    header = json.loads(payload[8 : 8 + size])
    regions = [entry["data_offsets"] for name, entry in header.items() if name != "_samples_meta"]
    assume(regions)
    start, end = data.draw(st.sampled_from(regions))
    at = 8 + size + data.draw(st.integers(start, end - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    assert problems(decode(bytes(payload)))


@given(trees(), st.data())
def test_any_changed_fact_of_a_turn_is_noticed(tree: Tree, data: st.DataObject) -> None:
    export = assemble(tree, Options(branch="all"), SESSION)
    assume(export.samples)
    whole = json.loads(encode(export, Format.JSON))
    sample = data.draw(st.sampled_from(whole["samples"]))
    turn = data.draw(st.sampled_from(sample["turns"]))
    change: Callable[[], object] = data.draw(
        st.sampled_from(
            [
                lambda: turn.update(finish_reason="other"),
                lambda: turn["sampling"].update(temperature=9),
                lambda: turn.update(number=turn["number"] + 100),
                lambda: turn.update(weight_versions=["1", "99"]),
                lambda: sample.update(session_id="another"),
                lambda: sample.update(status="aborted"),
                lambda: sample["logprobs"].append(-1.0),
                lambda: sample["logprobs"].__setitem__(0, sample["logprobs"][0] - 1e-9),
                lambda: sample["sampling_logprobs"].__setitem__(0, -9.0),
                sample["turns"].pop,
                lambda: sample.update(certificate=None),
                lambda: sample["certificate"]["links"].reverse() or sample["certificate"].update(digest="0"),
                lambda: sample["certificate"].update(num_trained=10**6),
                lambda: sample["certificate"].update(version=2),
            ]
        )
    )
    change()
    payload = json.dumps(whole).encode()
    try:
        found = problems(decode(payload))
    except SamplesUnusable as exc:
        found = [str(exc)]
    assert found


def test_a_reward_may_come_after_the_certificate() -> None:
    tree = Tree()
    attach(tree, tree.root, [1], [2])
    (sample,) = assemble(tree).samples
    assert problems(Export(samples=(replace(sample, reward=1.0, metadata={"judge": "x"}),))) == []


def _with_turn(sample: Sample, index: int, **changes: Any) -> Sample:
    turns = list(sample.turns)
    turns[index] = replace(turns[index], **changes)
    return replace(sample, turns=tuple(turns))


def _with_value(sample: Sample, name: str, at: int, value: float) -> Sample:
    array = getattr(sample, name).copy()
    array[at] = value
    return replace(sample, **{name: array})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: replace(s, turns=()), "it has no turns"),
        (lambda s: _with_turn(s, 1, start=4), "turn 2 does not begin where"),
        (lambda s: replace(s, turns=s.turns[:1]), "its turns end at token 5, but it has 7 tokens"),
        (lambda s: replace(s, logprobs=s.logprobs[1:]), "logprobs has shape [3], but the response is 4 tokens long"),
        (lambda s: replace(s, rollout_indexer_topk=s.rollout_indexer_topk[1:]), "has 5 rows for 7 tokens, not 6"),
        (lambda s: _with_value(s, "loss_mask", 2, 1), "the loss mask is wrong at token 5: 1, not 0"),
        (lambda s: _with_value(s, "tokens", 1, -1), "token 1 has a negative id"),
        (lambda s: _with_value(s, "rollout_log_probs", 0, 0.5), "the logprob of token 3 is 0.5"),
        (lambda s: _with_value(s, "rollout_log_probs", 0, float("nan")), "the logprob of token 3 is nan"),
        (lambda s: _with_value(s, "rollout_log_probs", 2, -0.5), "there are logprobs where the loss mask is 0"),
        (lambda s: _with_turn(s, 1, is_cut=True), "turn 2 was cut short, but claims to have ended by 'stop'"),
        (lambda s: replace(s, num_left_out=1), "it was cut short, but its status is completed"),
    ],
)
def test_what_cannot_be_is_noticed_even_under_a_fresh_certificate(
    change: Callable[[Sample], Sample], says: str
) -> None:
    found = problems(Export(samples=(certify(change(example().samples[0])),)))
    assert any(says in problem for problem in found), found


def test_samples_and_a_reason_for_none_do_not_go_together() -> None:
    assert problems(Export()) == ["0 samples, and the reason for there being none is None"]
    assert len(problems(replace(example(), empty_reason=EmptyReason.NO_RECORDS))) == 1


def test_a_certificate_of_another_sample_is_noticed() -> None:
    (first, _) = example().samples
    assert first.certificate is not None
    forged = replace(first, certificate=replace(first.certificate, digest="0" * 64))
    assert problems(Export(samples=(forged,))) == ["sample 0: its certificate does not belong to it"]


@given(st.binary(max_size=200), st.sampled_from([b"", b"PAR1", b"{", b"\x10\0\0\0\0\0\0\0{"]))
def test_what_is_no_file_of_samples_is_told_so(noise: bytes, start: bytes) -> None:
    with pytest.raises(SamplesUnusable, match="not a samples file"):
        decode(start + noise)


# The layout on disk


def example() -> Export:
    """Two branches that share a turn, with everything a sample can have."""
    tree = Tree()
    routing = {"routed_experts": _flat(4, 6), "indexer_topk": json.dumps(np.arange(12).reshape(4, 3, 1).tolist())}
    first = attach(tree, tree.root, [1, 2, 3], [4, 5], sampling={"temperature": 0.5}, **routing)
    attach(tree, first, [6], [7], weight_versions=("4", "4"), routed_experts=_flat(2, 6, start=24), indexer_topk=None)
    tree.tip.turn.facts = replace(tree.tip.turn.facts, indexer_topk=json.dumps(np.arange(18).reshape(6, 3, 1).tolist()))
    tree.tip.turn.reward = 0.25
    attach(tree, first, [8, 9], [10, 11], finish_reason="length", **_routing(tree, first, 4))
    return assemble(tree, Options(branch="all", num_layers=3), SESSION, detokenize=lambda ids: f"{len(ids)} tokens")


def _flat(num_rows: int, width: int, *, start: int = 0) -> str:
    return base64.b64encode(np.arange(start, start + num_rows * width, dtype="<i4").tobytes()).decode()


def _routing(tree: Tree, parent: Node, num_new: int) -> dict[str, str]:
    rows = parent.end + num_new - 1
    return {"routed_experts": _flat(rows, 6), "indexer_topk": json.dumps(np.zeros((rows, 3, 1), int).tolist())}


def test_a_file_of_version_1_is_read_and_its_certificates_hold() -> None:
    read = decode(GOLDEN.read_bytes())
    assert b"format_version" not in GOLDEN.read_bytes()
    assert same(read, without_record(replace(example(), has_version_spans=True)))
    assert problems(read) == []


def test_a_file_has_the_documented_layout_and_nothing_else() -> None:
    tensors = safetensors.numpy.load(encode(example()))
    meta = json.loads(tensors.pop("_samples_meta").tobytes())
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "tokens.0": ("int64", (7,)),
        "loss_mask.0": ("uint8", (4,)),
        "rollout_log_probs.0": ("float64", (4,)),
        "rollout_routed_experts.0": ("int32", (6, 3, 2)),
        "rollout_indexer_topk.0": ("int32", (6, 3, 1)),
        "tokens.1": ("int64", (9,)),
        "loss_mask.1": ("uint8", (6,)),
        "rollout_log_probs.1": ("float64", (6,)),
        "rollout_routed_experts.1": ("int32", (8, 3, 2)),
        "rollout_indexer_topk.1": ("int32", (8, 3, 1)),
    }
    assert tensors["loss_mask.0"].tolist() == [1, 1, 0, 1]
    assert tensors["loss_mask.1"].tolist() == [0, 0, 0, 0, 1, 1]
    assert tensors["rollout_log_probs.1"].tolist() == [0, 0, 0, 0, -3.5, -3.5625]
    assert list(meta) == ["format_version", "samples", "session_metadata", "empty_reason"]
    assert meta["format_version"] == 2
    assert meta["session_metadata"] == {"max_trim_tokens": 0}
    first, second = meta["samples"]
    for name in ("response", "response_length", "status", "weight_versions", "spec_info", "prefix_cache_info"):
        assert name in first  # what a miles driver looks up
    assert first["weight_versions"] == ["3", "4", "4"]  # the first turn began with 3 and ended with 4
    assert (first["reward"], second["reward"], first["nulls"]) == (0.25, None, [])
    assert (first["status"], second["status"]) == ("completed", "truncated")
    assert second["turns"][0]["masked"] == "shared"
    assert first["certificate"]["weight_versions"] == ["3", "4"]


def test_nothing_to_export_has_a_reason_in_every_format() -> None:
    tree = Tree()
    assert assemble(tree).empty_reason is EmptyReason.NO_RECORDS
    attach(tree, tree.root, [1, 2, 3], [4])
    export = assemble(tree, Options(max_seq_len=3))
    assert (export.samples, export.empty_reason) == ((), EmptyReason.ALL_TRUNCATED)
    for form in Format:
        assert decode(encode(export, form)).empty_reason is EmptyReason.ALL_TRUNCATED


@pytest.mark.parametrize("form", Format)
def test_a_file_without_some_array_is_refused(form: Format) -> None:
    export = example()
    broken = replace(export.samples[0], tokens=export.samples[0].tokens[:2])
    with pytest.raises(SamplesUnusable, match="do not fit the arrays"):
        decode(encode(replace(export, samples=(broken,)), form))


def test_a_stray_tensor_is_refused() -> None:
    tensors = safetensors.numpy.load(encode(example())) | {"tokens.9": np.zeros(1, np.int64)}
    with pytest.raises(SamplesUnusable, match=r"belong to no sample: tokens\.9"):
        decode(safetensors.numpy.save(tensors))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["nulls"].append("rollout_routed_experts"), "present, but listed in nulls"),
        (lambda s: s.update(rollout_routed_experts=None), "rollout_routed_experts is missing"),
        (lambda s: s["rollout_routed_experts"].update(shape=[1]), "36 values do not have shape"),
        (lambda s: s.update(response_length=3), "3 response tokens do not fit"),
        (lambda s: s.update(logprob_kind="raw"), "differ from those of the turns"),
        (lambda s: s.update(loss_mask=[256, 0, 0, 0]), "256"),
        (lambda s: s.update(turns=[{"number": "x"}]), "Expected `int`, got `str`"),
        (lambda s: s.pop("turns"), "missing required field `turns`"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(change: Callable[[dict[str, Any]], object], says: str) -> None:
    whole = json.loads(encode(example(), Format.JSON))
    change(whole["samples"][0])
    with pytest.raises(SamplesUnusable, match=says):
        decode(json.dumps(whole).encode())


def test_tokens_cannot_be_null() -> None:
    tensors = safetensors.numpy.load(encode(example()))
    meta = json.loads(tensors["_samples_meta"].tobytes())
    meta["samples"][0]["nulls"] = ["tokens"]
    del tensors["tokens.0"]
    tensors["_samples_meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with pytest.raises(SamplesUnusable, match="cannot be null"):
        decode(safetensors.numpy.save(tensors))


@given(st.sampled_from(Format), st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else_happens(form: Format, data: st.DataObject) -> None:
    payload = bytearray(encode(example(), form))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SamplesUnusable):
        problems(decode(bytes(payload[: data.draw(st.integers(0, len(payload)))])))


def test_a_file_without_meta_is_refused() -> None:
    with pytest.raises(SamplesUnusable, match="_samples_meta is missing"):
        decode(safetensors.numpy.save({"tokens.0": np.zeros(1, np.int64)}))


def test_a_tensor_of_another_kind_is_refused() -> None:
    tensors = safetensors.numpy.load(encode(example()))
    tensors["tokens.0"] = tensors["tokens.0"].astype(np.int32)
    with pytest.raises(SamplesUnusable, match="tokens holds int32, not int64"):
        decode(safetensors.numpy.save(tensors))


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unimplemented, match="install the extra `parquet` there"):
        encode(example(), read_format("parquet"))


def test_a_table_of_something_else_is_refused() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), sink)
    with pytest.raises(SamplesUnusable, match="columns"):
        decode(sink.getvalue())


# Which turns are there, and which are trained


def test_a_turn_that_crosses_the_limit_is_left_out_with_all_that_follow_it() -> None:
    tree = Tree()
    first = attach(tree, tree.root, [1, 2], [3, 4])
    attach(tree, first, [5], [6, 7])
    attach(tree, first, [8], [9])
    (sample,) = assemble(tree, Options(branch="all", max_seq_len=5)).samples
    assert sample.tokens.tolist() == [1, 2, 3, 4]
    assert (sample.turns[0].finish_reason, sample.status, sample.num_left_out) == ("stop", Status.TRUNCATED, 1)


def test_a_first_turn_that_crosses_the_limit_is_shortened_and_says_so() -> None:
    tree = Tree()
    attach(tree, tree.root, [1, 2], [3, 4, 5])
    (sample,) = assemble(tree, Options(max_seq_len=4)).samples
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3, 4], [1, 1])
    (turn,) = sample.turns
    assert (turn.is_cut, turn.finish_reason, sample.status) == (True, "length", Status.TRUNCATED)


def test_turns_of_old_weights_are_not_trained() -> None:
    tree = Tree()
    node = attach(tree, tree.root, [1], [2, 3], weight_versions=("4", "5"))
    attach(tree, node, [4], [5], weight_versions=("10", "10"))
    (sample,) = assemble(tree, Options(min_weight_version=5)).samples
    assert [turn.masked for turn in sample.turns] == [Masked.STALE, Masked.NO]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1]
    assert sample.weight_versions == ("4", "10")


def test_a_turn_of_several_versions_tells_each_of_them_and_which_tokens_it_sampled() -> None:
    tree = Tree()
    spans = (("3", 2), ("5", 1), ("4", 1))
    node = attach(tree, tree.root, [1], [2, 3, 4, 5], weight_versions=("3", "4"), weight_spans=spans)
    attach(tree, node, [6], [7], weight_versions=("", ""))
    export = assemble(tree, Options(weight_versions="spans"))
    (sample,) = export.samples
    assert (sample.weight_versions, problems(export)) == (("3", "5"), [])
    for form in Format:
        for layout in (export, replace(export, has_version_spans=False)):
            assert encode(decode(encode(layout, form)), form) == encode(layout, form)
    whole = json.loads(encode(export, Format.JSON))["samples"][0]
    assert whole["weight_versions"] == [
        [
            {"version": "3", "abs_start": 1, "abs_end": 3},
            {"version": "5", "abs_start": 3, "abs_end": 4},
            {"version": "4", "abs_start": 4, "abs_end": 5},
        ],
        [],
    ]
    plain = json.loads(encode(replace(export, has_version_spans=False), Format.JSON))["samples"][0]
    assert plain["weight_versions"] == ["3", "5", "4"]
    (cut,) = assemble(tree, Options(max_seq_len=4)).samples
    assert (cut.turns[0].weight_spans, problems(Export(samples=(cut,)))) == ((("3", 2), ("5", 1)), [])
    node.turn.facts = replace(node.turn.facts, weight_spans=(("4", 3), ("2", 1)), weight_versions=("4", "4"))
    node.children.clear()
    tree.tip = node
    assert assemble(tree, Options(min_weight_version=3)).samples[0].turns[0].masked is Masked.STALE
    short = replace(sample, turns=(replace(sample.turns[0], weight_spans=(("3", 1),)), sample.turns[1]))
    assert any("weight_spans of turn 1" in problem for problem in problems(Export(samples=(certify(short),))))


def test_tokens_that_the_next_turn_does_not_go_on_from_are_only_in_the_last_turn() -> None:
    tree = Tree()
    first = attach(tree, tree.root, [1, 2], [3, 9], num_trimmed=1, routed_experts=_flat(3, 2))
    attach(tree, first, [4], [5, 9], num_trimmed=1, weight_spans=(("3", 1), ("4", 1)), routed_experts=_flat(5, 2))
    export = assemble(tree)
    (sample,) = export.samples
    assert problems(export) == []
    assert (sample.tokens.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3, 4, 5, 9], [1, 0, 1, 1])
    assert sample.rollout_log_probs.tolist() == [-1.5, 0.0, -2.5, -2.5625]
    assert [(turn.start, turn.sampled_start, turn.end) for turn in sample.turns] == [(0, 2, 3), (3, 4, 6)]
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tolist() == np.arange(10).reshape(5, 2).tolist()
    (short,) = assemble(tree, Options(max_seq_len=5)).samples  # the second turn does not fit, so the first is the last
    assert (short.tokens.tolist(), short.loss_mask.tolist()) == ([1, 2, 3, 9], [1, 1])
    attach(tree, first, [6], [7], routed_experts=_flat(4, 2))
    assert problems(assemble(tree, Options(branch="all"))) == []


def test_effort_is_told_by_turn_and_in_all_and_counts_once_where_branches_share_a_turn() -> None:
    tree = Tree()
    effort = {"prompt_tokens": 4, "cached_tokens": 1, "total_s": 0.25}
    first = attach(tree, tree.root, [1], [2], effort=effort)
    attach(tree, first, [3], [4], effort=effort | {"spec_drafted": 7, "spec_accepted": 2, "spec_steps": 3})
    attach(tree, first, [3], [4], effort={"prompt_tokens": 9})
    export = assemble(tree, Options(branch="all"))
    assert problems(export) == []
    assert same(decode(encode(export)), without_record(export))
    one, other = export.samples
    totals = {"prompt_tokens": 8, "cached_tokens": 2, "total_s": 0.5, "spec_drafted": 7, "spec_accepted": 2}
    assert one.metadata["holdfast"]["effort"] == totals | {"spec_steps": 3}
    assert other.metadata["holdfast"]["effort"] == {"prompt_tokens": 9}
    assert one.turns[0].effort == effort
    assert (prefix_cache_info(one), prefix_cache_info(other)) == ({"cached_tokens": 2, "total_prompt_tokens": 8}, {})
    assert spec_info(one)["completion_token_num"] == 1
    changed = replace(one, turns=(replace(one.turns[0], effort={"prompt_tokens": 5}), one.turns[1]))
    assert problems(Export(samples=(changed,))) == ["sample 0: turn 1 is not what was certified"]


@pytest.mark.parametrize("form", Format)
def test_a_file_of_a_later_version_is_refused(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(formats, "FORMAT_VERSION", 3)
        later = encode(example(), form)
    with pytest.raises(SamplesUnusable, match="its format_version is 3; this program knows 1 to 2"):
        decode(later)


@pytest.mark.parametrize(("version", "says"), [("", "no weight version"), ("main", "weight version 'main'")])
def test_weights_without_an_order_cannot_be_asked_for_by_age(version: str, says: str) -> None:
    tree = Tree()
    attach(tree, tree.root, [1], [2], weight_versions=(version, version))
    with pytest.raises(SamplesUnusable, match=f"turn 1 has {says}") as caught:
        assemble(tree, Options(min_weight_version=5))
    assert (caught.value.code, caught.value.details) == ("samples_unusable", {"reason": "weight_version"})
    assert assemble(tree).samples[0].weight_versions == (version, version)


def test_logprobs_are_of_the_distribution_sampled_from_where_that_is_known() -> None:
    tree = Tree()
    node = attach(tree, tree.root, [1], [2])
    assert assemble(tree).samples[0].logprob_kind == "sampling"
    node.turn.sampling_logprobs = node.turn.logprobs  # an upstream tells but one of them
    assert assemble(tree).samples[0].logprob_kind == "raw"
    attach(tree, node, [3], [4])
    sample = assemble(tree).samples[0]
    assert [turn.logprob_kind for turn in sample.turns] == ["raw", "sampling"]
    assert sample.logprob_kind == "mixed"
    assert sample.rollout_log_probs.tolist() == [-1.0, 0.0, -2.5]


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_turn_without_a_finite_logprob_is_unusable(logprob: float) -> None:
    tree = Tree()
    attach(tree, tree.root, [1], [2]).turn.logprobs[0] = logprob
    with pytest.raises(SamplesUnusable, match="turn 1 has no finite logprob"):
        assemble(tree)


def test_rewards_are_the_sessions_or_the_sum_of_the_turns() -> None:
    tree = Tree()
    first = attach(tree, tree.root, [1], [2])
    attach(tree, first, [1], [2]).turn.reward = 0.5
    first.turn.reward = 0.25
    assert assemble(tree).samples[0].reward == 0.75
    assert [turn.reward for turn in assemble(tree).samples[0].turns] == [0.25, 0.5]
    assert assemble(tree, session=SessionFacts(reward=-1)).samples[0].reward == -1.0
    with pytest.raises(SamplesUnusable, match="reward"):
        assemble(tree, session=SessionFacts(reward=float("nan")))


@pytest.mark.parametrize(
    "wrong", [{"branch": "x"}, {"weight_versions": "x"}, {"max_seq_len": 0}, {"max_seq_len": True}, {"num_layers": 1.5}]
)
def test_options_that_cannot_be_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Options(**wrong)
    assert caught.value.param == next(iter(wrong))
    with pytest.raises(InvalidArgument, match="safetensors, json, parquet"):
        read_format("csv")


def test_metadata_that_is_not_json_is_unusable() -> None:
    tree = Tree()
    attach(tree, tree.root, [1], [2])
    with pytest.raises(SamplesUnusable, match="metadata: not JSON"):
        assemble(tree, Options(metadata={"x": float("inf")}))
    with pytest.raises(SamplesUnusable, match="group and label: not JSON"):
        assemble(tree, session=SessionFacts(label="\ud800"))
    assert assemble(tree, Options(metadata={"x": 2**70})).samples[0].metadata == {"x": 2**70}


# Routed experts


def test_routed_experts_come_in_all_spellings() -> None:
    rows = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(np.uint8))
    npy = base64.b64encode(buffer.getvalue()).decode()
    for text in (_flat(4, 6), npy, json.dumps(rows.tolist())):
        tree = Tree()
        attach(tree, tree.root, [1, 2, 3], [4, 5], routed_experts=text)
        (sample,) = assemble(tree, Options(num_layers=3)).samples
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.dtype == np.int32
        assert sample.rollout_routed_experts.tolist() == rows.tolist()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=6), LIMITS)
def test_full_and_additional_payloads_make_the_same_rows(turns: list[tuple[int, int, bool]], limit: int | None) -> None:
    tree = Tree()
    for num_given, num_sampled, is_full in turns:
        start = 0 if is_full else max(0, tree.tip.end - 1)
        last = tree.tip.end + num_given + num_sampled - 1
        payload = _flat(last - start, 2, start=2 * start)
        attach(tree, tree.tip, [1] * num_given, [2] * num_sampled, routed_experts=payload)
    for sample in assemble(tree, Options(max_seq_len=limit)).samples:
        num_rows = len(sample.tokens) - 1
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts.tolist() == np.arange(2 * num_rows).reshape(num_rows, 2).tolist()


@pytest.mark.parametrize(
    ("payloads", "says"),
    [
        ((_flat(3, 2), None), "6 values, which do not make rows for 4 positions"),
        ((_flat(4, 2), None), "ends at position 4; 6 were computed"),
        ((_flat(4, 2), _flat(1, 2)), "has 1 rows; 6 positions were computed and 4 known before"),
        ((_flat(4, 2), _flat(7, 2)), "has 7 rows"),
        ((_flat(4, 2), _flat(1, 1)), "1 values"),
        ((json.dumps([[[1], [2]]] * 4), json.dumps([[[1]]] * 2)), "rows of shape"),
        (("[[1], [2, 3]]", None), "cannot be read"),
        (("[[0.5]]", None), "not integers"),
        (("[[4294967296]]", None), "beyond 32 bits"),
        (("AAA", None), "cannot be read"),
        ((base64.b64encode(b"\x93NUMPY").decode(), None), "cannot be read"),
        ((_flat(4, 5), None), "5 values a position, not a multiple of 2 layers"),
    ],
)
def test_routed_experts_that_do_not_fit_the_tokens_are_unusable(payloads: tuple[str, str | None], says: str) -> None:
    tree = Tree()
    first = attach(tree, tree.root, [1, 2, 3], [4, 5], routed_experts=payloads[0])
    attach(tree, first, [6], [7], routed_experts=payloads[1])
    with pytest.raises(SamplesUnusable, match=says) as caught:
        assemble(tree, Options(num_layers=2))
    assert caught.value.reason == "routed_experts"


# Sessions of raw tokens


@st.composite
def histories(draw: st.DrawFn) -> History:
    history = History()
    ids = st.integers(0, 1000)
    for _ in range(draw(st.integers(0, 6))):
        action = draw(st.sampled_from(["give", "sample", "rewind"]))
        if action == "give":
            quotes = draw(st.none() | st.builds(Recalled, start=st.integers(0, 4), length=st.integers(0, 4)))
            history.give(draw(st.lists(ids, min_size=1, max_size=4)), quotes)
        elif action == "sample" and len(history):
            span = history.begin_sampled()
            for token in draw(st.lists(ids, min_size=1, max_size=4)):
                history.sample(span, Sampled(token=token, logprob=-token / 8, sampling_logprob=-token / 4))
            span.stop_reason = draw(st.sampled_from(StopReason))
        elif len(history):
            history.rewind(draw(st.integers(0, len(history))))
    return history


@given(histories(), st.integers(1, 5))
def test_spans_make_one_sample_however_they_are_cut_into_pieces(history: History, limit: int) -> None:
    length = len(history)
    export = from_spans(history.pieces(0, length, limit=limit), session=SESSION)
    assert same(export, from_spans(history.pieces(0, length, limit=1000), session=SESSION))
    assert problems(export) == []
    (whole,) = [list(history.pieces(0, length, limit=1000))]
    sampled = [(p.start + at, t) for p in whole if p.kind == "sampled" for at, t in enumerate(p.tokens)]
    if not sampled:
        assert export.empty_reason is EmptyReason.NO_RECORDS
        return
    (sample,) = export.samples
    trained = np.flatnonzero(sample.loss_mask) + sample.response_start
    assert [(int(at), int(sample.tokens[at])) for at in trained] == sampled
    assert sample.tokens.tolist() == [token for piece in whole for token in piece.tokens][: sampled[-1][0] + 1]
    assert sample.rollout_log_probs[sample.loss_mask == 1].tolist() == [-token / 4 for _, token in sampled]


def test_a_span_that_was_rewound_into_claims_no_end() -> None:
    history = History()
    history.give([1])
    span = history.begin_sampled()
    for token in (2, 3):
        history.sample(span, Sampled(token=token, logprob=-1.0, sampling_logprob=-1.0))
    span.stop_reason = StopReason.EOS
    history.rewind(2)
    for length in (2, 3):  # it is the last one, or something was given after it
        (sample,) = from_spans(history.pieces(0, length, limit=10)).samples
        assert (sample.tokens.tolist(), sample.turns[0].finish_reason, sample.status) == ([1, 2], "", Status.ABORTED)
        assert sample.logprob_kind == "raw"
        history.give([4])


# The command


@pytest.mark.parametrize("form", Format)
def test_verify_passes_a_good_file(form: Format, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples"
    path.write_bytes(encode(example(), form))
    assert main(["samples", "verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: ok: 2 samples, 16 tokens, 5 of them trained\n"


def test_verify_names_what_is_wrong_in_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = example()
    first, second = export.samples
    tokens = first.tokens.copy()
    tokens[5] += 1
    rows = np.zeros_like(second.rollout_routed_experts)
    mask = second.loss_mask.copy()
    mask[0] = 1
    changed = {
        "good": export,
        "token": replace(export, samples=(replace(first, tokens=tokens), second)),
        "rows": replace(export, samples=(first, replace(second, rollout_routed_experts=rows))),
        "mask": replace(export, samples=(first, replace(second, loss_mask=mask))),
        "twice": replace(export, samples=(first, first)),
    }
    for name, content in changed.items():
        (tmp_path / name).write_bytes(encode(content))
    (tmp_path / "noise").write_bytes(b"noise")
    names = [*changed, "noise", "missing"]
    assert main(["samples", "verify", *(str(tmp_path / name) for name in names)]) == 1
    lines = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
    assert lines[0].startswith("good: ok")
    assert "token: sample 0: turn 2 is not what was certified" in lines
    assert "rows: sample 1: rollout_routed_experts is not what was certified" in lines
    assert "mask: sample 1: the loss mask is wrong at token 3: 1, not 0" in lines
    assert "twice: sample 1: turn 1 is already trained in sample 0" in lines
    assert "missing: No such file or directory" in lines
    assert any(line.startswith("noise: not a samples file") for line in lines)
    (tmp_path / "none").write_bytes(encode(assemble(Tree())))
    assert main(["samples", "verify", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.endswith("ok: no samples: no_records\n")


def test_show_prints_a_row_for_each_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.json"
    path.write_bytes(encode(example(), Format.JSON))
    assert main(["samples", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("session 5e5510, group g, label l\n")
    assert "2 samples, 16 tokens, 5 of them trained" in shown
    assert main(["samples", "show", str(tmp_path / "none")]) == 2


def test_the_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(assembling).failed == 0

"""Which passages a new message gets as quotes: those that are about it, and none where none is."""

import pytest

from holdfast.bench.quality import long_text
from holdfast.chat.messages import Message
from holdfast.chats.recall import Recall, RecallLimits, View, query_of
from holdfast.chats.tree import Tree
from tests.serving import default_chat

TOKENIZER = default_chat().model.tokenizer
TEXT = long_text()


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def told(*turns: tuple[str, str]) -> Tree:
    tree = Tree()
    for text, answer in turns:
        given = TOKENIZER.encode_plain(f"{text}{answer}")
        reply: Message = {"role": "assistant", "content": answer}
        tree.add(tree.new_turn(tree.tip, messages=[user(text)], reply=reply, given=given, sampled=[]))
    return tree


def chosen(tree: Tree, text: str) -> list[str]:
    recall = Recall()
    recall.update(tree, TOKENIZER)
    limits = RecallLimits(tokens=512)
    return [one.text for one in recall.choose(tree.tip, View(0, tree.tip.end), [user(text)], limits, TOKENIZER)]


FACTS = (
    ("The owner of the bakery is Mister Stone.", "Who owns the bakery?"),
    ("The walls of the castle are pink.", "Do you still know the colour of the castle's walls?"),
    ("My sister Clara lives in Lisbon.", "In which city is Clara living, again?"),
    ("The meeting with Martin is on Thursday.", "When do I meet Martin?"),
)
OTHERS = ("I met the owner of the harbour.", "The walls of the library need paint.", "My sister likes the market.")


@pytest.mark.parametrize(("fact", "question"), FACTS)
def test_a_fact_is_quoted_first_for_a_question_in_other_words_and_nothing_for_another_text(
    fact: str, question: str
) -> None:
    texts = [*OTHERS, *(known for known, _ in FACTS), *(TEXT[at : at + 600] for at in range(0, 60_000, 600))]
    tree = told(*((text, "Noted.") for text in texts))
    assert chosen(tree, question)[0] == fact
    assert chosen(tree, f"{TEXT[300_000:300_600]}\n{question} {TEXT[310_000:310_600]}")[0] == fact
    for at in range(330_000, 336_000, 600):
        assert chosen(tree, TEXT[at : at + 600].replace("?", ".")) == []
    assert chosen(tree, "What is it that you said about them?") == []


def test_an_answer_is_found_by_the_words_of_its_question() -> None:
    tree = told(("How warm was the cellar in winter?", "Nine degrees."), ("I am off.", "Goodbye."))
    assert chosen(tree, "Please tell me again how warm the cellar is in winter.")[0] == "Nine degrees."


def test_of_a_long_message_what_it_asks_counts() -> None:
    assert query_of([user("Short. Is it?")]) == "Short. Is it?"
    assert query_of([user("All of it is long. " * 40 + "Who was it? " + "Yes. " * 9)]).strip() == "Who was it?"
    assert query_of([user("All of it is long. " * 40)]) == "All of it is long. " * 40


LORRIES = [
    f"{name} drives a {colour} lorry." for name, colour in (("Marta", "blue"), ("Pavel", "white"), ("Ines", "red"))
]


def test_what_was_said_of_several_others_is_not_quoted_for_one_that_nobody_named() -> None:
    tree = told(*((text, "Noted.") for text in (*LORRIES, *OTHERS)))
    assert chosen(tree, "Which lorry does Dmitri drive?") == []
    assert chosen(tree, "Remind me what sort of lorry Pavel drives.") == [LORRIES[1]]
    assert chosen(tree, "Who drives a lorry?") == LORRIES[::-1]  # has nothing that they lack


def test_what_was_said_several_times_is_still_one_thing() -> None:
    tree = told(*((text, "Noted.") for text in (*OTHERS * 4, *LORRIES[:1] * 4)))
    assert chosen(tree, "What colour is the lorry that Marta drives?") == LORRIES[:1] * 4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.window import Window
from holdfast.errors import InvalidArgument

windows = st.builds(
    lambda sink, extra: Window(sink=sink, recent=max(1, sink) + extra), st.integers(0, 6), st.integers(0, 12)
)


def test_window_drops_the_middle_once_full() -> None:
    window = Window(sink=2, recent=3)
    assert [list(part) for part in window.kept(8)] == [[0, 1], [5, 6, 7]]
    assert list(window.dropped(8)) == [2, 3, 4]


def test_distance_to_a_sink_stops_growing_when_the_window_is_full() -> None:
    window = Window(sink=2, recent=3)
    assert [window.sink_query(t) for t in range(8)] == [0, 1, 2, 3, 4, 4, 4, 4]


@given(windows, st.integers(1, 60))
def test_kept_is_exactly_what_the_last_query_sees(window: Window, length: int) -> None:
    sinks, recent = window.kept(length)
    kept = [*sinks, *recent]
    assert kept == [key for key in range(length) if window.sees(length - 1, key)]
    assert len(kept) == window.num_visible(length)
    assert sorted([*kept, *window.dropped(length)]) == list(range(length))


@pytest.mark.parametrize(("sink", "recent"), [(-1, 8), (0, 0), (9, 8), (4, -2)])
def test_a_window_that_cannot_be_is_refused(sink: int, recent: int) -> None:
    with pytest.raises(InvalidArgument, match=r"sink|recent"):
        Window(sink=sink, recent=recent)

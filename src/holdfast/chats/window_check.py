"""Nothing leaves the window in silence: new tokens fit it, or the caller has agreed that they need not."""

from holdfast.errors import ContextTooLong
from holdfast.sessions.ports import ModelInfo


def check_fits(num_new: int, model: ModelInfo, *, may_truncate: bool, field: str = "messages") -> None:
    limit = model.sink + model.recent
    if num_new > limit and not may_truncate:
        raise ContextTooLong(
            f"{field}: {num_new} new tokens exceed the window of {limit}; "
            'send fewer, say "truncation": "auto", or serve with a larger --recent',
            param=field,
        )

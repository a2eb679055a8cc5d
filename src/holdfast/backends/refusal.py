"""What an upstream's refusal means where nobody is there to take it as it is."""

from holdfast.errors import HoldfastError, InvalidArgument, UpstreamAborted, UpstreamInvalid

_SHOWN_BYTES = 500


class NotServed(UpstreamInvalid):
    """The upstream knows no such path, or was started without it."""


def refusal(status: int, body: bytes) -> HoldfastError:
    """The error for a status that is not 200."""
    text = body[:_SHOWN_BYTES].decode(errors="replace")
    if status in (400, 413, 422):
        return InvalidArgument(f"the upstream refuses the request: {text}")
    if status in (429, 503):
        return UpstreamAborted(f"the upstream has no room (status {status}): {text}")
    kind = NotServed if status in (403, 404, 405, 501) else UpstreamInvalid
    return kind(f"the upstream answered with status {status}: {text}")

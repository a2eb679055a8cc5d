"""Which of a client's addresses is in use: one until it is gone, then the next, round and round."""

from holdfast_sdk.errors import DeadlineExceeded, HoldfastError
from holdfast_sdk.flow import GONE


class Route:
    """Threads may share it: whoever notices first that an address is gone moves on for all."""

    def __init__(self, num_addresses: int) -> None:
        self.current = 0
        self._num_addresses = num_addresses

    def failed(self, index: int, error: HoldfastError, *, has_begun: bool = False) -> None:
        """A call to the address with this index has failed. `has_begun`: the server had sent something before."""
        is_gone = isinstance(error, GONE) or (isinstance(error, DeadlineExceeded) and not has_begun)
        if is_gone and self.current == index:
            self.current = (index + 1) % self._num_addresses

"""How many random examples to try: few in every change, many in `make test-integration`."""

import os

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(num: int) -> int:
    return num * 10 if THOROUGH else num

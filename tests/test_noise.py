import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from holdfast.engine import sampling as noise


def _block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    words = (np.array([counter[0]], dtype=np.uint64), *counter[1:])
    return [int(word) for word in noise.philox4x32(words, key)[:, 0]]


def test_philox_gives_the_published_vectors() -> None:
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert _block((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _block((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _block(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**32 - 1), st.integers(0, 150_000))
def test_noise_of_a_token_is_free_of_its_neighbours(seed: int, position: int, choice: int, token: int) -> None:
    many = np.arange(max(0, token - 3000), token + 3000)
    alone = noise.gumbel(seed, position, np.array([token]), choice)
    among = noise.gumbel(seed, position, many, choice)[many == token]
    assert alone == among


def test_every_part_of_the_key_matters() -> None:
    ids = np.arange(8)
    base = noise.random_bits(1, 1, ids, 1)
    for other in ((2, 1, 1), (1 << 32 | 1, 1, 1), (1, 2, 1), (1, 1 << 32 | 1, 1), (1, 1, 2)):
        seed, position, choice = other
        assert (noise.random_bits(seed, position, ids, choice) != base).all()


def test_noise_is_bounded_as_declared() -> None:
    sample = noise.gumbel(5, 9, np.arange(2_000_000))
    assert sample.min() >= noise.GUMBEL_MIN
    assert sample.max() <= noise.GUMBEL_MAX
    assert np.isfinite([noise.GUMBEL_MIN, noise.GUMBEL_MAX]).all()


def test_noise_follows_the_gumbel_distribution() -> None:
    sample = noise.gumbel(11, 3, np.arange(200_000))
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-3

# SPDX-License-Identifier: BSD-3-Clause
# The formulas of csrc/math/philox.h and normal.h: compiled alone, beside a reference in Python
# integers, published answers and torch's functions in float64.

import ctypes
import math
import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from testing import DEVICES

from torch_renaissance._ops import ops

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCE = """
#include "math/distribution.h"
using namespace torch_renaissance;
extern "C" {
void words4x32(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const PhiloxBlock b =
      philox4x32({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  for (int i = 0; i < 4; ++i) out[i] = b.word[i];
}
void words(uint64_t seed, uint64_t stream, uint64_t index, uint32_t* out) {
  const PhiloxBlock b = philox(seed, stream, index);
  for (int i = 0; i < 4; ++i) out[i] = b.word[i];
}
uint64_t pair(uint64_t seed, uint64_t stream, uint64_t index, int i) {
  return philox(seed, stream, index).pair(i);
}
float as_float(uint32_t bits) { return uniform_float(bits); }
double as_double(uint64_t bits) { return uniform_double(bits); }
double centred(uint64_t bits) { return uniform_centred(bits); }
uint32_t below(uint64_t bits, uint32_t n) { return uniform_below(bits, n); }
double log_of(double x) { return portable_log(x); }
void quantiles(const double* q, double* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) z[i] = normal_quantile(q[i]);
}
double drawn(int which, double a, double b, uint64_t bits) {
  return draw(static_cast<Distribution>(which), a, b, bits);
}
}
"""
# (counter, key, words) of Random123's kat_vectors for philox4x32 with 10 rounds.
PUBLISHED = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
ONES = 2**64 - 1
UNIFORM, NORMAL, TRUNC_NORMAL = range(3)


def compiled(folder, *flags):
    source, library = folder / "formulas.cpp", folder / "formulas.so"
    source.write_text(SOURCE)
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", *flags]
    subprocess.run([compiler, *flags, f"-I{CSRC}", source, "-o", library], check=True)
    formulas = ctypes.CDLL(str(library))
    u32, u64, double = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double
    for name, result, arguments in (
        ("words4x32", None, [ctypes.c_void_p] * 3),
        ("words", None, [u64, u64, u64, ctypes.c_void_p]),
        ("pair", u64, [u64, u64, u64, ctypes.c_int]),
        ("as_float", ctypes.c_float, [u32]),
        ("as_double", double, [u64]),
        ("centred", double, [u64]),
        ("below", u32, [u64, u32]),
        ("log_of", double, [double]),
        ("quantiles", None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
        ("drawn", double, [ctypes.c_int, double, double, u64]),
    ):
        function = getattr(formulas, name)
        function.restype, function.argtypes = result, arguments
    return formulas


@pytest.fixture(scope="module")
def formulas(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("formulas"), "-O3")


def reference(counter, key):
    """Philox 4x32-10 as the paper's section 3 has it, in integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def halves(n):
    return n % 2**32, n // 2**32


def reference_bits(seed, stream, count):
    """The 64 bits of each of a tensor's first elements."""
    bits = []
    for index in range((count + 1) // 2):
        words = reference((*halves(index), *halves(stream)), halves(seed))
        bits += [words[1] << 32 | words[0], words[3] << 32 | words[2]]
    return bits[:count]


def integers(n, *limits):
    source = random.Random(0)
    return [tuple(source.randrange(limit) for limit in limits) for _ in range(n)]


def words4x32(formulas, counter, key):
    out = (ctypes.c_uint32 * 4)()
    formulas.words4x32((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), out)
    return tuple(out)


def quantiles(formulas, q):
    z = torch.empty_like(q)
    formulas.quantiles(q.data_ptr(), z.data_ptr(), q.numel())
    return z


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_answers(formulas, counter, key, words):
    assert reference(counter, key) == words
    assert words4x32(formulas, counter, key) == words


def test_words_are_the_references(formulas):
    for *counter, k0, k1 in integers(200, *(2**32,) * 6):
        assert words4x32(formulas, counter, (k0, k1)) == reference(counter, (k0, k1))


def test_seed_is_the_key_and_stream_and_index_are_the_counter(formulas):
    out = (ctypes.c_uint32 * 4)()
    for seed, stream, index in [*integers(50, *(2**64,) * 3), (ONES,) * 3]:
        formulas.words(seed, stream, index, out)
        expected = reference((*halves(index), *halves(stream)), halves(seed))
        assert tuple(out) == expected
        assert formulas.pair(seed, stream, index, 0) == expected[1] << 32 | expected[0]
        assert formulas.pair(seed, stream, index, 1) == expected[3] << 32 | expected[2]


@pytest.mark.parametrize("device", DEVICES)
def test_op_takes_the_references_bits(device):
    """Uniform values in float64 show 53 of an element's 64 bits."""
    for seed, stream in [(0, 0), (1, -1), (2**63 - 1, -(2**63)), (-(2**63), 2**63 - 1)]:
        for count in (1, 2, 7, 1001):
            out = torch.full((count,), 7.0, dtype=torch.float64, device=device)
            ops.fill_random_(out, seed, stream, "uniform", 0.0, 1.0)
            bits = reference_bits(seed % 2**64, stream % 2**64, count)
            assert out.tolist() == [(b >> 11) / 2**53 for b in bits]


# -- what is made of bits --------------------------------------------------------------------------


def test_uniforms_in_the_unit_interval(formulas):
    for (bits,) in [*integers(1000, 2**64), (0,), (ONES,)]:
        assert formulas.as_double(bits) == (bits >> 11) / 2**53
        assert formulas.as_float(bits % 2**32) == (bits % 2**32 >> 8) / 2**24
    assert formulas.as_double(ONES) < 1 and formulas.as_float(2**32 - 1) < 1


def test_centred_uniforms(formulas):
    """Odd multiples of 2^-53, exactly: turning all bits over changes only the sign."""
    for (bits,) in [*integers(1000, 2**64), (0,), (ONES,), (2**63,), (2**63 - 1,)]:
        q = formulas.centred(bits)
        assert q == (2 * (bits >> 12) + 1 - 2**52) / 2**53
        assert q == -formulas.centred(ONES - bits) != 0
    assert formulas.centred(ONES) == 0.5 - 2**-53


def test_integers_below(formulas):
    limits = (1, 2, 3, 10, 2**31, 2**32 - 1)
    for (bits,) in [*integers(500, 2**64), (0,), (ONES,)]:
        for n in limits:
            assert formulas.below(bits, n) == bits * n // 2**64
    for n in limits:
        assert formulas.below(0, n) == 0 and formulas.below(ONES, n) == n - 1


def test_logarithm(formulas):
    """2 ulp, and the 1 that libm may be off."""
    source = random.Random(0)
    points = [2.0 ** -source.uniform(0, 1022) for _ in range(5000)]
    points += [source.uniform(0.5, 2) for _ in range(5000)]
    root = math.sqrt(0.5)
    edges = (root, 2 * root, 1.0, 0.5, 2.0)
    points += [math.nextafter(x, to) for x in edges for to in (0.0, 4.0)]
    points += [*edges, 2.0**-1022, 1.7e308, math.nextafter(2.0**-1022, 1)]
    for x in points:
        assert abs(formulas.log_of(x) - math.log(x)) <= 3 * math.ulp(math.log(x)), x


def quantile_points():
    """q of both tails down to the last centred uniform, of the middle, and around the joints."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(200_000, generator=generator, dtype=torch.float64) * 52 + 1
    tails = torch.exp2(-exponents)
    middle = torch.rand(200_000, generator=generator, dtype=torch.float64) / 2
    joints = torch.tensor([0.075, math.exp(-25.0), 0.5, 2.0**-53], dtype=torch.float64)
    near = torch.cat([joints * (1 + k * 1e-9) for k in range(-5, 6)])
    p = torch.cat([tails, middle, near[near < 0.5]])
    p = torch.floor(p * 2**52) * 2**-52 + 2**-53  # as uniform_centred has them
    return p[p < 0.5] - 0.5  # exact


def test_normal_quantile(formulas):
    """Against torch.special.ndtri, whose own error is 5e-16 there, plus 6 ulp of ours."""
    q = quantile_points()
    exact = torch.special.ndtri(0.5 + q)
    z = quantiles(formulas, q)
    torch.testing.assert_close(z, exact, rtol=2e-15, atol=1e-15)
    assert torch.equal(quantiles(formulas, -q), -z)
    edge = 0.5 - 2**-53
    assert quantiles(formulas, torch.tensor([-edge, edge], dtype=torch.float64)).tolist() == (
        pytest.approx([-8.209536151601387, 8.209536151601387], rel=2e-15)
    )


def test_normal_quantile_inverts_the_distribution(formulas):
    """The other way round, by erfc, which is exact to 1 ulp or so; its condition is z^2."""
    q = quantile_points()
    z = quantiles(formulas, q)
    p = torch.special.erfc(-z / math.sqrt(2)) / 2
    torch.testing.assert_close(p, 0.5 + q, rtol=1e-13, atol=0)


def test_draw(formulas):
    for (bits,) in [*integers(300, 2**64), (0,), (ONES,)]:
        u, q = formulas.as_double(bits), formulas.centred(bits)
        assert formulas.drawn(UNIFORM, -2.0, 3.0, bits) == -2.0 + 5.0 * u
        z = quantiles(formulas, torch.tensor([q], dtype=torch.float64)).item()
        assert formulas.drawn(NORMAL, 1.0, 0.5, bits) == 1.0 + 0.5 * z
        p = 0.5 + q * math.erf(math.sqrt(2))
        expected = torch.special.ndtri(torch.tensor(p, dtype=torch.float64)).item()
        drawn = formulas.drawn(TRUNC_NORMAL, 0.0, 1.0, bits)
        assert drawn == pytest.approx(expected, rel=1e-14, abs=1e-15)
        assert abs(drawn) <= 2


def test_uniform_never_leaves_its_bounds(formulas):
    for a, b in [(0.1, 0.3), (-0.7, 0.1), (1 / 3, 2 / 3), (5.0, 5.0), (-1e308, 7e307)]:
        assert formulas.drawn(UNIFORM, a, b, 0) == a
        for (bits,) in [*integers(200, 2**64), (ONES,)]:
            assert a <= formulas.drawn(UNIFORM, a, b, bits) <= b


def test_compilers_options_change_no_bit(formulas, tmp_path):
    q = quantile_points()
    z = quantiles(formulas, q)
    for i, flags in enumerate((["-O0"], ["-O2", "-march=native"])):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert torch.equal(quantiles(compiled(folder, *flags), q), z)

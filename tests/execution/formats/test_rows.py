"""Rows are stored bit for bit as their format says, on every device."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplat.backends.formats.facts import FORMATS, format_of
from attnplat.backends.formats.rows import amax_scale, decode, decode_rows, encode, encode_rows
from attnplat.errors import ConfigError, PlanMismatchError, UnsupportedCallError
from tests.execution.formats import first_principles as oracle

GIVEN = [f for f in FORMATS.values() if f.scale and f.scale.place.value.startswith("in a tensor")]
PLAIN = ["float16", "bfloat16", "float32", "float64"]


def size_of(name: str, otherwise: int = 64) -> int:
    return format_of(name).size or otherwise


def random_rows(count: int, size: int, seed: int, spread: int = 3) -> torch.Tensor:
    """bfloat16 values over many powers of two, some of them zero."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=source)
    x *= torch.exp2(torch.randint(-spread, spread + 1, (count, size), generator=source))
    x[torch.rand(count, size, generator=source) < 0.05] = 0.0
    return x.bfloat16().float()


def fractions(row: torch.Tensor) -> list[Fraction]:
    return [Fraction(x) for x in row.tolist()]


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


# --- stored bytes ----------------------------------------------------------------------------


def test_first_principles_know_every_format_that_computes_its_scales() -> None:
    computed = {f.encoding.value for f in FORMATS.values() if f.scale and f not in GIVEN}
    assert computed == set(oracle.ROWS) == set(oracle.BYTES)


@pytest.mark.parametrize("name", oracle.ROWS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0, 3, 20]), shift=st.integers(-100, 90))
def test_rows_are_those_of_first_principles(name: str, seed: int, spread: int, shift: int) -> None:
    x = random_rows(1, size_of(name), seed, spread)[0]
    if format_of(name).rest is None:
        x = torch.ldexp(x, torch.tensor(shift)).bfloat16().float()
    assert encode_rows(format_of(name), x).numpy().tobytes() == oracle.ROWS[name](fractions(x))


@pytest.mark.parametrize("name", ["int8_th", "fp8_th", "fp8_th_fnuz", "int4_th"])
@pytest.mark.parametrize("size", [1, 2, 3, 33, 66, 72, 80])
def test_scales_behind_rows_of_any_size_are_aligned(name: str, size: int) -> None:
    x = random_rows(1, size, size)[0]
    row = encode_rows(format_of(name), x)
    assert row.numpy().tobytes() == oracle.ROWS[name](fractions(x))
    assert len(row) == format_of(name).row_bytes(size) and len(row) % 4 == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), factor=st.floats(2.0**-20, 2.0**20, width=32))
def test_nvfp4_rows_divide_by_the_callers_scale_too(seed: int, factor: float) -> None:
    x = random_rows(1, 32, seed)
    scale = torch.tensor([factor])
    row = encode_rows(format_of("nvfp4"), x, scale=scale)[0].numpy().tobytes()
    assert row == oracle.nvfp4(fractions(x[0]), Fraction(factor))


# Written down by hand: values, encoding, bytes.
GOLDEN = {
    "a full int8 row: scale 1, ties go to the even code": (
        "int8_th",
        [127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -2.5, 0.0],
        "7f 81 00 02 02 00 fe 00 0000803f",
    ),
    "amax in one element; the rest rounds away": (
        "int8_th",
        [254.0, 0.75, 1.0, -1.0],
        "7f 00 00 00 00000040",
    ),
    "an fp8 row whose largest is 448 has scale 1": (
        "fp8_th",
        [448.0, -448.0, 1.0, 2.0**-9, 2.0**-10, 17.0, 19.0],
        "7e fe 38 01 00 58 5a 00 0000803f",
    ),
    "the same values in fnuz: largest 224, so the same codes and scale 2": (
        "fp8_th_fnuz",
        [448.0, -448.0, 1.0, 2.0**-9, 2.0**-10, 17.0, 19.0],
        "7e fe 38 01 00 58 5a 00 00000040",
    ),
    "a zero row: the smallest scale, 2^-126": ("int8_th", [0.0, -0.0, 0.0], "00000000 00008000"),
    "a row below it: the same scale, and codes shrink": (
        "int8_th",
        [127 * 2.0**-127, -(2.0**-126), 2.0**-127, 3 * 2.0**-127],
        "40 ff 00 02 00008000",
    ),
    "int4 from -5 to 10: scale 1, zero point 5 in the scale's last bits": (
        "int4_th",
        [-5.0, 10.0, 0.0, 1.0, 0.5],
        "f0 65 05 00 0500803f",
    ),
    "int4 of one sign keeps zero in its range": (
        "int4_th",
        [15.0, 14.0],
        "ef 00 00 00 0000803f",
    ),
    "int4 of the other sign": ("int4_th", [-15.0, -14.0], "10 00 00 00 0f00803f"),
    "e2m1 pairs: even element low; every value, both signs, amax 6 gives 2^0": (
        "mxfp4",
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.25] + [0.75, 1.25] * 8,
        "10 32 54 76 a9 cb ed 0f 22 22 22 22 22 22 22 22 7f",
    ),
    "just above 6 * 2^0 the exponent goes up: nothing saturates": (
        "mxfp4",
        [6.03125] + [0.0] * 31,
        "05" + "00" * 15 + "80",
    ),
    "a zero block: exponent byte 1, codes 0": ("mxfp4", [0.0] * 32, "00" * 16 + "01"),
    "nvfp4 of 6 and 3: scale 1 is e4m3 0x38": (
        "nvfp4",
        [6.0, 3.0] * 8 + [0.0] * 16,
        "57" * 8 + "00" * 8 + "38 01",
    ),
    "mxfp8: 448 * 2^-3": ("mxfp8", [56.0] + [0.0] * 31, "7e" + "00" * 31 + "7c"),
    "a zero index row: amax floor 1e-4, scale 2^-22": (
        "index_fp8_132",
        [0.0] * 128,
        "00" * 128 + "00008034",
    ),
    "the same on SM100: four e8m0 bytes": (
        "index_fp8_132_e8m0",
        [0.0] * 128,
        "00" * 128 + "69696969",
    ),
    "four index blocks, four exponents": (
        "index_mxfp4_68",
        [6.0] * 32 + [12.0] * 32 + [3.0] * 32 + [0.0] * 32,
        "77" * 48 + "00" * 16 + "7f 80 7e 01",
    ),
    "656: four scales behind the codes, then rope": (
        "mla_fp8_656",
        [448.0] * 128 + [896.0] * 128 + [224.0] * 128 + [0.0] * 128 + [1.0] * 64,
        "7e" * 384 + "00" * 128 + "0000803f 00000040 0000003f 00008034" + "803f" * 64,
    ),
    "584: seven e8m0 and a spare byte, last": (
        "mla_fp8_584",
        [448.0] * 448 + [-2.0] * 64,
        "7e" * 448 + "00c0" * 64 + "7f" * 7 + "00",
    ),
    "528: rope is scaled like the rest": (
        "mla_fp8_528",
        [448.0] * 480 + [896.0] * 32,
        "7e" * 512 + "7f" * 15 + "80",
    ),
    "352: scale of tile s at byte 8 * (s % 4) + s // 4, rope unscaled": (
        "mla_nvfp4_352",
        [6.0 * 2.0**t for t in range(-4, 4) for _ in range(64)] + [1000.0] * 64,
        "77" * 256 + "7e" * 64 + "18 20 28 30 38 40 48 50" * 4,
    ),
}


@pytest.mark.parametrize("claim", GOLDEN)
def test_golden_bytes(claim: str) -> None:
    name, values, expected = GOLDEN[claim]
    x = torch.tensor(values, dtype=torch.float32)
    assert encode_rows(format_of(name), x).numpy().tobytes().hex() == expected.replace(" ", "")


# --- and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", oracle.BYTES)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_any_bytes_decode_as_first_principles_say(name: str, seed: int) -> None:
    length, words, halfwords, decoder = oracle.BYTES[name]
    source = torch.Generator().manual_seed(seed)
    random = torch.randint(0, 256, (length,), generator=source).to(torch.uint8)
    row = oracle.finite_words(random.numpy().tobytes(), words, halfwords)
    stored = torch.tensor(list(row), dtype=torch.uint8)
    decoded = decode_rows(format_of(name), stored, size=size_of(name), dtype=torch.float64)
    numbers = [None if math.isnan(x) else Fraction(x) for x in decoded.tolist()]
    assert numbers == decoder(row)


def relative_error(name: str) -> float:
    """Half a step of the format's coarsest rounding, relative to a tile's largest element."""
    bits = {"int8_th": 1 / 254, "int4_th": 1 / 15}
    wide = "fp4" in name
    return bits.get(name, 1 / 4 if wide else 1 / 16)


@pytest.mark.parametrize("name", oracle.ROWS)
def test_a_decoded_row_is_near_what_was_stored(name: str) -> None:
    x = random_rows(50, size_of(name), 3, spread=1)
    back = decode_rows(format_of(name), encode_rows(format_of(name), x), size=x.shape[1])
    tile = format_of(name).tile(x.shape[1])
    error, amax = (t.split(tile, dim=1) for t in ((back - x).abs(), x.abs()))
    for e, a in zip(error, amax, strict=True):
        # int4 spreads its codes over both signs, so its step is relative to twice amax.
        assert (e <= relative_error(name) * a.amax(dim=1, keepdim=True) + 1e-30).all()


@pytest.mark.parametrize("name", oracle.ROWS)
def test_encoding_what_was_decoded_gives_the_same_numbers(name: str) -> None:
    fmt = format_of(name)
    x = random_rows(50, size_of(name), 4)
    once = decode_rows(fmt, encode_rows(fmt, x), size=x.shape[1])
    twice = decode_rows(fmt, encode_rows(fmt, once), size=x.shape[1])
    # A ratio scale is rounded, so it may move by one step of its own; powers of two stay.
    exact = fmt.scale is not None and fmt.scale.rule.name == "POWER_OF_TWO"
    assert torch.equal(once, twice) if exact else torch.allclose(once, twice, rtol=0.13)


@pytest.mark.parametrize("name", oracle.ROWS)
def test_decoding_in_float64_is_exact_and_float32_is_its_rounding(name: str) -> None:
    rows = encode_rows(format_of(name), random_rows(20, size_of(name), 5))
    size = size_of(name)
    exact = decode_rows(format_of(name), rows, size=size, dtype=torch.float64)
    assert torch.equal(decode_rows(format_of(name), rows, size=size), exact.float())


@pytest.mark.parametrize("name", PLAIN)
def test_plain_rows_are_torchs_own(name: str) -> None:
    x = torch.randn(5, 2, 33, dtype=torch.float64)
    rows = encode_rows(format_of(name), x)
    kept = x.to(getattr(torch, name))
    assert torch.equal(rows, kept.view(torch.uint8))
    assert torch.equal(decode_rows(format_of(name), rows, size=33, dtype=kept.dtype), kept)


@pytest.mark.parametrize("name", oracle.ROWS)
def test_the_input_is_not_modified_and_its_strides_do_not_matter(name: str) -> None:
    size = size_of(name)
    wide = random_rows(6, 2 * size + 3, 6)
    before = wide.clone()
    part = wide[::2, 3 : 3 + size]
    rows = encode_rows(format_of(name), part)
    assert torch.equal(wide, before)
    assert torch.equal(rows, encode_rows(format_of(name), part.contiguous()))
    padded = torch.zeros(3, rows.shape[1] + 5, dtype=torch.uint8)
    padded[:, 1:-4] = rows
    back = decode_rows(format_of(name), padded[:, 1:-4], size=size)
    assert torch.equal(back, decode_rows(format_of(name), rows, size=size))


# --- scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", oracle.ROWS)
@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_zeros_decode_to_exact_zeros(name: str, sign: float) -> None:
    x = torch.full((2, size_of(name)), sign)
    back = decode_rows(format_of(name), encode_rows(format_of(name), x), size=x.shape[1])
    assert torch.equal(back, torch.zeros_like(x))


@pytest.mark.parametrize("name", [n for n in oracle.ROWS if n != "mla_nvfp4_352"])
@pytest.mark.parametrize("magnitude", [3.3e38, 1e30, 1e-4, 2.0**-126, 2.0**-140])
def test_no_finite_row_becomes_nan_or_infinite(name: str, magnitude: float) -> None:
    x = torch.full((1, size_of(name)), magnitude)
    x[:, ::2] *= -1
    back = decode_rows(
        format_of(name), encode_rows(format_of(name), x), size=x.shape[1], dtype=torch.float64
    )
    assert back.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", oracle.ROWS)
def test_what_is_not_finite_spoils_its_tile_and_nothing_else(name: str, bad: float) -> None:
    fmt, size = format_of(name), size_of(name)
    x = random_rows(3, size, 7)
    clean = decode_rows(fmt, encode_rows(fmt, x), size=size)
    x[1, 1] = bad
    back = decode_rows(fmt, encode_rows(fmt, x), size=size)
    tile = fmt.tile(size)
    assert back[1, :tile].isnan().all()
    spoiled = torch.zeros_like(x, dtype=torch.bool)
    spoiled[1, :tile] = True
    assert torch.equal(back[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "nan"),
    [("int8_th", "0000c07f"), ("int4_th", "0000c07f"), ("mxfp4", "ff"), ("nvfp4", "7f")],
)
def test_the_scale_of_such_a_tile_is_nan(name: str, nan: str, bad: float) -> None:
    x = torch.zeros(32)
    x[3] = bad
    row = encode_rows(format_of(name), x)
    data = format_of(name).code_bytes(32)
    assert row[data:].numpy().tobytes().hex()[: len(nan)] == nan


@pytest.mark.parametrize("name", sorted(set(oracle.ROWS) - {"int4_th"}))  # has a zero point
def test_minus_x_is_stored_as_the_negative_of_x(name: str) -> None:
    fmt, size = format_of(name), size_of(name)
    x = random_rows(20, size, 8)
    plus = decode_rows(fmt, encode_rows(fmt, x), size=size)
    minus = decode_rows(fmt, encode_rows(fmt, -x), size=size)
    assert torch.equal(plus, -minus)


def test_int8_never_stores_minus_128() -> None:
    x = random_rows(200, 64, 9)
    assert not (encode_rows(format_of("int8_th"), x)[:, :64] == 0x80).any()


@pytest.mark.parametrize("size", [1, 2, 65])
def test_int4_stores_zero_exactly(size: int) -> None:
    x = random_rows(100, size, 10) + 5.0
    x[:, 0] = 0.0
    fmt = format_of("int4_th")
    assert (decode_rows(fmt, encode_rows(fmt, x), size=size)[:, 0] == 0).all()


@pytest.mark.parametrize("fmt", GIVEN, ids=lambda f: f.encoding.value)
def test_a_given_scale_divides_on_write_and_multiplies_on_read(fmt) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0]])
    rows = encode_rows(fmt, x * 0.25, scale=torch.tensor([0.25]))
    assert torch.equal(rows, encode_rows(fmt, x))
    assert torch.equal(decode_rows(fmt, rows, size=3, scale=torch.tensor([0.5])), x * 0.5)


@pytest.mark.parametrize("fmt", GIVEN, ids=lambda f: f.encoding.value)
def test_each_head_has_its_own_scale(fmt) -> None:
    x = random_rows(5 * 3, 8, 11).reshape(5, 3, 8)
    scale = torch.tensor([0.5, 2.0, 8.0])
    rows = encode_rows(fmt, x, scale=scale)
    for head in range(3):
        alone = encode_rows(fmt, x[:, head : head + 1], scale=scale[head : head + 1])
        assert torch.equal(rows[:, head : head + 1], alone)
        back = decode_rows(fmt, alone, size=8, scale=scale[head : head + 1])
        assert torch.equal(decode_rows(fmt, rows, size=8, scale=scale)[:, head : head + 1], back)


def test_each_head_of_nvfp4_has_its_own_scale() -> None:
    fmt = format_of("nvfp4")
    x = random_rows(5 * 3, 32, 12).reshape(5, 3, 32)
    scale = torch.tensor([0.01, 0.5, 3.0])
    rows = encode_rows(fmt, x, scale=scale)
    back = decode_rows(fmt, rows, size=32, scale=scale)
    for head in range(3):
        one = slice(head, head + 1)
        alone = encode_rows(fmt, x[:, one], scale=scale[one])
        assert torch.equal(rows[:, one], alone)
        assert torch.equal(decode_rows(fmt, alone, size=32, scale=scale[one]), back[:, one])


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "nvfp4"])
def test_a_scale_of_zero_stores_zeros(name: str) -> None:
    fmt, scale = format_of(name), torch.tensor([0.0])
    x = random_rows(2, 16, 13)
    rows = encode_rows(fmt, x, scale=scale)
    assert torch.equal(decode_rows(fmt, rows, size=16, scale=scale), torch.zeros(2, 16))
    codes = rows[:, : fmt.code_bytes(16)]
    assert not codes.any()


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_computed_scale_reaches_the_largest_and_saturates_nothing(
    name: str, per_head: bool
) -> None:
    fmt = format_of(name)
    x = random_rows(40 * 4, 16, 14).reshape(40, 4, 16)
    scale = amax_scale(fmt, x, per_head=per_head)
    assert scale.shape == (4 if per_head else 1,)
    back = decode_rows(fmt, encode_rows(fmt, x, scale=scale), size=16, scale=scale)
    dims = (0, 2) if per_head else (0, 1, 2)
    assert torch.allclose(back.abs().amax(dims), x.abs().amax(dims), rtol=1e-6)
    zero = amax_scale(fmt, torch.zeros(1, 4, 16), per_head=per_head)
    assert (zero == 2.0**-126).all()


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("fp8_e4m3fn", 448.0),
        ("fp8_e4m3fnuz", 224.0),
        ("fp8_e5m2", 57344.0),
        ("nvfp4", 6.0 * 448.0),  # the largest code times the largest scale of a tile
    ],
)
def test_the_computed_scale_is_1_for_the_largest_that_codes_reach(
    name: str, largest: float
) -> None:
    x = torch.tensor([[[-largest] + [1.0] * 15]])
    assert amax_scale(format_of(name), x).tolist() == [1.0]


def test_scales_of_other_writers_are_decoded_as_they_are() -> None:
    """656: a raw float32; 132 of SM100: four different bytes; scale 0; NaN."""
    row = torch.zeros(656, dtype=torch.uint8)
    row[:512] = 0x38
    scales = torch.tensor([0.3, 0.0, float("nan"), 1e-42])
    row[512:528] = scales.view(torch.uint8)
    back = decode_rows(format_of("mla_fp8_656"), row, size=576)
    assert same_numbers(back[:512:128], scales)
    row = torch.full((132,), 0x38, dtype=torch.uint8)
    row[128:] = torch.tensor([126, 127, 128, 255], dtype=torch.uint8)
    back = decode_rows(format_of("index_fp8_132_e8m0"), row, size=128)
    assert same_numbers(back[::32], torch.tensor([0.5, 1.0, 2.0, float("nan")]))


# --- keys and values -------------------------------------------------------------------------


def test_keys_and_values_have_their_own_sizes_and_scales() -> None:
    fmt = format_of("fp8_e4m3fn")
    k, v = torch.ones(2, 3, 8), torch.ones(2, 3, 4)
    scales = dict(k_scale=torch.tensor([0.5]), v_scale=torch.tensor([0.25]))
    k_rows, v_rows = encode(fmt, k, v, **scales)
    back = decode(fmt, k_rows, v_rows, head_size=8, v_head_size=4, **scales)
    assert torch.equal(back[0], k) and torch.equal(back[1], v)
    swapped = dict(k_scale=scales["v_scale"], v_scale=scales["k_scale"])
    wrong = decode(fmt, k_rows, v_rows, head_size=8, v_head_size=4, **swapped)
    assert torch.equal(wrong[0], k / 2) and torch.equal(wrong[1], v * 2)


def test_latent_values_are_the_beginning_of_the_keys() -> None:
    fmt = format_of("mla_fp8_656")
    rows, none = encode(fmt, random_rows(4, 576, 15).reshape(4, 1, 576))
    k, v = decode(fmt, rows, head_size=576, v_head_size=512)
    assert none is None
    assert torch.equal(v, k[..., :512])


def test_index_rows_have_no_values() -> None:
    fmt = format_of("index_mxfp4_68")
    rows, _ = encode(fmt, random_rows(4, 128, 16).reshape(4, 1, 128))
    assert decode(fmt, rows, head_size=128)[1] is None


X = torch.zeros(2, 4, 64)
REFUSED = {
    "a row size of another format": (
        lambda: encode_rows(format_of("mla_fp8_656"), X),
        ConfigError,
        "mla_fp8_656 stores rows of 576 elements; this one has 64",
    ),
    "a row size that tiles do not fill": (
        lambda: encode_rows(format_of("mxfp4"), X[..., :40]),
        ConfigError,
        r"multiple of 32 elements; this one has 40 \(closest: 32\)",
    ),
    "integers": (
        lambda: encode_rows(format_of("fp8_th"), X.int()),
        PlanMismatchError,
        "x has dtype torch.int32",
    ),
    "what is no tensor": (
        lambda: encode_rows(format_of("fp8_th"), [1.0]),
        PlanMismatchError,
        "x is a list",
    ),
    "a scale per something else": (
        lambda: encode_rows(format_of("fp8_e4m3fn"), X, scale=torch.ones(3)),
        PlanMismatchError,
        r"scale has shape \[3\]; expected \[1\] or \[4\]",
    ),
    "a scale that is not float32": (
        lambda: encode_rows(format_of("fp8_e4m3fn"), X, scale=torch.ones(1).double()),
        PlanMismatchError,
        "scale has dtype torch.float64",
    ),
    "a scale for a plain format": (
        lambda: encode_rows(format_of("bfloat16"), X, scale=torch.ones(1)),
        UnsupportedCallError,
        "bfloat16 takes no scale of the caller",
    ),
    "a scale for a format that computes its own": (
        lambda: encode_rows(format_of("int8_th"), X, scale=torch.ones(1)),
        UnsupportedCallError,
        "int8_th takes no scale of the caller",
    ),
    "rows of another size": (
        lambda: decode_rows(format_of("int8_th"), torch.zeros(2, 64).byte(), size=64),
        PlanMismatchError,
        r"rows has shape \[2, 64\]; expected \[any, 68\]",
    ),
    "values for a latent format": (
        lambda: encode(format_of("mla_fp8_528"), torch.zeros(1, 1, 512), X),
        UnsupportedCallError,
        "mla_fp8_528 stores no values of their own",
    ),
    "keys alone": (
        lambda: encode(format_of("fp8_th"), X),
        UnsupportedCallError,
        "fp8_th stores values; v is None",
    ),
    "key rows alone": (
        lambda: decode(format_of("fp8_th"), torch.zeros(2, 4, 68).byte(), head_size=64),
        UnsupportedCallError,
        "fp8_th stores values; v_rows is None",
    ),
    "a scale computed for a format that takes none": (
        lambda: amax_scale(format_of("mxfp8"), X),
        UnsupportedCallError,
        "mxfp8 takes no scale of the caller",
    ),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_refused(claim: str) -> None:
    call, error, message = REFUSED[claim]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", oracle.ROWS)
def test_no_rows_are_no_rows(name: str) -> None:
    fmt, size = format_of(name), size_of(name)
    rows = encode_rows(fmt, torch.zeros(0, size))
    assert rows.shape == (0, fmt.row_bytes(size))
    assert decode_rows(fmt, rows, size=size).shape == (0, size)

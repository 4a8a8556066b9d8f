"""Every code of every element decodes to its number, and every number to its nearest code.

First principles decide. ml_dtypes agrees but where it overflows; torch's casts agree inside the
range alone, so the codecs use neither.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from attnplat.backends.formats.element_codec import (
    decode_elements,
    encode_elements,
    pack,
    relabel_fn_as_fnuz,
    relabel_fnuz_as_fn,
    unpack,
)
from attnplat.backends.formats.elements import (
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    INT8,
    UINT4,
    Minifloat,
)
from attnplat.backends.formats.scales import power_of_two
from tests.execution.formats import first_principles as oracle

FLOATS = [E4M3FN, E4M3FNUZ, E5M2, E2M1]
INTEGERS = [INT8, UINT4]
ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TORCH = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
}


def named(element) -> str:
    return element.name


def all_codes(element) -> torch.Tensor:
    return torch.arange(1 << element.bits).to(torch.uint8)


def all_bfloat16() -> torch.Tensor:
    return torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16)


def around_every_boundary(element: Minifloat) -> torch.Tensor:
    """Each value, each midpoint, and the float32 neighbours of both."""
    values = decode_elements(element, all_codes(element))
    values = values[values.isfinite()].sort().values.unique()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    up = torch.nextafter(points, torch.tensor(math.inf))
    down = torch.nextafter(points, torch.tensor(-math.inf))
    return torch.cat((points, up, down))


# --- decode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("element", FLOATS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_code_decodes_to_its_number(element: Minifloat, dtype: torch.dtype) -> None:
    decoded = decode_elements(element, all_codes(element), dtype).tolist()
    _, _, infinite = oracle.DEFINITIONS[element.name]
    for code, number in enumerate(decoded):
        expected = oracle.value(element.name, code)
        if expected is oracle.NAN:
            assert math.isnan(number)
        elif code in infinite:
            assert math.isinf(number) and (number < 0) == (code > 127)
        else:
            assert Fraction(number) == expected
            if number == 0:
                assert math.copysign(1, number) == (-1 if code else 1)


@pytest.mark.parametrize("element", FLOATS, ids=named)
def test_ml_dtypes_decodes_every_code_alike(element: Minifloat) -> None:
    codes = all_codes(element)
    theirs = codes.numpy().view(ML_DTYPES[element.name]).astype(np.float32)
    assert np.array_equal(decode_elements(element, codes).numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("name", TORCH)
def test_torch_decodes_every_code_alike(name: str) -> None:
    element = next(e for e in FLOATS if e.name == name)
    codes = all_codes(element)
    theirs = codes.view(TORCH[name]).float()
    assert torch.equal(decode_elements(element, codes).nan_to_num(7e8), theirs.nan_to_num(7e8))


def test_integers_decode_to_themselves() -> None:
    assert decode_elements(INT8, all_codes(INT8)).tolist() == [*range(128), *range(-128, 0)]
    assert decode_elements(UINT4, all_codes(UINT4)).tolist() == list(range(16))


# --- encode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("element", FLOATS, ids=named)
def test_every_bfloat16_goes_to_its_nearest_code(element: Minifloat) -> None:
    x = all_bfloat16()
    finite = x[x.isfinite() & (x != 0)]
    nearest = oracle.nearest_code(element.name)
    expected = [nearest(Fraction(v)) for v in finite.tolist()]
    assert encode_elements(element, finite).tolist() == expected


@pytest.mark.parametrize("element", FLOATS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_and_their_neighbours_go_to_the_nearest_code(
    element: Minifloat, dtype: torch.dtype
) -> None:
    x = around_every_boundary(element).to(dtype)
    x = x[x != 0]
    nearest = oracle.nearest_code(element.name)
    expected = [nearest(Fraction(v)) for v in x.tolist()]
    assert encode_elements(element, x).tolist() == expected


def test_float64_is_not_rounded_twice() -> None:
    just_above_a_tie = torch.tensor([17.0 + 2.0**-40], dtype=torch.float64)
    assert encode_elements(E4M3FN, just_above_a_tie).item() == 0x59
    assert encode_elements(E4M3FN, just_above_a_tie.float()).item() == 0x58


@pytest.mark.parametrize("element", FLOATS, ids=named)
def test_ml_dtypes_encodes_alike_up_to_the_largest(element: Minifloat) -> None:
    x = torch.cat((all_bfloat16().float(), around_every_boundary(element)))
    x = x[x.abs() <= element.largest]
    theirs = x.numpy().astype(ML_DTYPES[element.name]).view(np.uint8)
    assert np.array_equal(encode_elements(element, x).numpy(), theirs)


@pytest.mark.parametrize("name", TORCH)
def test_torch_encodes_alike_up_to_the_largest(name: str) -> None:
    element = next(e for e in FLOATS if e.name == name)
    x = torch.cat((all_bfloat16().float(), around_every_boundary(element)))
    x = x[x.abs() <= element.largest]
    assert torch.equal(encode_elements(element, x), x.to(TORCH[name]).view(torch.uint8))


@pytest.mark.parametrize("element", FLOATS, ids=named)
def test_every_number_that_has_a_code_keeps_it(element: Minifloat) -> None:
    codes = all_codes(element)
    values = decode_elements(element, codes)
    kept = values.isfinite()
    assert torch.equal(encode_elements(element, values[kept]), codes[kept])


@pytest.mark.parametrize(
    ("element", "largest"), [(E4M3FN, 448), (E4M3FNUZ, 240), (E5M2, 57344), (E2M1, 6)]
)
def test_beyond_the_largest_the_largest_is_stored(element: Minifloat, largest: int) -> None:
    """ml_dtypes gives NaN from 465 on for e4m3fn, torch NaN for fnuz and infinity for e5m2."""
    beyond = [largest * 1.01, largest * 1.0625, largest * 1.5, 1e30, math.inf]
    x = torch.tensor([*beyond, *(-b for b in beyond)])
    back = decode_elements(element, encode_elements(element, x))
    assert back.tolist() == [largest] * 5 + [-largest] * 5


@pytest.mark.parametrize(
    ("element", "code"), [(E4M3FN, 0x7F), (E4M3FNUZ, 0x80), (E5M2, 0x7F), (E2M1, 0x7), (INT8, 0)]
)
def test_nan_is_stored_as_the_formats_nan(element: Minifloat, code: int) -> None:
    x = torch.tensor([math.nan, -math.nan])
    assert encode_elements(element, x).tolist() == [code, code]


@pytest.mark.parametrize("element", FLOATS, ids=named)
def test_zero_keeps_its_sign_where_there_is_a_negative_zero(element: Minifloat) -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    minus = element.sign if element.negative_zero else 0
    assert encode_elements(element, x).tolist() == [0, minus, 0, minus]


def test_integers_round_half_to_even_and_stop_at_their_ends() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.6, 500.0, -127.5, -128.0, -math.inf])
    codes = encode_elements(INT8, x).view(torch.int8)
    assert codes.tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -127, -127, -127]
    x = torch.tensor([-3.0, -0.5, 0.5, 7.5, 8.5, 14.6, 99.0])
    assert encode_elements(UINT4, x).tolist() == [0, 0, 0, 8, 8, 15, 15]


@pytest.mark.parametrize("element", INTEGERS, ids=named)
def test_integers_keep_their_own_codes(element) -> None:
    codes = all_codes(element)
    if element is INT8:
        codes = codes[codes != 0x80]
    assert torch.equal(encode_elements(element, decode_elements(element, codes)), codes)


# --- powers of two ---------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [6.0, 448.0, 224.0])
def test_the_exponent_is_the_smallest_that_holds_the_largest(largest: float) -> None:
    x = all_bfloat16().float()
    x = x[x.isfinite() & (x > 0)]
    exponents = power_of_two(x, largest).tolist()
    for amax, exponent in zip(map(Fraction, x.tolist()), exponents, strict=True):
        assert amax <= Fraction(largest) * oracle.two_to(exponent) < 2 * amax


@pytest.mark.parametrize("largest", [6.0, 448.0, 224.0])
def test_one_step_past_a_power_of_two_the_exponent_goes_up(largest: float) -> None:
    """A float32 logarithm, or a cast of the ratio, gives the lower exponent here."""
    edges = torch.tensor([largest * 2.0**e for e in range(-100, 100)])
    beyond = torch.nextafter(edges, torch.tensor(math.inf))
    assert power_of_two(edges, largest).tolist() == list(range(-100, 100))
    assert power_of_two(beyond, largest).tolist() == list(range(-99, 101))


# --- packing, and the other form of e4m3 -----------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 7, 32])
def test_packed_codes_come_apart_again(size: int) -> None:
    codes = torch.arange(3 * size).reshape(3, size).to(torch.uint8) % 16
    stored = pack(E2M1, codes)
    assert stored.shape == (3, -(-size // 2))
    assert torch.equal(unpack(E2M1, stored, size), codes)
    assert torch.equal(unpack(INT8, pack(INT8, codes), size), codes)


def test_the_even_element_is_in_the_low_half() -> None:
    assert pack(E2M1, torch.tensor([0x1, 0x2, 0xF], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_relabelled_e4m3_keeps_every_number_at_twice_the_scale() -> None:
    codes = all_codes(E4M3FN)
    fn = decode_elements(E4M3FN, codes)
    fnuz = decode_elements(E4M3FNUZ, relabel_fn_as_fnuz(codes)) * 2
    assert torch.equal(fn.nan_to_num(7e8), fnuz.nan_to_num(7e8))


def test_relabelling_back_is_exact_up_to_what_fn_cannot_hold() -> None:
    codes = all_codes(E4M3FNUZ)
    fnuz = decode_elements(E4M3FNUZ, codes)
    fn = decode_elements(E4M3FN, relabel_fnuz_as_fn(codes)) / 2
    changed = (fn.nan_to_num(7e8) != fnuz.nan_to_num(7e8)).nonzero().flatten().tolist()
    assert changed == [0x7F, 0xFF]
    assert fn[changed].tolist() == [224.0, -224.0]

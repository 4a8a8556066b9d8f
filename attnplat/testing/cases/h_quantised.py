"""H: quantised keys, values and outputs.

Bytes are checked against definitions written out here. Implementations are asked to attend to
what the bytes mean, and to write what the codec writes, in every format that they store.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnplat.backends.formats.elements import Minifloat
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.formats.facts import FORMATS, Format, format_of
from attnplat.errors import ConfigError, UnsupportedCallError
from attnplat.testing.bench import Bench, agrees, raises
from attnplat.testing.bits import differing
from attnplat.testing.case import CaseList, Check, Checks, Failed
from attnplat.testing.cases import definitions
from attnplat.testing.cases.codecs import check, decoded, encoded, expect, row
from attnplat.testing.compare import CONTRACT, gap
from attnplat.testing.inputs import edges, generator, normal
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.terrain import Terrain
from attnplat.testing.truth import Request

H = CaseList("H", "quantised keys, values and outputs")

CODED = tuple(f for e, f in FORMATS.items() if e not in PLAIN_ENCODINGS)
COMPUTED = tuple(f for f in CODED if not f.needs)
"""Formats that compute their scales."""


def _size(format: Format) -> int:
    """A row size that the format stores."""
    return format.size or 64


LENS = ([1, 3, 1, 18], [40, 20, 1, 18])


def coded(
    t: Terrain,
    encoding: str,
    *,
    k_scale: Sequence[float] | None = None,
    v_scale: Sequence[float] | None = None,
    **changes: object,
) -> Scene:
    """A step whose cache is coded, its keys' edges marked; scales as given."""
    format = format_of(encoding)
    scales = [(None if s is None else torch.tensor(list(s))) for s in (k_scale, v_scale)]
    if not format.needs:
        scales = [None, None]
    if format.latent:
        scales[1] = None
    scene = edges(normal(t.coded(encoding, **changes), *LENS))
    return scene.replace(
        encoding=Encoding(encoding), k_scale=scales[0], v_scale=scales[1], note=encoding
    )


def stored_by_layers() -> tuple[str, ...]:
    """The coded formats that attention layers can have."""
    return tuple(f.encoding.value for f in CODED if not f.keys_only)


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """(-1)^s * 2^(e - bias) * 1.m, or 2^(1 - bias) * 0.m; NaN and infinity not looked at."""
    mantissa = code % 2**mantissa_bits * 2.0**-mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias))
    return float(sign * (1 + mantissa) * 2.0 ** (exponent - bias))


def _e4m3fn(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else minifloat(code, 4, 3, 7)


def _e4m3fnuz(code: int) -> float:
    return math.nan if code == 0x80 else minifloat(code, 4, 3, 8)


def _e5m2(code: int) -> float:
    if code & 0x7F > 0x7C:
        return math.nan
    if code & 0x7F == 0x7C:
        return -math.inf if code & 0x80 else math.inf
    return minifloat(code, 5, 2, 15)


EIGHT_BIT = {"fp8_e4m3fn": _e4m3fn, "fp8_e4m3fnuz": _e4m3fnuz, "fp8_e5m2": _e5m2}
LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e4m3fnuz": 240.0, "fp8_e5m2": 57344.0}


@H.case(1, "Every byte means what its format says, fn and fnuz apart, whatever the device")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        codes = torch.arange(256, dtype=torch.uint8)[:, None]
        for name, value in EIGHT_BIT.items():
            wanted = torch.tensor([value(code) for code in range(256)], dtype=torch.float64)
            expect(name, decoded(bench, name, codes, 1).flatten(), wanted)

    def plain(bench: Bench) -> None:
        x = torch.randn(5, 6, generator=generator("plain"), dtype=torch.float64)
        for name in sorted(PLAIN_ENCODINGS):
            own = x.to(getattr(torch, name.value))
            stored = encoded(bench, name.value, x)
            expect(f"bytes of {name}", stored, own.view(torch.uint8))
            expect(name.value, decoded(bench, name.value, stored, 6), own.double())

    yield check("formats that torch stores", plain)

    def relabelled(bench: Bench) -> None:
        library, codes = bench.subject.library, torch.arange(256, dtype=torch.uint8)
        there = library.relabel_fn_as_fnuz(codes.to(bench.device)).cpu()
        wanted = [_e4m3fn(code) / 2 for code in range(256)]
        expect("fn as fnuz", torch.tensor([_e4m3fnuz(int(c)) for c in there]), wanted)
        back = library.relabel_fnuz_as_fn(codes.to(bench.device)).cpu()
        # fn has no 480.
        wanted = [max(-448.0, min(448.0, 2 * _e4m3fnuz(c))) if c != 0x80 else math.nan
                  for c in range(256)]  # fmt: skip
        expect("fnuz as fn", torch.tensor([_e4m3fn(int(c)) for c in back]), wanted)

    yield check("all codes of three formats", run)
    yield check("fn relabelled as fnuz, and back", relabelled)
    for name in stored_by_layers():
        scene = coded(t, name, k_scale=[1.0], v_scale=[1.0])
        yield agrees(scene, t.pages())
        for write in ("fused", "first"):
            yield agrees(scene, t.pages(write=write, layout=t.layouts[-1], padding=3))


@H.case(2, "A scale multiplies on reading and divides on writing, and is never ignored")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        scale = torch.tensor([4.0], device=bench.device)
        for name, value in EIGHT_BIT.items():
            stored = encoded(bench, name, torch.tensor([8.0, -1.0, 96.0]), scale=scale)
            plain = torch.tensor([value(int(code)) for code in stored], dtype=torch.float64)
            expect(f"codes of {name}", plain, [2.0, -0.25, 24.0])
            expect(name, decoded(bench, name, stored, 3, scale=scale), [8.0, -1.0, 96.0])

    yield check("a scale of 4", run)
    for format in CODED:
        yield by_definition(format)
    for name in [*EIGHT_BIT, "nvfp4"]:
        scene = coded(t, name, k_scale=[0.25], v_scale=[4.0])
        for write in ("done", "fused", "first"):
            yield agrees(scene, t.pages(write=write))


def by_definition(format: Format) -> Check:
    """Rows of many sizes of numbers are the bytes, and mean the numbers, that they must."""
    name = format.encoding.value

    def run(bench: Bench) -> None:
        for size in [format.size] if format.size else [64, 96, 7][: 2 + (not format.scales_apart)]:
            x = _awkward(size, name)
            for given in [None, 1.0, 0.3, 64.0] if format.needs else [None]:
                scale = None if given is None else torch.tensor([given], device=bench.device)
                factor = None if given is None else float(torch.tensor(given))
                stored = encoded(bench, name, x, scale=scale)
                rows = x.tolist()
                wanted = [list(definitions.encode(format, values, factor)) for values in rows]
                expect(f"bytes of {name}", stored.double(), torch.tensor(wanted).double())
                meant = [definitions.meaning(format, values, factor) for values in rows]
                back = decoded(bench, name, stored, size, scale=scale)
                expect(f"numbers of {name}", back, torch.tensor(meant, dtype=torch.float64))
                encode = bench.subject.library.encode_rows
                one = encode(format, x[3].to(bench.device), scale=scale).cpu()
                expect(f"one row of {name} alone", one.double(), stored[3].double())
                heads = encode(format, x[None].to(bench.device), scale=scale).cpu()
                expect(f"rows of {name} as heads", heads[0].double(), stored.double())

    return check(f"{name} by its definition", run)


def _awkward(size: int, name: str) -> torch.Tensor:
    """Rows of numbers of all sizes, of one sign, exact powers of two and ties among them."""
    gen = generator("awkward", name, size)
    x = torch.randn(13, size, generator=gen)
    x *= torch.tensor([1e-30, 1e-6, 1e-3, 1.0, 300.0, *[1.0] * 8])[:, None]
    x[5], x[6] = x[5].abs() + 1, -x[6].abs() - 1
    steps = torch.randint(-30, 31, (size,), generator=gen)
    # Quarters: what is halfway between two codes of every format, and the largest of each.
    x[7] = steps / 4
    # Of 4-bit integers: a scale of 1, a zero point of 3, and ties.
    ties = torch.tensor([-3.0, 12.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.5])
    x[11] = ties.repeat(size)[:size]
    # The zero point and the largest both round up, to one more than 4 bits hold.
    x[12] = torch.tensor([-3.5, 11.5, 0.0, 1.0]).repeat(size)[:size]
    x[9] = 0
    x[10] = torch.randn(size, generator=gen) * 1e-40
    x[8] = torch.tensor([448.0, 240.0, 6.0, 7.0, 0.0, -0.0, 127.0, 512.0]).repeat(size)[:size]
    return x


@H.case(3, "A token of zeros has zeros for codes and decodes to zeros, no 0/0")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for format in CODED:
            name, size = format.encoding.value, _size(format)
            for given in [1.0, 0.0] if format.needs else [None]:
                scale = (
                    {} if given is None else {"scale": torch.tensor([given], device=bench.device)}
                )
                stored = encoded(bench, name, torch.zeros(2, size), **scale)
                expect(
                    f"zeros in {name}",
                    decoded(bench, name, stored, size, **scale),
                    torch.zeros(2, size),
                )

    yield check("zeros in every format", run)
    for name in stored_by_layers():
        scene = coded(t, name)
        requests = [_zeroed(request) for request in scene.requests]
        yield agrees(scene.replace(requests=tuple(requests)), t.pages(write="fused"))


def _zeroed(request: Request) -> Request:
    """Every other key and value of the request 0."""
    k, v = request.k.clone(), None if request.v is None else request.v.clone()
    k[::2] = 0
    if v is not None:
        v[1::2] = 0
    return replace(request, k=k, v=v)


@H.case(4, "Values beyond the range saturate; encoding never makes NaN or infinity")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        x = torch.tensor([1e6, -1e6, 3e38, -math.inf, math.inf])
        for name, largest in LARGEST.items():
            back = decoded(bench, name, encoded(bench, name, x), len(x))
            expect(name, back, [largest, -largest, largest, -largest, largest])
        for format in COMPUTED:
            name, size = format.encoding.value, _size(format)
            gen = generator("range", name)
            wide = torch.randn(4, size, generator=gen) * torch.tensor(
                [[1e-30], [1.0], [1e4], [1e30]]
            )
            back = decoded(bench, name, encoded(bench, name, wide), size)
            if not bool(torch.isfinite(back).all()):
                raise Failed(f"{name} makes something not finite of finite values")

    yield check("beyond the range", run)


@H.case(5, "A NaN in one token stays in that token")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for format in CODED:
            name, size = format.encoding.value, _size(format)
            x = torch.randn(3, size, generator=generator("nan", name))
            plain = encoded(bench, name, x)
            x[1, 2] = math.nan
            spoilt = encoded(bench, name, x)
            for other in (0, 2):
                if differing(plain[other], spoilt[other]):
                    raise Failed(f"{name}: a NaN in token 1 changes token {other}")

    def spoilt(bench: Bench) -> None:
        for name in EIGHT_BIT:
            stored = encoded(bench, name, torch.tensor([1.0, math.nan, 2.0]))
            expect(f"a NaN in {name}", decoded(bench, name, stored, 3), [1.0, math.nan, 2.0])
        for format in COMPUTED:
            name, size = format.encoding.value, _size(format)
            for bad in (math.nan, math.inf, -math.inf):
                x = torch.randn(1, size, generator=generator("spoilt", name))
                x[0, 2] = bad
                back = decoded(bench, name, encoded(bench, name, x), size)
                tile = format.tile(size)
                if not bool(back[0, :tile].isnan().all()):
                    raise Failed(f"{name}: a tile with {bad} does not decode to NaN")
                if bool(back[0, tile:].isnan().any()):
                    raise Failed(f"{name}: {bad} in one tile spoils another")

    yield check("a NaN in every format", run)
    yield check("tiles with what is no number", spoilt)


@H.case(6, "A scale may be one a tensor or one a head")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        library = bench.subject.library
        for name in EIGHT_BIT:
            format = format_of(name)
            scale = torch.tensor([1.0, 4.0, 0.5], device=bench.device)
            x = torch.tensor([2.0, 16.0, 0.25], device=bench.device)[None, :, None].expand(5, 3, 8)
            stored = library.encode_rows(format, x.contiguous(), scale=scale)
            back = library.decode_rows(format, stored, size=8, scale=scale, dtype=torch.float64)
            expect(f"{name}, a scale a head", back.cpu(), x.double().cpu())
            plain = library.decode_rows(format, stored, size=8, dtype=torch.float64)
            wanted = (x / scale[None, :, None]).double()
            expect(f"{name}, scales divided", plain.cpu(), wanted.cpu())
            token = library.encode_rows(format, x[0].contiguous(), scale=scale)
            expect(f"{name}, one token", token.double().cpu(), stored[0].double().cpu())

    def found(bench: Bench) -> None:
        x = torch.randn(5, 3, 8, generator=generator("amax")).to(bench.device)
        x[2, 1, 3] = -11.0
        x[:, 2] = 0
        amax = x.abs().amax((0, 2)).cpu()
        for name in [*EIGHT_BIT, "nvfp4"]:
            format = format_of(name)
            assert isinstance(format.element, Minifloat)
            reach = format.element.headroom * (448.0 if name == "nvfp4" else 1.0)
            one = bench.subject.library.amax_scale(format, x).cpu()
            expect(f"scale of {name}", one, torch.tensor([11.0]) / reach)
            each = bench.subject.library.amax_scale(format, x, per_head=True).cpu()
            wanted = (amax / torch.full_like(amax, reach)).clamp(min=2.0**-126)
            expect(f"scales of {name}", each, wanted)
        for name in ("int8_th", "float16"):
            find = partial(bench.subject.library.amax_scale, format_of(name), x)
            raises(f"a scale for {name}", UnsupportedCallError, find)

    yield check("scales of three heads", run)
    yield check("scales from the largest magnitudes", found)
    for name in EIGHT_BIT:
        for heads in (4, 6):
            scene = coded(
                t, name, k_scale=[1.0, 0.25], v_scale=[0.5, 4.0], num_heads=heads,
                per_head_quant_scales=True,
            )  # fmt: skip
            for write in ("done", "fused"):
                yield agrees(scene, t.pages(write=write))


@H.case(7, "Keys have the keys' scale and values the values'")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        for name in EIGHT_BIT:
            shape = bench.subject.library.page_shape(
                format=format_of(name), block_size=4, num_kv_heads=2, head_size=8
            )
            pages = bench.subject.library.pages.allocate(shape, 3, bench.device)
            pages.pool.zero_()
            k, v = (torch.full((2, 2, 8), value, device=bench.device) for value in (8.0, 0.5))
            scales = {
                "k_scale": torch.tensor([4.0], device=bench.device),
                "v_scale": torch.tensor([0.25], device=bench.device),
            }
            slots = torch.tensor([5, 0], device=bench.device)
            pages.write(k, v, slots, **scales)
            plain_k, plain_v = pages.read()
            expect(
                f"codes of keys in {name}", plain_k[1, 1].double().cpu(), torch.full((2, 8), 2.0)
            )
            expect(
                f"codes of values in {name}", plain_v[0, 0].double().cpu(), torch.full((2, 8), 2.0)
            )
            read_k, read_v = pages.read(**scales)
            expect(f"keys in {name}", read_k[0, 0].double().cpu(), torch.full((2, 8), 8.0))
            expect(f"values in {name}", read_v[1, 1].double().cpu(), torch.full((2, 8), 0.5))

    yield check("k_scale 4, v_scale 1/4", run)
    for name in EIGHT_BIT:
        yield agrees(coded(t, name, k_scale=[2.0], v_scale=[0.125]), t.pages(write="first"))


@H.case(8, "int8 per token and head: no -128, ties to even, the greatest element exact")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        x = torch.zeros(3, 8)
        x[0] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0])
        x[1] = torch.tensor([-1e-3, 0, 0, 0, 0, 0, 0, 0])
        x[2] = torch.tensor([0, 0, 0, 3.0, 0, 0, 0, 0])
        stored = encoded(bench, "int8_th", x)
        codes = stored[:, :8].to(torch.int8)
        expect("codes", codes[0].double(), [127, 0, 2, 2, 0, -2, -126, -127])
        back = decoded(bench, "int8_th", stored, 8)
        if not torch.allclose(back, x.double(), rtol=1e-6, atol=0.5):
            raise Failed("int8 rows decode to something else")
        for index, at in ((1, 0), (2, 3)):
            if not math.isclose(float(back[index, at]), float(x[index, at]), rel_tol=1e-6):
                raise Failed("the greatest element of a row is not exact")
        every = torch.linspace(-300, 300, 4096).reshape(64, 64)
        if bool((encoded(bench, "int8_th", every)[:, :64].to(torch.int8) == -128).any()):
            raise Failed("-128 is emitted")

    yield check("int8_th", run)


@H.case(9, "Scales inside rows are aligned for any head size, and move with their block")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        gen = generator("move")
        for name in ("int8_th", "fp8_th", "fp8_th_fnuz", "int4_th"):
            for size in (7, 13, 64):
                x = torch.randn(2, size, generator=gen)
                stored = encoded(bench, name, x)
                if stored.shape[-1] % 4:
                    raise Failed(f"{name}: a row of {size} elements takes {stored.shape[-1]} bytes")
                back = decoded(bench, name, stored, size)
                if back.shape != x.shape or not torch.allclose(back, x.double(), atol=0.3):
                    raise Failed(f"{name}: a row of {size} elements decodes to something else")
        for format in CODED:
            shape = bench.subject.library.page_shape(
                format=format,
                block_size=4,
                num_kv_heads=1 if format.one_head else 2,
                head_size=_size(format),
            )
            pages = bench.subject.library.pages.allocate(shape, 3, bench.device)
            pages.pool.zero_()
            heads = shape.num_kv_heads
            k = torch.randn(4, heads, _size(format), generator=gen).to(bench.device)
            v = None if format.one_head else torch.randn(k.shape, generator=gen).to(bench.device)
            pages.write(k, v, torch.arange(4, 8, device=bench.device))
            before = pages.read()[0][1].clone()
            pages.pool[2] = pages.pool[1]
            expect(
                f"a moved block of {format.encoding}",
                pages.read()[0][2].double().cpu(),
                before.double().cpu(),
            )
            if bool(pages.pool[0].any()):
                raise Failed(f"{format.encoding}: writing block 1 touched block 0")

    def reordered(bench: Bench) -> None:
        for format in (f for f in CODED if not f.one_head):
            shape = bench.subject.library.page_shape(
                format=format, block_size=4, num_kv_heads=2, head_size=64, v_head_size=32
            )
            pages = bench.subject.library.pages.allocate(shape, 3, bench.device)
            pages.pool.zero_()
            gen = generator("reordered", format.encoding.value)
            k, v = (torch.randn(6, 2, n, generator=gen).to(bench.device) for n in (64, 32))
            pages.write(k, v, torch.tensor([5, -1, 2, 9, -7, 8], device=bench.device))
            other = pages.reordered(tokens_first=True)
            for one, two in zip(pages.read(), other.read(), strict=True):
                expect(f"{format.encoding} reordered", two.double().cpu(), one.double().cpu())
            _placed(bench, format, pages.pool, k, v)
        if (taken := _tokens(bench, 1).page_bytes) != 24:
            raise Failed(f"a page of one token takes {taken} bytes, must be 24")
        raises("pages without tokens", ConfigError, lambda: _tokens(bench, 0))

    yield check("rows and blocks", run)
    yield check("narrower values, skipped slots, tokens before heads", reordered)
    for name in ("int8_th", "fp8_th", "int4_th"):
        scene = coded(t, name, head_size=t.head_size + 5)
        for how in t.arrangements():
            yield agrees(scene, how.replace(write="fused", layers=2))


def _tokens(bench: Bench, block_size: int) -> Any:
    """Pages of int8_th with one head of 8 elements: 12 bytes a row."""
    return bench.subject.library.page_shape(
        format=format_of("int8_th"), block_size=block_size, num_kv_heads=1, head_size=8
    )


def _placed(
    bench: Bench, format: Format, pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """The third token is in block 0, place 2 of 4, each part of it where its area says."""
    name, at = format.encoding.value, 0
    for kind, x in (("key", k), ("value", v)):
        rows = bench.subject.library.encode_rows(format, x[2:3])[0].cpu()
        size = x.shape[-1]
        behind = format.scale_bytes(size) if format.scales_apart else 0
        for part in (rows[:, : rows.shape[-1] - behind], rows[:, rows.shape[-1] - behind :]):
            width = part.shape[-1]
            area = pool[0, at : at + 8 * width].cpu().view(2, 4, width)
            expect(f"{kind} of {name} in its page", area[:, 2].double(), part.double())
            at += 8 * width


@H.case(10, "nvfp4: a block of zeros, the global scale, values of e2m1 exactly")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        x = torch.tensor([values + [-value for value in values], [0.0] * 16, [6.0] + [0.0] * 15])
        flat = x.flatten()[None]
        back = decoded(bench, "nvfp4", encoded(bench, "nvfp4", flat), 48)
        expect("nvfp4", back, flat)
        scale = torch.tensor([0.125], device=bench.device)
        small = flat * 0.125
        stored = encoded(bench, "nvfp4", small, scale=scale)
        expect("nvfp4, global scale", decoded(bench, "nvfp4", stored, 48, scale=scale), small)
        expect("nvfp4 without its global scale", decoded(bench, "nvfp4", stored, 48), flat)

    def swizzled(bench: Bench) -> None:
        library = bench.subject.library
        plain = torch.arange(2 * 8 * 12).reshape(2, 8, 12)
        moved = torch.zeros_like(plain)
        for token in range(8):
            for tile in range(12):
                moved[:, token // 4 * 4 + tile // 3, tile % 3 * 4 + token % 4] = plain[
                    :, token, tile
                ]
        got = library.swizzle_scales(plain.to(bench.device))
        expect("swizzled scales", got.cpu(), moved)
        expect("and back", library.unswizzle_scales(got).cpu(), plain)
        for shape in ((6, 8), (8, 6)):
            for function in (library.swizzle_scales, library.unswizzle_scales):
                raises(
                    f"{shape} scales swizzled",
                    ConfigError,
                    lambda f=function, s=shape: f(torch.zeros(s)),
                )

    yield check("nvfp4", run)
    yield check("scales swizzled", swizzled)
    scene = coded(t, "nvfp4", k_scale=[0.5], v_scale=[2.0])
    long = normal(scene.config, [1, 2], [700, 530])
    yield agrees(long.replace(encoding=Encoding.NVFP4, k_scale=scene.k_scale), t.pages())


H.absent(
    11,
    "Rotated codes: q rotated once, norms in range, prompts continued",
    "deferred: the turboquant formats have no codec here yet",
)


@H.case(12, "Writing leaves the caller's keys and values as they are")
def _(t: Terrain) -> Checks:
    scenes = [normal(config, [1, 5], [20, 5]) for config in (t.layer(), t.latent())]
    for scene in [*scenes, coded(t, "fp8_e4m3fn", k_scale=[4.0], v_scale=[2.0])]:
        for write in ("fused", "first"):
            yield agrees(scene, t.pages(write=write))


H.absent(
    13,
    "The range scale of fp8 weights is undone in out and not in the LSE",
    "no implementation here computes weights in fp8",
)


@H.case(14, "Scales of fp8 outputs divide, codes saturate, padding rows keep theirs")
def _(t: Terrain) -> Checks:
    for config in (t.layer(), t.layer(sinks=True), t.latent()):
        scene = normal(config, [1, 3, 5], [40, 20, 5])
        for scale in (1.0, 2.0**-6, 2.0**-12):
            run = partial(_codes_out, scene, t.pages(padding=3), scale)
            yield Check(((scene.config, None),), run, f"{scene}, out_scale {scale}")


def _codes_out(scene: Scene, how: Arrangement, scale: float, bench: Bench) -> None:
    """One call whose output leaves as codes of e4m3, each row before full of another code."""
    impl, real, kept = bench.impl(scene), scene.num_rows, 0x12
    stage = bench.lay_out(scene, how, impl)
    shape = (real + how.padding, scene.rules.num_heads, scene.rules.v_head_size)
    codes = torch.full(shape, kept, dtype=torch.uint8, device=bench.device)
    given: dict[str, Any] = {
        **stage.options,
        "out": codes.view(torch.float8_e4m3fn),
        "out_scale": torch.tensor([scale], device=bench.device),
    }
    impl.forward(impl.plan(stage.batch, stage.pages), stage.q, stage.cache, **given)
    codes = codes.cpu()
    if bool((codes[real:] != kept).any()):
        raise Failed("padding rows of the codes have changed")
    meant = torch.tensor([_e4m3fn(code) for code in range(256)], dtype=torch.float64)[codes.int()]
    truth = torch.cat([answer.out for answer in scene.answers]) / scale
    beyond = truth.abs() > 1.1 * 448
    if bool(meant[:real].isnan().any()) or bool((meant[:real].abs()[beyond] != 448).any()):
        raise Failed("what is beyond the largest code is not that code")
    if not bool(beyond.any()):
        found = gap(scene, (meant[:real] * scale).float(), None, CONTRACT["fp8"])
        if why := found.beyond(CONTRACT["fp8"]):
            raise Failed(why)
        bench.note("fp8", found)


@H.case(15, "Subnormal codes and subnormal scales decode exactly")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        tiny = torch.tensor([2.0**-140], device=bench.device)
        for name, value in EIGHT_BIT.items():
            codes = torch.tensor([1, 2, 3, 0x81, 0x82], dtype=torch.uint8)
            wanted = torch.tensor([value(int(c)) for c in codes], dtype=torch.float64)
            expect(f"subnormals of {name}", decoded(bench, name, codes, 5), wanted)
            expect(
                f"{name} times 2^-140",
                decoded(bench, name, codes, 5, scale=tiny),
                wanted * 2.0**-140,
            )
            back = encoded(bench, name, wanted.float())
            if differing(back, codes):
                raise Failed(f"subnormals of {name} are not encoded as themselves")
        stored = row(bytes([1, 0, 0, 0]), struct.pack("<f", 2.0**-130))
        expect("int8 with a subnormal scale", decoded(bench, "int8_th", stored, 1), [2.0**-130])

    yield check("subnormals", run)


@H.case(16, "The scale of fp8 queries is applied once, to its heads, and leaves sinks alone")
def _(t: Terrain) -> Checks:
    for changes in ({"sinks": True}, {"num_heads": 6}, {"logits_soft_cap": 5.0}):
        plain = normal(t.layer(**changes), [1, 3, 5], [40, 20, 5], gain=2.0)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            for scale in ([0.5], [0.25, 2.0]):
                codes, meant = _as_codes(plain, dtype, torch.tensor(scale))
                run = partial(_codes_in, meant, codes, torch.tensor(scale), t.pages())
                yield Check(((meant.config, None),), run, f"{meant}, {dtype}, q_scale {scale}")


def _as_codes(scene: Scene, dtype: torch.dtype, scale: torch.Tensor) -> tuple[torch.Tensor, Scene]:
    """The scene's queries as codes, and the scene of what those mean, which every dtype holds."""
    heads = scene.rules.num_heads // len(scale)
    each = scale.repeat_interleave(heads)[:, None]
    codes, requests = [], []
    for request in scene.requests:
        own = (request.q.float() / each).to(dtype)
        codes.append(own)
        requests.append(replace(request, q=(own.float() * each).to(scene.dtype)))
    # As bytes: torch before 2.9 joins no fp8 tensors on a CPU.
    joined = torch.cat([own.view(torch.uint8) for own in codes]).view(dtype)
    return joined, scene.replace(requests=tuple(requests))


def _codes_in(
    scene: Scene, codes: torch.Tensor, scale: torch.Tensor, how: Arrangement, bench: Bench
) -> None:
    impl = bench.impl(scene)
    stage = bench.lay_out(scene, how, impl)
    stage.q = codes.to(bench.device)
    stage.options["q_scale"] = scale.to(bench.device)
    bench.judge(scene, bench.call(scene, how, impl=impl, stage=stage))


H.absent(
    17,
    "Two caches of different formats in one call keep each its own",
    "no layer here reads two caches",
)

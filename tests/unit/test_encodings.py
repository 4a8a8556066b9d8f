"""What a KV cache may be stored as, and what the user's word for it means on a device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplat.backends.formats.elements import E2M1, E4M3FN, E4M3FNUZ, E5M2
from attnplat.backends.formats.encodings import (
    FNUZ_ARCHS,
    PLAIN_ENCODINGS,
    Encoding,
    resolve_encoding,
)
from attnplat.backends.formats.facts import FORMATS, format_of
from attnplat.backends.formats.table import BEGIN, END, rewritten
from attnplat.config.names import KVCacheDtype, Operation
from attnplat.errors import ConfigError, UnknownNameError

ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("x86_64", "sm90", "sm100", "gfx942", "gfx950")

# encoding: (KV heads, key and value size, bytes per token, bytes of a block of 64 tokens)
SIZES = {
    "float16": (8, 128, 4096, 64 * 4096),
    "bfloat16": (8, 128, 4096, 64 * 4096),
    "float32": (8, 128, 8192, 64 * 8192),
    "float64": (8, 128, 16384, 64 * 16384),
    "fp8_e4m3fn": (8, 128, 2048, 64 * 2048),
    "fp8_e4m3fnuz": (8, 128, 2048, 64 * 2048),
    "fp8_e5m2": (8, 128, 2048, 64 * 2048),
    "int8_th": (8, 128, 2 * 8 * 132, 64 * 2112),
    "fp8_th": (8, 128, 2 * 8 * 132, 64 * 2112),
    "fp8_th_fnuz": (8, 128, 2 * 8 * 132, 64 * 2112),
    "int4_th": (8, 128, 2 * 8 * 68, 64 * 1088),
    "nvfp4": (8, 128, 2 * 8 * 72, 64 * 1152),
    "mxfp4": (8, 128, 2 * 8 * 68, 64 * 1088),
    "mxfp8": (8, 128, 2 * 8 * 132, 64 * 2112),
    "mla_fp8_656": (1, 576, 656, 64 * 656),
    "mla_fp8_584": (1, 512, 584, 37440),
    "mla_fp8_528": (1, 512, 528, 64 * 528),
    "mla_nvfp4_352": (1, 576, 352, 64 * 352),
    "index_fp8_132": (1, 128, 132, 64 * 132),
    "index_fp8_132_fnuz": (1, 128, 132, 64 * 132),
    "index_fp8_132_e8m0": (1, 128, 132, 64 * 132),
    "index_mxfp4_68": (1, 128, 68, 64 * 68),
}


def test_the_table_of_sizes_names_every_format() -> None:
    assert set(SIZES) == set(FORMATS)


@pytest.mark.parametrize("name", SIZES)
def test_a_token_and_a_page_take_the_bytes_their_name_says(name: str) -> None:
    heads, size, token, page = SIZES[name]
    assert format_of(name).bytes_per_token(heads, size) == token
    assert format_of(name).page_bytes(64, heads, size) == page
    if name.rpartition("_")[2].isdigit():
        assert token == int(name.rpartition("_")[2])


# A row of one head with an awkward size: codes, padding to the scale, scale.
UNALIGNED = [
    ("int8_th", 66, 68 + 4),
    ("int8_th", 80, 84),
    ("fp8_th", 1, 8),
    ("int4_th", 66, 36 + 4),
    ("int4_th", 7, 8),
    ("fp8_e4m3fn", 33, 33),
    ("bfloat16", 33, 66),
]


@pytest.mark.parametrize(("name", "size", "row"), UNALIGNED)
def test_scales_inside_rows_stay_aligned(name: str, size: int, row: int) -> None:
    assert format_of(name).row_bytes(size) == row


@given(block=st.integers(1, 300))
def test_only_584_pads_its_pages(block: int) -> None:
    for format in FORMATS.values():
        heads, size, token, _ = SIZES[format.encoding.value]
        page = format.page_bytes(block, heads, size)
        if format.encoding is Encoding.MLA_FP8_584:
            assert page % 576 == 0 and 0 <= page - block * token < 576
        else:
            assert page == block * token


def test_keys_and_values_may_differ_in_size() -> None:
    assert format_of("int8_th").bytes_per_token(2, 192, 128) == 2 * (196 + 132)
    assert format_of("mla_fp8_656").bytes_per_token(1, 576, 512) == 656


REFUSED_SIZES = [
    ("nvfp4", 72, r"multiple of 16 elements; this one has 72 \(closest: 64\)"),
    ("mxfp4", 16, r"multiple of 32 elements; this one has 16 \(closest: 32\)"),
    ("mxfp8", 0, "multiple of 32"),
    ("int8_th", 0, "this one has 0"),
    ("mla_fp8_656", 512, "rows of 576 elements; this one has 512"),
    ("mla_fp8_584", 576, "rows of 512 elements; this one has 576"),
    ("index_fp8_132", 64, "rows of 128 elements; this one has 64"),
]


@pytest.mark.parametrize(("name", "size", "message"), REFUSED_SIZES)
def test_a_size_that_cannot_be_stored_is_refused(name: str, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        format_of(name).page_bytes(16, 1, size)


def test_scales_that_the_caller_has_are_named() -> None:
    needing = {f.encoding.value for f in FORMATS.values() if f.needs}
    assert needing == {"fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "nvfp4"}


def test_formats_are_found_in_any_case_and_by_no_other_name() -> None:
    assert format_of("NVFP4") is format_of(Encoding.NVFP4)
    with pytest.raises(UnknownNameError, match="did you mean 'mxfp4'"):
        format_of("mxfp44")
    with pytest.raises(UnknownNameError, match="encoding with a codec 'turbo_4bit_nc'"):
        format_of("turbo_4bit_nc")


def test_formats_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        format_of("nvfp4").size_multiple = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        FORMATS[Encoding.NVFP4] = format_of("mxfp4")  # type: ignore[index]


def test_the_largest_values_are_those_of_the_standards() -> None:
    largest = [e.largest for e in (E4M3FN, E4M3FNUZ, E5M2, E2M1)]
    assert largest == [448.0, 240.0, 57344.0, 6.0]
    smallest = [e.value(1) for e in (E4M3FN, E4M3FNUZ, E5M2, E2M1)]
    assert smallest == [2.0**-9, 2.0**-10, 2.0**-16, 0.5]


# --- the user's word -------------------------------------------------------------------------

# word -> encoding on CDNA3, and on every other device
BY_ARCH = {
    "fp8": ("fp8_e4m3fnuz", "fp8_e4m3fn"),
    "fp8_e4m3": ("fp8_e4m3fnuz", "fp8_e4m3fn"),
    "fp8_inc": ("fp8_e4m3fnuz", "fp8_e4m3fn"),
    "fp8_per_token_head": ("fp8_th_fnuz", "fp8_th"),
}


@pytest.mark.parametrize("word", BY_ARCH)
@pytest.mark.parametrize("arch", ARCHS)
def test_e4m3_is_the_form_that_the_device_reads(word: str, arch: str) -> None:
    fnuz, ocp = BY_ARCH[word]
    device = SimpleNamespace(arch=arch)
    expected = fnuz if arch in FNUZ_ARCHS else ocp
    assert resolve_encoding(word, Operation.MHA, device) == expected


@pytest.mark.parametrize("word", BY_ARCH)
def test_e4m3_without_a_device_is_refused(word: str) -> None:
    fnuz, ocp = BY_ARCH[word]
    with pytest.raises(ConfigError, match=rf"pass the device.*\({ocp}, {fnuz}\)"):
        resolve_encoding(word, Operation.MHA)


WITHOUT_DEVICE = {
    None: "bfloat16",
    "auto": "bfloat16",
    "float32": "float32",
    "fp8_e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8_th",
    "int4_per_token_head": "int4_th",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
}


@pytest.mark.parametrize("word", WITHOUT_DEVICE)
def test_other_words_mean_the_same_everywhere(word: str | None) -> None:
    assert resolve_encoding(word, Operation.MHA) == WITHOUT_DEVICE[word]


def test_auto_is_the_activation_dtype() -> None:
    assert resolve_encoding("auto", Operation.MHA, dtype="fp16") == "float16"


@pytest.mark.parametrize(
    ("word", "encoding"), [("fp8_ds_mla", "mla_fp8_656"), ("nvfp4_ds_mla", "mla_nvfp4_352")]
)
def test_latent_words_are_for_latent_operations(word: str, encoding: str) -> None:
    for operation in (Operation.MLA, Operation.SPARSE_MLA):
        assert resolve_encoding(word, operation) == encoding
    with pytest.raises(ConfigError, match=r"stores latent rows; operation 'mha' has none"):
        resolve_encoding(word, Operation.MHA)


@pytest.mark.parametrize("operation", [Operation.INDEXER, Operation.STATE])
def test_operations_without_keys_and_values_have_no_encoding(operation: Operation) -> None:
    with pytest.raises(ConfigError, match="caches no keys and values"):
        resolve_encoding("auto", operation)


@pytest.mark.parametrize("word", list(KVCacheDtype))
def test_every_word_means_something(word: KVCacheDtype) -> None:
    operation = Operation.MLA if word.value.endswith("ds_mla") else Operation.MHA
    found = resolve_encoding(word, operation, SimpleNamespace(arch="sm90"))
    assert isinstance(found, Encoding)


def test_plain_encodings_have_plain_formats() -> None:
    plain = {f.encoding for f in FORMATS.values() if f.scale is None}
    assert plain == PLAIN_ENCODINGS


# --- where the facts are read ----------------------------------------------------------------


def test_facts_and_their_table_are_read_without_torch() -> None:
    code = (
        "import sys\n"
        "import attnplat.backends.formats.facts, attnplat.backends.formats.table\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_documented_table_is_the_registrys() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert rewritten(text) == text, "run python -m attnplat.backends.formats.table docs/formats.md"


def test_a_stale_table_would_be_seen() -> None:
    stale = f"before\n{BEGIN}\n| encoding |\n{END}\nafter\n"
    fresh = rewritten(stale)
    assert fresh != stale and rewritten(fresh) == fresh
    assert fresh.startswith("before\n") and fresh.endswith("after\n")
    with pytest.raises(ConfigError, match="expected one"):
        rewritten("no marks")


def test_the_document_speaks_of_every_format() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"`{name}`" not in text] == []

"""Recorded cases: which table a row is of, what is decided, written and compared."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from attnplat.backends.backend import Rejection
from attnplat.cli.main import main
from attnplat.errors import ConfigError, UnknownNameError
from attnplat.snapshots.check import check, decide, read_cases, write_cases
from attnplat.snapshots.codes import codes_of
from attnplat.snapshots.models import minimax_family, v4_family
from attnplat.snapshots.tables import kind_of

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
THEIRS = "vllm-0.33"
ON = {"platform": "rocm", "arch": "gfx950", "profile": "full"}
FLAGS = (
    "use_mla has_sink use_sparse use_mm_prefix use_per_head_quant_scales has_sliding_window "
    "use_non_causal use_batch_invariant use_kv_connector use_pcp use_dcp use_rswa "
    "use_adaptive_verification"
)
LAYER = {
    "head_size": 128,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "block_size": None,
    "attn_type": "decoder",
    "num_heads": 32,
    **dict.fromkeys(FLAGS.split(), False),
}


def case(requested=None, context=None, on=ON, **changes):
    return {**on, "config": {**LAYER, **changes}, "context": context, "requested": requested}


ROWS = [
    (case(), "selection", {"selected": "ROCM_ATTN"}),
    (
        {
            **ON,
            "mla_dims": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            "dtype": "bfloat16",
            "batch_invariant": False,
            "requested": None,
        },
        "prefill",
        {"selected": "ROCM_AITER_FA"},
    ),
    (
        {**ON, "head_size": 80, "dtype": "float32", "requested": None},
        "vit",
        {"selected": "TORCH_SDPA"},
    ),
    (
        {**ON, "mamba_type": "GDN_ATTN", "batch_invariant": False},
        "mamba",
        {"selected": "GDN_ATTN"},
    ),
    ({**ON, "mamba_type": "CUSTOM", "batch_invariant": False}, "mamba", {"error": "no_class"}),
    (
        {
            **ON,
            "rule": "dsa",
            "model_type": "deepseek_v4",
            "requested": "auto",
            "dcp": False,
            "pcp": False,
            "indexer_sparse_logits": False,
        },
        "indexer",
        {"resolved": "mxfp4"},
    ),
    (
        {
            **ON,
            "rule": "minimax_m3_indexer",
            "indexer_kv_dtype": "auto",
            "topk_blocks": 16,
            "indexer_cp": True,
            "tp": 8,
        },
        "minimax",
        {"selected": "triton_cp", "backend": "TRITON_BLOCK_INDEXER"},
    ),
    (
        {
            **ON,
            "rule": "minimax_m3_main",
            "kv_cache_dtype": "auto",
            "topk_blocks": 16,
            "num_kv_heads": 4,
        },
        "minimax",
        {"selected": "triton", "backend": "MINIMAX_M3_SPARSE"},
    ),
    (
        {
            **ON,
            "model": "deepseek_v41",
            "requested": "ROCM_FLASHMLA_SPARSE_DSV4",
            "pcp": False,
            "num_heads": 64,
            "o_groups": 8,
            "tp": 8,
        },
        "dsv4",
        {"layer": "aiter", "backend": "ROCM_FLASHMLA_SPARSE_DSV41"},
    ),
    (
        {**ON, "rule": "diffkv", "head_size": 128, "head_size_v": 128, "has_sink": False},
        "diffkv",
        {"selected": "TRITON_ATTN_DIFFKV"},
    ),
    (
        {
            **ON,
            "rule": "spec_kind",
            "attn_type": "encoder_only",
            "use_mla": True,
            "has_sliding_window": True,
        },
        "kinds",
        {"kind": "encoder_only_attention"},
    ),
    (
        {**ON, "rule": "backend_parse", "value": "cutlass_msa"},
        "kinds",
        {"parsed": None, "minimax_m3_msa_decode_backend": "cutlass", "error": None},
    ),
    ({**ON, "rule": "backend_parse", "value": "FLASH"}, "kinds", {"error": "unknown_backend"}),
    (
        {**ON, "rule": "backend_per_kind_parse", "value": {"sliding_window": "triton_attn"}},
        "kinds",
        {"parsed": {"sliding_window": "TRITON_ATTN"}},
    ),
    (
        {
            **ON,
            "rule": "backend_per_kind_select",
            "layer": "swa",
            "global_backend": "FLEX_ATTENTION",
            "backend_per_kind": {"sliding_window": "TRITON_ATTN"},
        },
        "kinds",
        {"selected": "TRITON_ATTN"},
    ),
    ({**ON, "rule": "all_kinds"}, "kinds", {}),
]


@pytest.mark.parametrize(("row", "table", "outcome"), ROWS)
def test_the_kind_is_told_from_the_fields_and_decided(row, table, outcome):
    assert kind_of(row).name == table
    decided = decide(row, THEIRS)
    assert {name: decided[name] for name in outcome} == outcome
    assert {name: decided[name] for name in row} == row


def test_a_row_of_no_table_is_an_error_that_names_the_tables():
    with pytest.raises(UnknownNameError, match="selection"):
        kind_of({**ON, "colour": "blue"})


def test_all_kinds_are_listed_in_their_order():
    assert decide({**ON, "rule": "all_kinds"}, THEIRS)["kinds"][0] == "full_attention"


def test_the_two_rule_sets_may_decide_otherwise():
    ours, theirs = (decide(case(), rules)["selected"] for rules in ("attnplat", THEIRS))
    assert (ours, theirs) == ("ROCM_AITER_FA", "ROCM_ATTN")


REQUESTS = [
    ("CUSTOM", "requested_backend_has_no_class", "exception:ValueError"),
    ("NO_ATTENTION", "requested_backend_has_no_class", "import_error"),
    ("TORCH_SDPA", "requested_backend_has_no_class", "exception:ValueError"),
    ("TRITON_MLA", "requested_backend_invalid", "non_mla"),
]


@pytest.mark.parametrize(("name", "error", "code"), REQUESTS)
def test_a_refused_request_has_its_reasons_alone(name, error, code):
    decided = decide(case(name), THEIRS)
    assert decided["selected"] is None and decided["error"] == error
    assert decided["rejected"] == {name: [code]}
    assert decided["valid"] == []


def test_a_request_that_is_replaced_tells_both():
    context = {"num_kv_heads": 8, "run_kv_cache_dtype": "turboquant_4bit_nc"}
    decided = decide(case("ROCM_ATTN", context), THEIRS)
    assert decided["selected"] == "TRITON_ATTN" and decided["valid"] == ["TRITON_ATTN"]
    assert decided["rejected"]["ROCM_ATTN"] == ["layout_vs_turboquant"]


@pytest.mark.parametrize("name", ["CUSTOM", "FLASHINFER", "CPU_ATTN"])
def test_a_request_on_a_processor_is_ignored(name):
    on = {"platform": "cpu", "arch": "x86_avx2", "profile": "full"}
    decided = decide(case(name, on=on), THEIRS)
    assert (decided["selected"], decided["valid"]) == ("CPU_ATTN", ["CPU_ATTN"])


def test_decode_kernels_named_as_backends_are_asked_for_as_such():
    """The recorded selector was handed the name itself, which a config would translate."""
    assert decide(case("TRITON_MSA"), THEIRS)["rejected"] == {
        "TRITON_MSA": ["kv_cache_dtype", "non_sparse"]
    }


CODES = [
    (("operation", "operation", "sparse_mla", "mha"), {"mla", "sparse"}),
    (("operation", "operation", "mha", "sparse_mla"), {"non_mla", "non_sparse"}),
    (("field", "head_size", 72, "64"), {"head_size"}),
    (("feature", "sinks", True, ""), {"sink"}),
    (("feature", "non_causal_dcp", True, ""), {"non_causal_mla_dcp"}),
    (("device", "traits", frozenset(), ""), {"compute_capability"}),
    (("package", "amd-aiter", None, ""), {"import_error"}),
    (("rule", "segmented_rdna_only", None, ""), {"combo:segmented_rdna_only"}),
    (("rule", "layout_vs_turboquant", None, ""), {"layout_vs_turboquant"}),
    (("absent", "backend", "X", ""), {"exception:ValueError"}),
]


@pytest.mark.parametrize(("reason", "codes"), CODES)
def test_a_reason_has_a_recorded_code(reason, codes):
    assert codes_of([Rejection("ROCM_ATTN", *reason)]) == codes


def test_a_backend_that_cannot_be_imported_says_nothing_else():
    reasons = [
        Rejection("ROCM_ATTN", "field", "head_size", 72, "64"),
        Rejection("ROCM_ATTN", "package", "triton", None, ""),
    ]
    assert codes_of(reasons) == {"import_error"}


FAMILIES = [
    (minimax_family, "MiniMaxM3IndexerTritonImpl", "triton"),
    (minimax_family, "MiniMaxM3IndexerTritonCPImpl", "triton_cp"),
    (minimax_family, "MiniMaxM3SparseBackend", "triton"),
    (minimax_family, "MiniMaxM3SparseMSABackend", "msa"),
    (minimax_family, "MiniMaxM3SparseMSANvfp4Backend", "msa_nvfp4"),
    (minimax_family, "MiniMaxM3SparseAiterBackend", "aiter"),
    (minimax_family, "MINIMAX_M3_SPARSE", "triton"),
    (v4_family, "DeepseekV4FlashMLAAttention", "flashmla"),
    (v4_family, "DeepseekV4FlashInferSM120Attention", "flashinfer_sm120"),
    (v4_family, "DeepseekV4FlashInferMLAAttention", "flashinfer"),
    (v4_family, "DeepseekV4MegaAttnAttention", "flashmla_mega"),
    (v4_family, "DeepseekV41ROCMAiterMLAAttention", "aiter"),
]


@pytest.mark.parametrize(("family", "name", "word"), FAMILIES)
def test_class_names_have_a_family(family, name, word):
    assert family(name) == word


# Files and the command ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cases.jsonl", "cases.jsonl.gz"])
def test_what_is_written_is_read_again_and_agrees(tmp_path, name):
    decided = [decide(row, THEIRS) for row, _, _ in ROWS]
    assert write_cases(tmp_path / name, decided) == len(ROWS)
    assert list(read_cases(tmp_path / name)) == decided
    tally = check(read_cases(tmp_path / name), THEIRS)
    assert tally.agreed and tally.rows.total() == len(ROWS)


def test_a_row_that_differs_is_counted_and_shown():
    row = {**decide(case(), THEIRS), "selected": "TRITON_ATTN"}
    tally = check([row], THEIRS)
    assert not tally.agreed
    assert tally.differ == {("selection", "rocm", "gfx950", "full"): 1}
    assert tally.examples[0]["outcome"]["selected"] == "ROCM_ATTN"


def test_reasons_of_an_exception_are_not_compared():
    row = {**decide(case("TRITON_MLA"), THEIRS), "error": "exception:AttributeError"}
    row["rejected"] = {"TRITON_MLA": ["exception:AttributeError"]}
    assert check([row], THEIRS).agreed


BAD_FILES = [
    (b"{not json}\n", "line 1 is not JSON"),
    (b'{"platform": "rocm"}\n', "lacks arch, profile"),
    (b"[1, 2]\n", "lacks object"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_a_bad_file_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "cases.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        list(read_cases(path))


def test_a_file_that_is_not_gzip_is_one_clear_error(tmp_path):
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(b"plain")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_cases(path))


def _cases(tmp_path, *rows):
    path = tmp_path / "cases.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def test_the_command_checks_and_says_where_it_differs(tmp_path, capsys):
    row = decide(case(), THEIRS)
    same = _cases(tmp_path, row)
    assert main(["select", "--cases", same, "--rules", THEIRS, "--check"]) == 0
    assert "1 rows, 0 differ" in capsys.readouterr().out
    other = _cases(tmp_path, {**row, "selected": None})
    assert main(["select", "--cases", other, "--rules", THEIRS, "--check"]) == 1
    assert "1 rows, 1 differ" in capsys.readouterr().out


def test_the_command_writes_rows_with_its_own_outcome(tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["select", "--cases", _cases(tmp_path, case()), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["selected"] == "ROCM_AITER_FA"


@pytest.mark.parametrize("rules", ["attnplat", THEIRS])
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_every_recorded_sort_of_row_is_decided_under_each_rule_set(path, rules):
    """The first of each sort: no row may end in anything but an outcome."""
    seen = set()
    for row in read_cases(path):
        sort = (row["platform"], row.get("rule"), row.get("tag"), row.get("requested"))
        if sort not in seen:
            seen.add(sort)
            decide(row, rules)
    assert seen


def test_who_watches_sees_how_far_it_is_and_nobody_else_does(tmp_path):
    path = tmp_path / "cases.jsonl"
    write_cases(path, [{**ON, "mamba_type": "MAMBA1", "batch_invariant": False}] * 501)
    command = [sys.executable, "-m", "attnplat", "select", "--cases", str(path)]
    reader, terminal = os.openpty()
    with os.fdopen(reader, "rb", buffering=0) as shown:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, check=True)
        os.close(terminal)
        assert shown.read(4096) == b"\r0 rows decided\r500 rows decided\r\x1b[K"
    assert len(done.stdout.splitlines()) == 501
    quiet = subprocess.run(command, capture_output=True, check=True)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, b"")


# Rows that nobody has recorded ------------------------------------------------------------------

OUTCOMES = {"selected", "parsed", "kind", "resolved", "layer", "kinds"}
INPUTS = {
    "selection": {"requested", "context"},
    "prefill": {"mla_dims", "dtype", "batch_invariant", "requested"},
    "vit": {"head_size", "dtype", "requested"},
    "mamba": {"mamba_type", "batch_invariant"},
    "indexer": {"model_type", "requested", "dcp", "pcp", "indexer_sparse_logits"},
    "minimax": {"indexer_kv_dtype", "kv_cache_dtype", "topk_blocks", "indexer_cp", "tp"},
    "dsv4": {"model", "requested", "pcp", "num_heads", "o_groups", "tp"},
    "diffkv": {"head_size", "head_size_v", "has_sink"},
    "kinds": {"attn_type", "use_mla", "has_sliding_window", "layer", "global_backend"},
}
NONSENSE = (0, -1, 2**40, 1.5, "", "nonsense", [], {}, True)
RULE_SETS = ("attnplat", THEIRS)


def recorded_rows():
    """Some rows of each table."""
    for path in sorted(GOLDEN.glob("*.jsonl.gz")):
        rows = list(islice(read_cases(path), 400))
        yield path.name.removesuffix(".jsonl.gz"), rows


def mixed_rows(count):
    """Recorded rows whose device and inputs come from other rows of their table."""
    draw = random.Random(20261129)
    tables = dict(recorded_rows())
    devices = [{k: row[k] for k in ON} for rows in tables.values() for row in rows[::7]]
    for _ in range(count):
        name = draw.choice(sorted(tables))
        row = {**draw.choice(tables[name]), **draw.choice(devices)}
        for field in sorted(INPUTS[name] & row.keys()):
            values = [
                r[field] for r in tables[name] if field in r and r.get("rule") == row.get("rule")
            ]
            row[field] = draw.choice(values)
        if name == "selection":
            configs = [r["config"] for r in tables[name]]
            row["config"] = {field: draw.choice(configs)[field] for field in row["config"]}
        yield name, row, draw


def test_every_mixture_of_recorded_inputs_has_an_outcome():
    for name, row, draw in mixed_rows(400):
        decided = decide(row, draw.choice(RULE_SETS))
        assert json.loads(json.dumps(decided)) == decided, row
        assert OUTCOMES & decided.keys(), (name, row)
        if name == "selection":
            refused = decided["error"] is not None
            assert refused == (decided["selected"] is None)
            assert decided["selected"] in (None, *decided["valid"], row["requested"])
            assert not set(decided["valid"]) & set(decided["rejected"])


def test_nonsense_in_any_field_is_an_error_that_shows_the_row():
    told = 0
    for name, row, draw in mixed_rows(400):
        row = json.loads(json.dumps(row))
        field = draw.choice(sorted(INPUTS[name] & row.keys()) + list(ON))
        where = row
        if name == "selection" and draw.random() < 0.7:
            where, field = row["config"], draw.choice(sorted(row["config"]))
        if draw.random() < 0.3:
            del where[field]
        else:
            where[field] = draw.choice(NONSENSE)
        try:
            decided = decide(row, draw.choice(RULE_SETS))
        except ConfigError as error:
            told += 1
            assert field in str(error) or "case with fields" in str(error), error
        else:
            assert json.loads(json.dumps(decided)) == decided
    assert told > 200

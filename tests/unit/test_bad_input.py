"""Nonsense is answered by one clear error, and the unknown by a careful choice that says so.

As a new user would type it: on the command line and in Python. An error names the value, and
what is taken; there is never a traceback, and never a guess that nobody is told of.
"""

from __future__ import annotations

import json

import pytest

from attnplat import AttentionConfig, MhaConfig, platform_for
from attnplat.cli.main import main
from attnplat.config.run import RunContext
from attnplat.errors import AttnplatError, ConfigError

ON = ["--device", "sm90"]
LAYER = [*ON, "--head-size", "128"]


def explain(capsys, *arguments):
    code = main(["explain", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


REFUSED = [
    # arguments -> what the error says
    ([*ON, "--head-size", "0"], "head_size is 0; it takes an integer from 1"),
    ([*ON, "--head-size", "-8"], "head_size is -8; it takes an integer from 1"),
    ([*ON, "--head-size", str(2**40)], f"head_size is {2**40}; it takes an integer from 1"),
    ([*LAYER, "--v-head-size", "0"], "v_head_size is 0"),
    ([*LAYER, "--block-size", "0"], "block_size is 0"),
    ([*LAYER, "--block-size", str(2**40)], f"block_size is {2**40}"),
    ([*LAYER, "--num-heads", "0"], "num_heads is 0"),
    ([*LAYER, "--num-heads", "7", "--num-kv-heads", "2"], "num_heads is 7; it takes a multiple"),
    ([*LAYER, "--sliding-window", "0"], "--sliding-window is 0; it takes 1 or more tokens"),
    ([*LAYER, "--sliding-window", "-5"], "--sliding-window is -5"),
    ([*LAYER, "--chunk-size", "-1"], "chunk_size is -1"),
    ([*LAYER, "--logits-soft-cap", "0"], "logits_soft_cap is 0.0; it takes a finite number above"),
    ([*LAYER, "--logits-soft-cap", "nan"], "logits_soft_cap is nan"),
    ([*LAYER, "--tensor-parallel", "0"], "tp_size is 0"),
    ([*LAYER, "--dtype", "nonsense"], "unknown dtype 'nonsense'; known: bfloat16"),
    ([*LAYER, "--kv-cache-dtype", "fp9"], "unknown kv_cache_dtype 'fp9'; did you mean 'fp8'?"),
    ([*LAYER, "--attn-type", "sideways"], "unknown attn_type 'sideways'"),
    ([*LAYER, "--need", "teleport"], "unknown feature 'teleport'"),
    ([*LAYER, "--attention-backend", "flash_atn"], "did you mean 'FLASH_ATTN'?"),
    ([*LAYER, "--attention-config", "[1]"], "it takes an object of fields"),
    ([*LAYER, "--attention-config", '{"foo": 1}'], "unknown attention config field 'foo'"),
    ([*LAYER, "--attention-config.flash_attn_version", "5"], "it takes 2, 3, 4 or None"),
    ([*LAYER, "--attention-config.indexer_kv_dtype", "fp3"], "did you mean 'fp8'?"),
    ([*LAYER, "--assume-packages", "nope"], "unknown package profile of cuda 'nope'"),
    (["--device", "sm9x", "--head-size", "128"], "unknown device 'sm9x'"),
    (["--device", "", "--head-size", "128"], "unknown device ''"),
    (["--device", "cuda:gfx950", "--head-size", "128"], "write rocm:gfx950"),
    (["--device", "tpu", "--head-size", "128"], "unknown device 'tpu'; did you mean 'cpu'?"),
    (ON, "say what to explain"),
    ([*ON, "--model", "llama", "--head-size", "128"], "give one of the two"),
    ([*ON, "--operation", "mla", "--head-size", "576", "--alibi"], "--alibi says nothing of"),
    ([*ON, "--layer", "[1]"], "--layer takes a JSON object"),
    ([*ON, "--layer", '{"operation": "mha"}'], "MhaConfig needs head_size"),
    ([*ON, "--layer", '{"operation": "nope", "head_size": 1}'], "unknown operation 'nope'"),
    ([*ON, "--layer", '{"head_size": 128, "foo": 1}'], "unknown mha field 'foo'"),
    ([*ON, "--layer", '{"head_size": "128"}'], "head_size is '128'"),
    ([*ON, "--layer", '{"head_size": 128, "sinks": 1}'], "sinks is 1; it takes True or False"),
    (
        [*ON, "--layer", '{"head_size": 128, "sliding_window": 5}'],
        "sliding_window=W is (W - 1, -1)",
    ),
    ([*ON, "--layer", '{"head_size": 128, "scale": NaN}'], "scale is nan"),
    ([*LAYER, "--diff", "/nonexistent.json"], "No such file or directory"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(a) for a, _ in REFUSED])
def test_the_command_line_refuses(capsys, arguments, said):
    code, out, err = explain(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("attnplat: ") and said in err
    assert len(err.splitlines()) == 1


NOT_REPORTS = (
    "no JSON",
    "{}",
    "[1]",
    '[{"device": "x"}]',
    '[{"device": "x", "layers": 5}]',
    '[{"device": "x", "layers": [{}]}]',
    '[{"device": "x", "layers": [{"layer": 1, "planned": 1, "chosen": 1}]}]',
)


@pytest.mark.parametrize("text", NOT_REPORTS)
def test_a_file_that_is_no_report_has_nothing_to_compare_with(capsys, tmp_path, text):
    path = tmp_path / "old.json"
    path.write_text(text)
    code, _, err = explain(capsys, *LAYER, "--diff", str(path))
    assert code == 2 and str(path) in err and len(err.splitlines()) == 1


UNKNOWN_DEVICES = ("sm130", "cuda:sm999", "gfx9999", "rocm:gfx1399")


@pytest.mark.parametrize("device", UNKNOWN_DEVICES)
def test_an_architecture_of_tomorrow_gets_a_careful_choice_that_says_so(capsys, device):
    code, out, _ = explain(capsys, "--device", device, "--head-size", "128")
    assert code == 0
    assert "is not an architecture that attnplat knows" in out
    selection = platform_for(device).select(MhaConfig(head_size=128))
    # Whatever is written for certain devices is not among what fits.
    written_for = {"FLASH_ATTN", "FLASHINFER", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"}
    assert selection.ok and not written_for & {b.name for b in selection.accepted}


def test_a_model_on_such_devices_is_told_so_too(capsys):
    for devices in (["sm130"], ["sm130", "gfx9999"]):
        code, out, _ = explain(
            capsys, "--model", "deepseek-v3", *(a for d in devices for a in ("--device", d))
        )
        assert code == 0
        assert out.count("is not an architecture that attnplat knows") == len(devices)


def test_a_wish_that_no_layer_of_the_sort_reads_is_told(capsys):
    wish = "--attention-config.mla_prefill_backend"
    code, out, _ = explain(capsys, *LAYER, wish, "TRTLLM_RAGGED")
    assert code == 0
    assert "note: mla_prefill_backend is set and FLASH_ATTN does not read it" in out


def test_a_vision_layer_is_called_one(capsys):
    _, out, _ = explain(capsys, *LAYER, "--role", "vision")
    assert out.startswith("mha, vision, head_size 128")


PLATFORM = platform_for("sm90")
CONFIG = MhaConfig(head_size=128)
CALLS = {
    "no layer config": (lambda: PLATFORM.select("llama"), "'llama' is no layer config"),
    "nothing": (lambda: PLATFORM.select(None), "None is no layer config"),
    "a name for a config": (
        lambda: PLATFORM.select(CONFIG, "FLASH_ATTN"),
        "attention is 'FLASH_ATTN'; it takes AttentionConfig(...) or None",
    ),
    "a dict for a run": (
        lambda: PLATFORM.select(CONFIG, run={"dcp_size": 2}),
        "run is {'dcp_size': 2}; it takes RunContext(...) or None",
    ),
    "in a plan too": (lambda: PLATFORM.plan_model([CONFIG, 5]), "5 is no layer config"),
    "no device": (lambda: platform_for(None), "unknown device None"),
    "no backend": (lambda: AttentionConfig(backend=5), "unknown backend 5"),
}


@pytest.mark.parametrize("call", CALLS)
def test_python_refuses(call):
    made, said = CALLS[call]
    with pytest.raises(AttnplatError) as caught:
        made()
    assert said in str(caught.value)


RUN_FIELDS = {
    "sizes": (
        ("model_head_size", "rswa_window", "tp_size", "dcp_size", "pcp_size", "user_block_size"),
        (0, -1, 2**40, 1.5, "x", [], True),
    ),
    "flags": (
        ("is_diffusion", "uses_mm_prefix", "kv_connector", "batch_invariant"),
        (2, -1, "x", [], 1.5, 1, 0, 1.0),
    ),
    "caps": (("model_soft_cap",), (0, -1.0, float("nan"), float("inf"), "x", [], True)),
    "names": (("run_kv_cache_dtype", "model_attn_type"), (0, "x", [], True)),
}


@pytest.mark.parametrize("sort", RUN_FIELDS)
def test_what_is_true_of_a_run_is_checked(sort):
    for name in RUN_FIELDS[sort][0]:
        for value in RUN_FIELDS[sort][1]:
            with pytest.raises(ConfigError, match=name.removeprefix("run_")):
                RunContext(**{name: value})


def test_a_run_that_is_told_nothing_says_nothing():
    assert RunContext().to_dict() == {} and RunContext().needs == frozenset()
    assert json.loads(json.dumps(RunContext(rswa_window=128).to_dict())) == {"rswa_window": 128}

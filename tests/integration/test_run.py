"""`attnplat run`: right answers out of one ragged batch, and one clear message for bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnplat.cli.main import main
from attnplat.cli.run import PROMPTS, Answer, Progress, _stream
from tests.integration.families import CHOSEN

NEW = 8


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ATTNPLAT_DEVICE", "ATTNPLAT_BACKEND", "ATTNPLAT_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATTNPLAT_CACHE_DIR", str(tmp_path / "cache"))


def command(model: Path, *more: str) -> list[str]:
    return ["run", "--model", str(model), "--max-new-tokens", str(NEW), "--device", "cpu", *more]


def as_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_prompt_gets_the_tokens_of_transformers(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["a", "The cat sat on the mat and", "x" * 70, "Bonjour"]
    options = [word for prompt in prompts for word in ("--prompt", prompt)]
    found = as_json(capsys, command(tiny_model, "--raw", *options))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for prompt, answer in zip(prompts, found["answers"], strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        own = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :]
        assert answer["prompt"] == prompt and answer["tokens"] == own.tolist()
        assert answer["text"] == tokenizer.decode(own, skip_special_tokens=True)
    assert found["layers"][0]["indices"] == [0, 1]
    assert found["layers"][0]["selection"]["chosen"] == CHOSEN
    timing = found["timing"]
    assert timing["steps"] <= NEW and timing["prefill_tokens_per_second"] > 0
    for kind in ("prefill", "decode"):
        assert 0 < timing[f"{kind}_attention_seconds"] < timing[f"{kind}_seconds"]


def test_text_is_followed_by_what_ran_and_why(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tiny_model, "--prompt", "ab", "--prompt", "abc")) == 0
    out, err = capsys.readouterr()
    assert "2 prompts in one ragged batch" in out and "[1] ab" in out and "[2] abc" in out
    table = out[out.index("layers  kind") :]
    assert f"full_attention, head_size 16, 4/2 heads  {CHOSEN}" in table
    assert "prefill: 5 tokens" in table and "tokens/s" in table
    assert "loading tiny-llama" in err and "tokens/s" not in err


@pytest.mark.parametrize(
    "option", ["--backend", "--attention-backend", "--attention-config.backend"]
)
def test_the_backend_can_be_named(
    option: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, command(tiny_model, "--prompt", "ab", option, "reference"))
    selection = found["layers"][0]["selection"]
    assert selection["chosen"] == "REFERENCE"
    assert selection["requested_by"] in ("command line", "user")


def test_the_form_follows_the_prompt(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--prompt", "A beginning that", "--prompt", "A question?"]
    forms = {}
    for option in ("--chat", "--raw", None):
        more = [option] if option else []
        answers = as_json(capsys, command(tiny_model, *given, *more))["answers"]
        forms[option] = [(answer["form"], answer["prompt_tokens"]) for answer in answers]
    assert forms["--raw"] == [("raw", 16), ("raw", 11)]
    assert forms["--chat"] == [("chat", 18), ("chat", 13)]
    assert forms[None] == [("raw", 16), ("chat", 13)]


def test_prompts_come_from_a_file_too(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts").write_text("second\n\nthird\n", encoding="utf-8")
    arguments = command(tiny_model, "--prompt", "first", "--prompt-file", str(tmp_path / "prompts"))
    answers = as_json(capsys, arguments)["answers"]
    assert [answer["prompt"] for answer in answers] == ["first", "second", "third"]


def test_without_prompts_a_ragged_batch_is_asked(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = as_json(capsys, command(tiny_model))["answers"]
    assert [answer["prompt"] for answer in answers] == list(PROMPTS)
    assert len({answer["prompt_tokens"] for answer in answers}) == len(PROMPTS)


def test_few_blocks_make_prompts_wait_and_change_no_token(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--prompt", "a" * 30, "--prompt", "b" * 30, "--prompt", "c"]
    plenty = as_json(capsys, command(tiny_model, *given))
    few = as_json(capsys, command(tiny_model, *given, "--num-blocks", "5", "--block-size", "8"))
    assert [a["tokens"] for a in few["answers"]] == [a["tokens"] for a in plenty["answers"]]
    assert few["timing"]["steps"] > plenty["timing"]["steps"]


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "unknown backend": (["--backend", "FLASH_ATTEN"], "did you mean 'FLASH_ATTN'?"),
    "backend that does not fit": (["--backend", "FLASHINFER"], "FLASHINFER"),
    "backend of no adapter here": (["--attention-backend", "FLASH_ATTN"], "FLASH_ATTN"),
    "backend named twice": (
        ["--backend", "TORCH_SDPA", "--attention-backend", "REFERENCE"],
        "the backend is named twice",
    ),
    "unknown field": (["--attention-config.backnd", "X"], "backnd"),
    "unknown dtype": (["--dtype", "float23"], "unknown dtype 'float23'"),
    "unknown device": (["--device", "cpu:nonsense"], "nonsense"),
    "device that is not here": (["--device", "rocm:gfx950"], "simulated"),
    "dtype no backend takes": (["--dtype", "float64", "--backend", "TORCH_SDPA"], "float64"),
    "too few blocks for one prompt": (
        ["--num-blocks", "1", "--block-size", "16"],
        "needs 2 blocks of 16 tokens",
    ),
    "no blocks": (["--num-blocks", "0"], "--num-blocks is 0"),
    "no tokens": (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
    "more tokens than positions": (["--max-new-tokens", "999"], "max_position_embeddings"),
    "missing prompt file": (["--prompt-file", "/no/such/file"], "No such file"),
    "empty prompt": (["--prompt", " "], "--prompt is empty"),
    "missing model": (["--model", "/no/such/model"], "no such file or folder"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_message_and_a_code(
    case: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, says = BAD_INPUT[case]
    assert main(command(tiny_model, "--prompt", "twenty letters here.", *options)) == 2
    out, err = capsys.readouterr()
    assert says in err and "Traceback" not in err and out == ""
    assert sum(line.startswith("attnplat: ") for line in err.splitlines() if "..." not in line) == 1


def test_a_corrupt_model_is_one_message_and_a_code(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "corrupt"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert main(command(folder, "--prompt", "ab")) == 2
    assert f"{str(folder)!r} cannot be loaded" in capsys.readouterr().err


def test_a_cache_folder_that_cannot_be_written_is_told_of_once_and_done_without(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
    monkeypatch.setenv("ATTNPLAT_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert main(command(tmp_path / "model.gguf", "--prompt", "ab")) == 2
        assert "model.gguf' cannot be loaded" in capsys.readouterr().err
    notices = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(notices) == 1 and "ATTNPLAT_CACHE_DIR" in notices[0]


def test_offline_a_name_on_the_hub_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNPLAT_OFFLINE", "1")
    assert main(["run", "--model", "nobody/has-this", "--prompt", "ab"]) == 2
    err = capsys.readouterr().err
    assert "'nobody/has-this' from the Hugging Face hub" in err
    assert "ATTNPLAT_OFFLINE" in err


# Streaming ------------------------------------------------------------------------------------


class Words:
    """A tokenizer whose tokens are positions in a list of words."""

    words = ("one ", "two\n", "three ", "")

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[token] for token in tokens)


class Screen:
    """Collects what is written, flush by flush."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal = terminal
        self.shown: list[str] = []
        self._pending = ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self._pending += text

    def flush(self) -> None:
        if self._pending:
            self.shown.append(self._pending)
        self._pending = ""


def streamed(*, terminal: bool) -> list[str]:
    from attnplat.integrations.transformers.decoding import NewToken, TextStream

    answers = [Answer(p, True, TextStream(Words()), 1) for p in ("first", "second")]
    events = [
        NewToken(1, 0),
        NewToken(0, 0),
        NewToken(0, 1),
        NewToken(1, 2, "stop"),
        NewToken(0, 2),
        NewToken(0, 3, "stop"),
    ]
    screen = Screen(terminal=terminal)
    _stream(iter(events), answers, screen)  # type: ignore[arg-type]
    return screen.shown


def test_a_terminal_sees_the_first_answer_live_and_then_the_next() -> None:
    assert streamed(terminal=True) == [
        "[1] first\n",
        "one ",
        "two\n",
        "three ",
        "\n\n[2] second\none three \n\n",
    ]


def test_a_pipe_sees_whole_lines() -> None:
    shown = streamed(terminal=False)
    assert shown == ["[1] first\n", "one two\n", "three \n\n[2] second\none three \n\n"]


def test_progress_goes_to_standard_error_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    with Progress(sys.stderr).during("converting"):
        pass
    assert capsys.readouterr() == ("", "attnplat: converting ...\n")


def test_torch_is_left_as_it_was(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert main(command(tiny_model, "--prompt", "ab", "--dtype", "bfloat16")) == 0
    capsys.readouterr()
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert after == before

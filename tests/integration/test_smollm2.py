"""SmolLM2-135M-Instruct, a real model: its answers through attnplat are transformers' own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnplat import AttentionConfig
from attnplat.integrations.transformers import PagedModel, generate, register
from attnplat.integrations.transformers.decoding import complete
from attnplat.integrations.transformers.loading import find_model, load_model
from attnplat.integrations.transformers.scheduler import blocks_for_all
from attnplat.storage import Store

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (3, 9, 17, 40, 64, 129, 257, 400)
NEW = 12


@dataclass(frozen=True)
class Demo:
    """The model twice, with the same weights: through attnplat, and eager."""

    cache: Path
    model: PreTrainedModel
    eager: PreTrainedModel
    tokenizer: Any


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    register()
    folder = tmp_path_factory.mktemp("cache")
    cache = Store(folder, "models")
    loaded = load_model(
        find_model(None),
        implementation="attnplat",
        dtype=torch.float32,
        device=torch.device("cpu"),
        cache=cache,
    )
    (entry,) = (path for path in cache.folder.iterdir() if path.is_dir())
    eager = AutoModelForCausalLM.from_pretrained(
        entry, attn_implementation="eager", dtype=torch.float32
    ).eval()
    yield Demo(folder, loaded.model, eager, loaded.tokenizer)
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture(scope="module")
def prompts(demo: Demo) -> list[list[int]]:
    """Text that a model knows well, so that no two tokens are nearly as likely."""
    ids = demo.tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"))["input_ids"]
    starts = (150, 20, 420, 700, 40, 900, 300, 10)
    return [list(ids[s : s + n]) for s, n in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def own_tokens(demo: Demo, prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        out = demo.eager.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def answers(demo: Demo, given: list[list[int]], **options: Any) -> list[list[int]]:
    paged = PagedModel(demo.model, **options)
    paged.allocate(blocks_for_all(given, NEW, paged.block_size))
    stops = [demo.tokenizer.eos_token_id]
    events = generate(paged, given, max_new_tokens=NEW, stop_tokens=stops)
    return [list(c.tokens) for c in complete(events, len(given))]


def test_eight_prompts_together_get_the_tokens_that_each_gets_alone(
    demo: Demo, prompts: list[list[int]], own_tokens: list[list[int]]
) -> None:
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert answers(demo, prompts) == own_tokens


def test_the_reference_gives_the_same_tokens(
    demo: Demo, prompts: list[list[int]], own_tokens: list[list[int]]
) -> None:
    found = answers(demo, prompts[:5], attention=AttentionConfig(backend="REFERENCE"))
    assert found == own_tokens[:5]


def test_logits_agree_to_a_ten_thousandth(demo: Demo, prompts: list[list[int]]) -> None:
    paged = PagedModel(demo.model)
    blocks, first = [], 0
    for prompt in prompts:
        count = -(-len(prompt) // paged.block_size)
        blocks.append(list(range(first, first + count)))
        first += count
    paged.allocate(first)
    found = paged.step(prompts, [0] * len(prompts), blocks)
    with torch.inference_mode():
        for prompt, logits in zip(prompts, found, strict=True):
            expected = demo.eager(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
            assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max(), len(prompt)


def test_the_command_answers_right_and_starts_from_the_cache(demo: Demo) -> None:
    command = [sys.executable, "-m", "attnplat", "run", "--json", "--max-new-tokens", "8"]
    prompts = ["--prompt", "The capital of France is", "--prompt", "How many days has a week?"]
    ended = subprocess.run(
        [*command, *prompts],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            "ATTNPLAT_CACHE_DIR": str(demo.cache),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["answers"][0]["text"].split()[0] == "Paris."
    assert report["answers"][1]["form"] == "chat"
    (kind,) = report["layers"]
    assert kind["indices"] == list(range(30))
    assert "converting" not in ended.stderr


@pytest.mark.slow
def test_the_converted_weights_are_those_of_the_gguf_file(demo: Demo) -> None:
    source = find_model(None)
    assert source.path is not None
    direct = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).state_dict()
    converted = demo.eager.state_dict()
    assert direct.keys() == converted.keys()
    assert all(torch.equal(direct[name], converted[name]) for name in direct)

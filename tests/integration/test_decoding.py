"""Greedy decoding of a ragged batch gives the tokens that transformers' own generate gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from attnplat import AttentionConfig
from attnplat.errors import ConfigError, OutOfBlocksError, UnsupportedCallError
from attnplat.integrations.transformers import PagedModel, generate, register
from attnplat.integrations.transformers.decoding import TextStream, Timing, complete
from tests.integration.families import VOCABULARY, build

LENGTHS = (3, 40, 1, 17)
NEW = 12


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def ready(model: PreTrainedModel, num_blocks: int = 100, **options: object) -> PagedModel:
    register()
    model.set_attn_implementation("attnplat")
    paged = PagedModel(model, **{"block_size": 4, **options})  # type: ignore[arg-type]
    paged.allocate(num_blocks)
    return paged


def own_tokens(model: PreTrainedModel, prompt: list[int], stop: int | None = None) -> list[int]:
    """What transformers generates with eager attention, the prompt by itself."""
    model.set_attn_implementation("eager")
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=stop
    )
    return out[0, len(prompt) :].tolist()


def tokens_of(paged: PagedModel, given: list[list[int]], **options: object) -> list[list[int]]:
    events = generate(paged, given, max_new_tokens=NEW, **options)  # type: ignore[arg-type]
    return [list(c.tokens) for c in complete(events, len(given))]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
def test_tokens_are_those_of_transformers(name: str) -> None:
    model = build(name)
    expected = [own_tokens(model, prompt) for prompt in prompts()]
    assert tokens_of(ready(model), prompts()) == expected


def test_waiting_and_pieces_change_no_token() -> None:
    model = build("mistral")
    expected = [own_tokens(model, prompt) for prompt in prompts()]
    few, timing = ready(model, num_blocks=14), Timing()
    assert tokens_of(few, prompts(), max_step_tokens=7, timing=timing) == expected
    assert timing.steps > NEW and timing.prefill_tokens == sum(LENGTHS)
    assert timing.prefill_tokens + timing.decode_tokens <= sum(LENGTHS) + NEW * len(LENGTHS)


def test_a_stop_token_ends_its_request_alone() -> None:
    model = build("llama")
    free = [own_tokens(model, prompt) for prompt in prompts()]
    stop = free[1][4]
    expected = [own_tokens(model, prompt, stop) for prompt in prompts()]
    events = generate(ready(model), prompts(), max_new_tokens=NEW, stop_tokens=[stop])
    found = complete(events, len(LENGTHS))
    assert [list(c.tokens) for c in found] == expected
    assert [c.finish_reason for c in found] == [
        "stop" if stop in tokens else "length" for tokens in expected
    ]


def test_another_backend_gives_the_same_tokens() -> None:
    model = build("gpt_oss")
    reference = ready(model, attention=AttentionConfig(backend="REFERENCE"))
    assert {state.impl.name for state in reference.layers.values()} == {"REFERENCE"}
    expected = tokens_of(ready(model), prompts())
    assert tokens_of(reference, prompts()) == expected


def test_layers_of_equal_plan_share_one_plan() -> None:
    paged = ready(build("qwen3", num_hidden_layers=4, layer_types=None, max_window_layers=2))
    keys = {state.impl.plan_key for state in paged.layers.values()}
    assert len(paged.layers) == 4 and len(keys) == len(paged.layer_kinds) == 2
    assert sum(len(kind.layers) for kind in paged.layer_kinds) == 4


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    paged = ready(build("llama"), num_blocks=5)
    with pytest.raises(OutOfBlocksError, match="request 1"):
        generate(paged, prompts(), max_new_tokens=NEW)
    with pytest.raises(ConfigError, match=r"takes 512 .*generate at most 3"):
        generate(paged, [[5] * 510], max_new_tokens=NEW)
    with pytest.raises(ConfigError, match="num_blocks is 0"):
        paged.allocate(0)


def test_models_that_cannot_run_paged_say_why() -> None:
    register()
    cases = {
        "deepseek_v32": "more than keys and values",
        "bert": "cannot run paged",
        "t5": "cannot run paged",
    }
    for name, says in cases.items():
        model = build(name)
        model.set_attn_implementation("attnplat")
        with pytest.raises(UnsupportedCallError, match=says):
            PagedModel(model)
    with pytest.raises(UnsupportedCallError, match="attn_implementation is"):
        PagedModel(build("llama"))


def test_a_paged_step_refuses_what_it_cannot_bring() -> None:
    paged = ready(build("llama"))
    name = next(iter(paged._cache_argument()))
    ids = torch.arange(3, 6)[None]
    with torch.inference_mode(), pytest.raises(UnsupportedCallError, match="keys"):
        # The cache alone, without the step that says where the tokens are.
        paged.model(ids, position_ids=ids, **{name: paged._cache_argument()[name]})


def test_text_comes_in_whole_characters(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "añ€😀 z"
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text and stream.end() == ""
    assert "�" not in "".join(pieces) and len(pieces) == len(text.encode())


def test_text_that_ends_inside_a_character_is_not_lost(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer("a€")["input_ids"][:-1]]
    assert pieces == ["a", "", ""] and stream.end() == "�"

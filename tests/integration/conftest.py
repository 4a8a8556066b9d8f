"""A tiny model folder with a tokenizer, as a user would have one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

# A machine may have torch and no transformers; nothing here runs there.
if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]

CHAT = (
    "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)


def save_tiny_model(folder: Path) -> None:
    """A two-layer llama with random weights and a tokenizer of single bytes."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {byte: number + 3 for number, byte in enumerate(alphabet)}
    words = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    words.pre_tokenizer = ByteLevel(add_prefix_space=False)
    words.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    set_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; not to be written to."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    save_tiny_model(folder)
    return folder

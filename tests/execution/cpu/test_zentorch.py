"""ZENTORCH gives what float64 gives, in the one version that it knows.

Where zentorch is installed beside torch of its minor, the real one runs; elsewhere a double takes
its place that has the same schema, is strict about what it is given, and computes as torch does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attnplat.config.names import Feature
from attnplat.errors import ConfigError, PackageError
from attnplat.platforms.cpu.impls.features import ZENTORCH_TORCH, ZENTORCH_VERSION
from attnplat.platforms.cpu.impls.zentorch import OPERATOR, ZentorchImpl, load_operator
from tests.execution.cases import Step, assert_close, layer, make_step, run, run_plan
from tests.execution.cpu.steps import same

REAL = importlib.util.find_spec("zentorch") is not None
pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(f"{ZENTORCH_TORCH}."),
    reason=f"zentorch {ZENTORCH_VERSION} is for torch {ZENTORCH_TORCH}",
)
ENCODER: dict[str, Any] = {"attn_type": "encoder_only", "also_needs": frozenset({Feature.LSE})}
Results = tuple[torch.Tensor, torch.Tensor]


def strict_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    zentorch_op_name: str = "",
) -> Results:
    """As the real operator, and refusing what it would read past the end of."""
    assert query.shape == key.shape == value.shape and query.dim() == 4
    assert query.dtype == key.dtype == value.dtype
    assert dropout_p == 0 and not is_causal and attn_mask is None and scale is not None
    q, k, v = query.float(), key.float(), value.float()
    scores = (q @ k.transpose(-1, -2)) * scale
    out = (scores.softmax(-1) @ v).to(query.dtype)
    # The real one's rows of one token are beside each other.
    return out.transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(-1)


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a double of the package where Python finds it first."""
    libraries: list[torch.library.Library] = []

    def make(
        found: str = ZENTORCH_VERSION,
        schema: str = OPERATOR,
        attention: Callable[..., Results] = strict_attention,
        source: str = "",
    ) -> None:
        (tmp_path / "zentorch").mkdir()
        (tmp_path / "zentorch" / "__init__.py").write_text(source)
        info = tmp_path / f"zentorch-{found}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zentorch\nVersion: {found}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        library = torch.library.Library("zentorch", "DEF")
        library.define(schema.partition("::")[2])
        library.impl("zentorch_sdpa", attention, "CPU")
        libraries.append(library)

    yield make
    for library in libraries:
        library._destroy()
    sys.modules.pop("zentorch", None)


@pytest.fixture
def package(install: Install) -> None:
    """The package: the real one where it is installed."""
    if not REAL:
        install()


def attend(step: Step) -> Results:
    """(out, lse) by zentorch."""
    impl = ZentorchImpl.create(step.config, "cpu")
    return run_plan(impl, impl.plan(step.batch), step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.usefixtures("package")
def test_encoders_of_every_dtype_and_group(dtype: str, heads: tuple[int, int]) -> None:
    wants = {**ENCODER, "dtype": dtype, "num_heads": heads[0], "num_kv_heads": heads[1]}
    step = make_step(layer(**wants), [50, 1, 50, 9], [50, 1, 50, 9])
    assert_close(attend(step), run("REFERENCE", step), step)


@pytest.mark.usefixtures("package")
def test_empty_requests_and_none_at_all() -> None:
    step = make_step(layer(**ENCODER), [0, 7, 0], [0, 7, 0])
    assert_close(attend(step), run("REFERENCE", step), step)


@pytest.mark.usefixtures("package")
def test_the_requests_beside_one_do_not_change_its_shape_of_call() -> None:
    step = make_step(layer(**ENCODER), [20, 20], [20, 20])
    out, lse = attend(step)
    assert same((out, lse), attend(step))


@pytest.mark.parametrize(
    ("wants", "lengths", "says"),
    [
        ({"causal": True}, ([4], [4]), "encoder_only, causal"),
        ({"attn_type": "decoder", "causal": False}, ([4], [4]), "the layer is decoder"),
        ({"sinks": True}, ([4], [4]), "does not take sinks"),
        ({}, ([3], [4]), "request 0 has 3 queries and 4 keys"),
    ],
)
@pytest.mark.usefixtures("package")
def test_what_it_does_not_run_is_refused(
    wants: dict[str, Any], lengths: tuple[list[int], list[int]], says: str
) -> None:
    config = layer(**{**ENCODER, **wants})
    step = make_step(layer(**ENCODER), *lengths) if not wants else None
    with pytest.raises(ConfigError, match=says):
        impl = ZentorchImpl.create(config, "cpu")
        assert step is not None
        impl.plan(step.batch)


@pytest.mark.skipif(REAL, reason="the real package is installed")
def test_without_the_package_it_says_so() -> None:
    with pytest.raises(PackageError, match="zentorch, which is not installed"):
        load_operator()


@pytest.mark.skipif(REAL, reason="the real package is installed")
@pytest.mark.parametrize(
    ("wants", "says"),
    [
        ({"found": "2.13.0.1"}, "runs zentorch 2.13.0.2 beside torch 2.13; installed are"),
        ({"found": "2.14.0.1"}, "installed are zentorch 2.14.0.1"),
        ({"schema": OPERATOR.replace("*, ", "*, bool extra=False, ")}, "zentorch's operator is"),
        ({"source": "raise ImportError('wrong torch')"}, "cannot be used: wrong torch"),
    ],
)
def test_any_other_build_is_refused(install: Install, wants: dict[str, Any], says: str) -> None:
    install(**wants)
    with pytest.raises(PackageError, match=says):
        load_operator()


@pytest.mark.skipif(REAL, reason="the real package is installed")
@pytest.mark.parametrize("wrong", ["shape", "dtype", "lse"])
def test_results_of_another_kind_are_refused(install: Install, wrong: str) -> None:
    def attention(*args: Any, **options: Any) -> Results:
        out, lse = strict_attention(*args, **options)
        return {
            "shape": (out[:, :1].clone(), lse),
            "dtype": (out.double(), lse),
            "lse": (out, lse.double()),
        }[wrong]

    install(attention=attention)
    step = make_step(layer(**ENCODER), [5], [5])
    with pytest.raises(PackageError, match="it is not the build that ZENTORCH was written for"):
        attend(step)


@pytest.mark.skipif(not REAL, reason="zentorch is not installed")
def test_the_real_package_is_the_one_that_is_known() -> None:
    assert importlib.metadata.version("zentorch") == ZENTORCH_VERSION
    assert callable(load_operator())

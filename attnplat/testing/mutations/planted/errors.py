"""Bugs in what must be refused."""

from __future__ import annotations

from typing import Any

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.plan import Plan
from attnplat.backends.workspace import Workspace
from attnplat.config.names import Dtype
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import Specimen

BUGS = BugList("NFGAC")
Tensor = torch.Tensor


@BUGS.impl
class FeaturesNotRefused(Specimen):
    """A feature or an operation that it does not take is ignored."""

    def _refuse_unserved(self) -> None:
        return None


@BUGS.impl
class EncodingsNotRefused(Specimen):
    """A cache encoding that it does not store is taken for the plain one."""

    def _encoding(self, encoding: Encoding | str | None) -> Encoding:
        if encoding is not None and Encoding(encoding) not in PLAIN_ENCODINGS:
            return Encoding(Dtype(self.config.dtype).value)
        return super()._encoding(encoding)


@BUGS.impl
class OptionsIgnored(Specimen):
    """Tensors that the layer did not declare are ignored."""

    def _check_options(self, plan: Plan, given: dict[str, Any]) -> None:
        form = self.form
        declared = {
            "sinks": form.sinks,
            "alibi_slopes": form.alibi,
            "position_bias": form.position_bias,
            "topk_indices": form.mask.topk is not None,
        }
        super()._check_options(plan, {n: x if declared[n] else None for n, x in given.items()})

    def _attend(self, plan: Plan, call: Any) -> None:
        super()._attend(plan, call)


@BUGS.impl
class MissingOptionsIgnored(Specimen):
    """Tensors that the layer declared and the call lacks are done without."""

    def _check_options(self, plan: Plan, given: dict[str, Any]) -> None:
        if all(tensor is not None for tensor in given.values()):
            super()._check_options(plan, given)


@BUGS.impl
class BatchMasksIgnored(Specimen):
    """Masks of the batch that the layer did not declare are ignored."""

    def _check_batch(self, batch: Batch) -> None:
        known = dict.fromkeys(("causal", "ranges", "prefix_lens", "tree_mask"))
        for name in self.form.batch_masks:
            known.pop(name)
        super()._check_batch(batch.replace(**known))


@BUGS.impl
class LseNotRefused(Specimen):
    """An LSE that the layer did not declare is given."""

    def _check_rows(
        self, plan: Plan, q: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool
    ) -> None:
        super()._check_rows(plan, q, out, lse, return_lse and self.form.lse)


@BUGS.impl
class RowsNotChecked(Specimen):
    """The headers of q, out and lse are not looked at."""

    def _check_rows(
        self, plan: Plan, q: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool
    ) -> None:
        return None


@BUGS.impl
class StridesNotChecked(Specimen):
    """A last dimension that is not dense is read as if it were."""

    def _check(self, name: str, tensor: Any, shape: Any, dtype: Any, **options: Any) -> None:
        super()._check(name, tensor, shape, dtype, **{**options, "rows_matter": False})


@BUGS.impl
class NewKeysNotChecked(Specimen):
    """The headers of new keys and values are not looked at."""

    def _check_kv(self, kv: Any, rows: Any) -> None:
        return None


@BUGS.impl
class CacheNotChecked(Specimen):
    """Any cache is taken."""

    def _check_cache(self, cache: KVCache, pages: PageTable | None) -> None:
        return None


@BUGS.impl
class BlocksNotChecked(Specimen):
    """Blocks that the cache does not have are looked up all the same."""

    def _check_blocks(self, plan: Plan, cache: KVCache) -> None:
        return None


@BUGS.impl
class PlansNotChecked(Specimen):
    """Any plan is taken."""

    def _check_key(self, plan: Plan) -> None:
        return None


@BUGS.impl
class TablesNotChecked(Specimen):
    """The headers of tables are not looked at."""

    def _check_pages(self, batch: Batch, pages: PageTable, lengths: HostLengths | None) -> None:
        return None


@BUGS.impl
class ValuesNotValidated(Specimen):
    """validate=True looks at nothing."""

    def plan(
        self,
        batch: Batch,
        pages: PageTable | None = None,
        *,
        workspace: Workspace | None = None,
        bounds: BatchBounds | None = None,
        validate: bool = False,
    ) -> Plan:
        return super().plan(batch, pages, workspace=workspace, bounds=bounds)


@BUGS.impl
class SourcesNotChecked(Specimen):
    """Where keys come from is not looked at."""

    def _check_source(self, *given: Any) -> None:
        return None


@BUGS.impl
class GradientsNotRefused(Specimen):
    """Inputs that require gradients give results without."""

    def _refuse_gradients(self, *tensors: Tensor | None) -> None:
        return None


@BUGS.impl
class WritesBeforeChecks(Specimen):
    """New tokens are written before the call is checked."""

    def forward(self, plan: Plan, q: Any, cache: KVCache | None = None, **options: Any) -> Any:
        kv = options.get("kv")
        if cache is not None and kv is not None and plan.slots is not None:
            try:
                k, v = kv
                cache.write(k, v, plan.slots)
            except Exception:
                return super().forward(plan, q, cache, **options)
        return super().forward(plan, q, cache, **options)


@BUGS.impl
class OutClearedBeforeChecks(Specimen):
    """A given out is cleared before the call is checked."""

    def forward(self, plan: Plan, q: Any, cache: KVCache | None = None, **options: Any) -> Any:
        out = options.get("out")
        if isinstance(out, Tensor) and out.device == self.device:
            out[: int(plan.batch.query_start_loc[-1])] = 0
        return super().forward(plan, q, cache, **options)


@BUGS.impl
class OutNotZeroed(Specimen):
    """Padding rows of an allocated out hold anything."""

    def forward(self, plan: Plan, q: Any, cache: KVCache | None = None, **options: Any) -> Any:
        result = super().forward(plan, q, cache, **options)
        if options.get("out") is None:
            out = result[0] if isinstance(result, tuple) else result
            out[int(plan.batch.query_start_loc[-1]) :] = 7
        return result


@BUGS.impl
class OutNotReturned(Specimen):
    """The result is a copy of the out that was given."""

    def forward(self, plan: Plan, q: Any, cache: KVCache | None = None, **options: Any) -> Any:
        result = super().forward(plan, q, cache, **options)
        if isinstance(result, tuple):
            return result[0].clone(), result[1]
        return result.clone()

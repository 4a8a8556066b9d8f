"""Bugs in plans, updates, threads, and what bits may depend on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnplat.backends.batch import Batch, BatchBounds, HostLengths, PageTable
from attnplat.backends.kv_cache import KVCache
from attnplat.backends.plan import Call, Plan, PlanKey, Schedule
from attnplat.backends.workspace import Workspace
from attnplat.config.names import Feature
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.mutations.specimen import Lengths, Rows, Specimen

BUGS = BugList("MJARNC")
Tensor = torch.Tensor
Two = tuple[Tensor, Tensor]


class _Planned(Specimen):
    """Base of bugs that know the arguments of `plan`."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        return made

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> Any:
        made = super()._schedule(batch, pages, lengths, workspace)
        return self.schedule(made, batch, pages, workspace)


@BUGS.impl
class EmptyBatchRaises(_Planned):
    """A batch without requests is an error."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        if not made.seq_lens:
            raise IndexError("no requests")
        return made


@BUGS.impl
class FewRowsAreDecode(_Planned):
    """No more rows than requests are taken for one row a request."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        rows = made.query_start[-1]
        if rows and rows <= len(made.seq_lens):
            start = tuple(min(r, rows) for r in range(len(made.seq_lens) + 1))
            return replace(made, query_start=start)
        return made


@BUGS.impl
class PromptOfOneIsDecode(_Planned):
    """A request of one row is taken to have context."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        room = 0 if pages is None else pages.block_size
        lens = tuple(2 if keys == 1 and room >= 2 else keys for keys in made.seq_lens)
        return replace(made, seq_lens=lens)


@BUGS.impl
class DecodeFirstAssumed(_Planned):
    """Requests after the first prompt are taken for prompts without context."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        lens, prompt = list(made.seq_lens), False
        for r, keys in enumerate(made.seq_lens):
            rows = made.query_start[r + 1] - made.query_start[r]
            if prompt and rows == 1:
                lens[r] = min(rows, keys)
            prompt = prompt or rows > 1
        return replace(made, seq_lens=tuple(lens))


@BUGS.impl
class QueriesUniform(_Planned):
    """All requests are taken to have the first one's number of rows."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        count = len(made.seq_lens)
        each = made.query_start[1] if count else 0
        start = tuple(min(r * each, made.query_start[-1]) for r in range(count + 1))
        return replace(made, query_start=start) if 0 < each <= 5 else made


@BUGS.impl
class BoundsAreLengths(_Planned):
    """The bound on lengths is taken for the length of the longest sequence."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        longest = max(made.seq_lens, default=0)
        lens = tuple(batch.max_seq_len if keys == longest else keys for keys in made.seq_lens)
        return replace(made, seq_lens=lens)


@BUGS.impl
class HostLengthsTrusted(_Planned):
    """Lengths on the host are taken as exact even where they are upper bounds."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        host = batch.seq_lens_host
        return made if host is None else replace(made, seq_lens=tuple(host.tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Borrowed(Lengths):
    """A schedule that keeps the batch's own tensors."""

    lens: Tensor


@BUGS.impl
class HostLengthsBorrowed(_Planned):
    """The plan reads the engine's length tensor when it runs."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        if batch.seq_lens_host is None:
            return made
        return _Borrowed(
            query_start=made.query_start,
            seq_lens=made.seq_lens,
            scratch=made.scratch,
            highest_block=made.highest_block,
            lens=batch.seq_lens_host,
        )

    def requests(self, schedule: Schedule, batch: Batch) -> Iterator[Rows]:
        if isinstance(schedule, _Borrowed):
            schedule = replace(schedule, seq_lens=tuple(schedule.lens.tolist()))
        return super().requests(schedule, batch)


@BUGS.impl
class PlanRemembersResult(_Planned):
    """A plan used again gives the first layer's result."""

    def _attend(self, plan: Plan, call: Call) -> None:
        kept = getattr(plan.schedule, "kept", None)
        if kept is None:
            super()._attend(plan, call)
            object.__setattr__(plan.schedule, "kept", (call.out.clone(), call.lse))
            return
        call.out.copy_(kept[0])
        if call.lse is not None and kept[1] is not None:
            call.lse.copy_(kept[1])


class _OfClass(Specimen):
    """Base of bugs that keep state in the class."""

    held: dict[str, Any]


@BUGS.impl
class LastPlanWins(_OfClass):
    """All plans of a process share the last one's lengths."""

    held: dict[str, Any] = {}  # noqa: RUF012 - shared on purpose

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> Any:
        made = super()._schedule(batch, pages, lengths, workspace)
        self.held["last"] = made
        return made

    def requests(self, schedule: Schedule, batch: Batch) -> Iterator[Rows]:
        last = self.held.get("last")
        if last is None or len(last.seq_lens) != batch.num_reqs:
            last = schedule
        return super().requests(last, batch)


@BUGS.impl
class ScratchOfProcess(_OfClass):
    """Queries go through one scratch buffer that all threads share."""

    held: dict[str, Any] = {}  # noqa: RUF012 - shared on purpose

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        self.held["q"] = call.q.clone()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)
        q = self.held["q"]
        return super().attend(plan, replace(call, q=q if q.shape == call.q.shape else call.q), rows)


@BUGS.impl
class DiesAfterFork(_OfClass):
    """A process forked after the first use cannot run."""

    held: dict[str, Any] = {}  # noqa: RUF012 - shared on purpose

    def _attend(self, plan: Plan, call: Call) -> None:
        if self.held.setdefault("process", os.getpid()) != os.getpid():
            raise RuntimeError("another process owns the thread pool")
        super()._attend(plan, call)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Threaded(Lengths):
    """A schedule made for a number of threads."""

    threads: int


@BUGS.impl
class ThreadsInPlan(_Planned):
    """A plan runs only with the number of threads it was made with."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        return _Threaded(
            query_start=made.query_start,
            seq_lens=made.seq_lens,
            scratch=made.scratch,
            highest_block=made.highest_block,
            threads=torch.get_num_threads(),
        )

    def _attend(self, plan: Plan, call: Call) -> None:
        assert isinstance(plan.schedule, _Threaded)
        assert plan.schedule.threads == torch.get_num_threads()
        super()._attend(plan, call)


@BUGS.impl
class UpdateKeepsTail(Specimen):
    """An update to fewer requests leaves the old plan's further requests at work."""

    def update(self, plan: Plan, batch: Batch, pages: PageTable | None = None) -> Plan:
        new, old = super().update(plan, batch, pages), plan.schedule
        assert isinstance(new.schedule, Lengths) and isinstance(old, Lengths)
        lens = list(new.schedule.seq_lens)
        start = list(new.schedule.query_start)
        for r, keys in enumerate(new.schedule.seq_lens):
            if keys == 0 and r < len(old.seq_lens) and old.seq_lens[r]:
                lens[r] = old.seq_lens[r]
                start[r + 1 :] = [x + 1 for x in start[r + 1 :]]
        stale = replace(new.schedule, seq_lens=tuple(lens), query_start=tuple(start))
        return replace(new, schedule=stale)


@BUGS.impl
class UpdateKeepsLengths(Specimen):
    """An update keeps the longer of old and new lengths."""

    def update(self, plan: Plan, batch: Batch, pages: PageTable | None = None) -> Plan:
        new, old = super().update(plan, batch, pages), plan.schedule
        assert isinstance(new.schedule, Lengths) and isinstance(old, Lengths)
        lens = new.schedule.seq_lens
        if len(lens) == len(old.seq_lens):
            lens = tuple(map(max, lens, old.seq_lens))
        return replace(new, schedule=replace(new.schedule, seq_lens=lens))


@BUGS.impl
class UpdateIgnoresBounds(Specimen):
    """A plan or an update may go beyond its bounds."""

    def plan(
        self,
        batch: Batch,
        pages: PageTable | None = None,
        *,
        workspace: Workspace | None = None,
        bounds: BatchBounds | None = None,
        validate: bool = False,
    ) -> Plan:
        return super().plan(batch, pages, workspace=workspace, validate=validate)


@BUGS.impl
class PlanKeyTooSmall(Specimen):
    """Layers of different windows and masks have one plan key."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plan_key: PlanKey = replace(
            self.plan_key, mask=replace(self.plan_key.mask, sliding_window=(-1, -1), topk=None)
        )


@BUGS.impl
class WorkspaceTrusted(_Planned):
    """Scratch from the workspace is taken to be zero."""

    def schedule(
        self, made: Lengths, batch: Batch, pages: PageTable | None, workspace: Workspace | None
    ) -> Schedule:
        if workspace is None:
            return made
        with workspace.borrowed():
            piece = workspace.take(64)
        object.__setattr__(made, "piece", piece)
        return made

    def store(self, call: Call, rows: Rows, out: Tensor, lse: Tensor) -> None:
        super().store(call, rows, out, lse)

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        piece = getattr(plan.schedule, "piece", None)
        if piece is not None:
            assert isinstance(plan.schedule, Lengths)
            call.out[: plan.schedule.query_start[-1]] += piece.float().sum().to(call.out.dtype)


@BUGS.impl
class CountersLeftDirty(Specimen):
    """Counters in the workspace's zero region are not put back to zero."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        if plan.workspace is not None:
            plan.workspace.zeroed(64).add_(1)


@BUGS.impl
class CountersNotReset(Specimen):
    """Counters in the workspace's zero region change the result."""

    def _attend(self, plan: Plan, call: Call) -> None:
        super()._attend(plan, call)
        if plan.workspace is not None:
            counters = plan.workspace.zeroed(64)
            call.out[:1] += counters[:1].to(call.out.dtype)
            counters.fill_(1)


@BUGS.impl
class AutocastHonoured(Specimen):
    """Under autocast, queries are rounded to bfloat16."""

    def forward(self, plan: Plan, q: Tensor, cache: KVCache | None = None, **options: Any) -> Any:
        if torch.is_autocast_enabled(q.device.type):
            q = q.bfloat16().to(q.dtype)
        return super().forward(plan, q, cache, **options)


@BUGS.impl
class BatchMatesMatter(Specimen):
    """Tiles are smaller where there are several requests, in any mode."""

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        self.tile = 64 if plan.batch.num_reqs == 1 else 24
        return super().attend(plan, call, rows)


class _Varying(Specimen):
    """Base of bugs whose bits depend on what they must not: tiles are cut by `varies`."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        raise NotImplementedError

    def attend(self, plan: Plan, call: Call, rows: Rows) -> Two:
        self.tile = (64, 24, 11)[self.varies(plan, call, rows) % 3]
        return super().attend(plan, call, rows)


@BUGS.impl
class VariesWithTime(_Varying):
    """Tiles are cut differently from call to call."""

    calls = 0

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        type(self).calls += 1
        return self.calls


@BUGS.impl
class VariesWithUse(_Varying):
    """Tiles are cut differently when a plan is used again."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        uses = getattr(plan.schedule, "uses", 0) + (rows.first == 0)
        object.__setattr__(plan.schedule, "uses", uses)
        return uses - 1


@BUGS.impl
class VariesWithBlocks(_Varying):
    """Tiles are cut by the physical number of a sequence's first block."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        if plan.pages is None or not rows.keys:
            return 0
        return max(0, int(plan.pages.block_table[rows.number, 0]))


@BUGS.impl
class VariesWithTable(_Varying):
    """Tiles are cut by the width of the table."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return 0 if plan.pages is None else plan.pages.block_table.shape[1]


@BUGS.impl
class VariesWithPadding(_Varying):
    """Tiles are cut by the number of rows, padding included."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return plan.batch.num_tokens // 4


@BUGS.impl
class VariesWithStrides(_Varying):
    """Tiles are cut by whether the cache is contiguous."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        plane = call.cache.k if call.cache is not None else call.q
        return int(not plane.is_contiguous())


@BUGS.impl
class VariesWithOutput(_Varying):
    """Tiles are cut by whether the LSE is contiguous."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return int(call.lse is not None and not call.lse.is_contiguous())


@BUGS.impl
class VariesWithOrder(_Varying):
    """Tiles are cut by a request's number in the batch."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return rows.number


@BUGS.impl
class VariesWithSlots(_Varying):
    """Tiles are cut by whether the step writes."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return int(plan.slots is not None)


@BUGS.impl
class VariesWithUpdate(_Varying):
    """Tiles are cut differently after an update."""

    def update(self, plan: Plan, batch: Batch, pages: PageTable | None = None) -> Plan:
        new = super().update(plan, batch, pages)
        object.__setattr__(new.schedule, "updated", 1)
        return new

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return int(getattr(plan.schedule, "updated", 0))


@BUGS.impl
class VariesWithThreads(_Varying):
    """Tiles are cut by the number of threads."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        return torch.get_num_threads()


@BUGS.impl
class VariesUnlessInvariant(_Varying):
    """Batch-invariant mode is ignored: tiles are cut by the longest sequence of the batch."""

    def varies(self, plan: Plan, call: Call, rows: Rows) -> int:
        if Feature.BATCH_INVARIANCE not in self.config.needs:
            return 0
        assert isinstance(plan.schedule, Lengths)
        return max(plan.schedule.seq_lens) // 8

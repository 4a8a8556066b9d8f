"""Greedy decoding of many prompts in one ragged batch, and text out of the tokens."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnplat.integrations.transformers.paged import PagedModel
from attnplat.integrations.transformers.scheduler import Request, Scheduler, Work


@dataclass(frozen=True)
class NewToken:
    """A token that one request generated.

    Attributes:
        request: the request's number.
        token: the token id.
        finish_reason: "" while it goes on; `stop` (a stop token) or `length`.
    """

    request: int
    token: int
    finish_reason: str = ""


@dataclass
class Timing:
    """Where the time went; filled in while `generate` runs.

    Steps that compute part of a prompt count as prefill, whatever decodes in them besides.

    Attributes:
        prefill_tokens, prefill_seconds: prompt tokens computed, and the time of their steps.
        decode_tokens, decode_seconds: tokens out of the other steps, and their time.
        prefill_attention_seconds, decode_attention_seconds: how much of each was attention, on a
            processor; None elsewhere, where calls do not wait for the device.
        steps: all steps.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prefill_attention_seconds: float | None = None
    decode_attention_seconds: float | None = None
    steps: int = 0

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else None

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second, all requests together."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    tokens: tuple[int, ...]
    finish_reason: str


@dataclass
class TextStream:
    """The text of a growing list of tokens, piece by piece.

    A token may end inside a character; what is not yet certain is held back. Only the last
    few tokens are decoded again each time.
    """

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)
    _first: int = 0
    _shown: int = 0

    def add(self, token: int) -> str:
        """The text that `token` completes."""
        self.tokens.append(token)
        return self._new_text(final=False)

    def end(self) -> str:
        """What was held back."""
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self._decode(self.tokens[self._first : self._shown])
        text = self._decode(self.tokens[self._first :])
        if len(text) <= len(before) or (text.endswith("�") and not final):
            return ""
        # The next piece is decoded behind this one, since a tokenizer may join two with a space.
        self._first, self._shown = self._shown, len(self.tokens)
        return text[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def generate(
    model: PagedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int] = (),
    max_step_tokens: int = 2048,
    timing: Timing | None = None,
) -> Iterator[NewToken]:
    """Answer all prompts together, greedily; tokens come as they are found.

    Prompts are computed ragged, without padding; each request decodes one token a step and
    leaves when it is finished. Requests for which the cache has no room wait.

    Args:
        model: ready to run paged.
        prompts: token ids, one list each.
        max_new_tokens: most tokens per prompt.
        stop_tokens: ids that end a request; they are given out, too.
        max_step_tokens: most tokens in one step.
        timing: filled in as steps end.

    Raises:
        ConfigError: an empty prompt, or a model that takes fewer tokens.
        OutOfBlocksError: a prompt that the whole cache could not hold; nothing has run then.
    """
    scheduler = Scheduler(model.num_blocks, model.block_size, max_step_tokens=max_step_tokens)
    requests = [Request(i, tuple(prompt), max_new_tokens) for i, prompt in enumerate(prompts)]
    for request in requests:
        model.check_length(len(request.prompt), max_new_tokens)
    scheduler.submit(requests)
    return _run(model, scheduler, frozenset(stop_tokens), timing or Timing())


def _run(
    model: PagedModel, scheduler: Scheduler, stop_tokens: frozenset[int], timing: Timing
) -> Iterator[NewToken]:
    while not scheduler.done:
        step = scheduler.next_step()
        before, started = model.attention_seconds, time.perf_counter()
        logits = model.step(
            [work.tokens for work in step],
            [work.request.computed for work in step],
            [work.request.blocks for work in step],
        )
        found = logits.argmax(-1).tolist()
        seconds, after = time.perf_counter() - started, model.attention_seconds
        _note(timing, step, seconds, None if before is None or after is None else after - before)
        for work, token in zip(step, found, strict=True):
            if not work.last:
                scheduler.advance(work, None, stop=False)
                continue
            request = work.request
            reason = ""
            if token in stop_tokens:
                reason = "stop"
            elif len(request.output) + 1 == request.max_new_tokens:
                reason = "length"
            scheduler.advance(work, token, stop=bool(reason))
            yield NewToken(request.index, token, reason)


def _note(timing: Timing, step: Sequence[Work], seconds: float, attention: float | None) -> None:
    prompt_tokens = sum(len(work.tokens) for work in step if work.request.in_prompt)
    timing.steps += 1
    if prompt_tokens:
        timing.prefill_tokens += prompt_tokens
        timing.prefill_seconds += seconds
    else:
        timing.decode_tokens += len(step)
        timing.decode_seconds += seconds
    if attention is None:
        return
    if prompt_tokens:
        timing.prefill_attention_seconds = (timing.prefill_attention_seconds or 0.0) + attention
    else:
        timing.decode_attention_seconds = (timing.decode_attention_seconds or 0.0) + attention


def complete(events: Iterator[NewToken], count: int) -> list[Completion]:
    """The answers to `count` prompts, once all of `events` have come."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    reasons = [""] * count
    for event in events:
        tokens[event.request].append(event.token)
        reasons[event.request] = event.finish_reason
    return [Completion(tuple(t), r) for t, r in zip(tokens, reasons, strict=True)]

"""Which tokens run in the next step, and which cache blocks each request holds.

A request gets all the blocks it can ever need when it enters, and gives them back when it
leaves: nothing that has begun can run out of memory, and nothing computed is thrown away.
Until enough blocks are free a request waits. Plain Python; no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnplat.errors import ConfigError, OutOfBlocksError


class BlockPool:
    """The free blocks of a cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks.

        Raises OutOfBlocksError when there are fewer.
        """
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} blocks are asked for; {len(self._free)} of {self.num_blocks} are free"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Make blocks free again."""
        self._free.extend(reversed(blocks))


@dataclass(eq=False)
class Request:
    """One prompt being answered.

    Attributes:
        index: its number, in the order given.
        prompt: token ids.
        max_new_tokens: tokens it may generate.
        output: token ids generated so far.
        computed: tokens whose keys and values are in the cache.
        blocks: the cache blocks it holds.
    """

    index: int
    prompt: Sequence[int]
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]

    @property
    def most_cached(self) -> int:
        """Tokens it can ever have in the cache: the last one generated is never put there."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def in_prompt(self) -> bool:
        """Whether part of the prompt has still to be computed."""
        return self.computed < len(self.prompt)


@dataclass(frozen=True)
class Work:
    """The tokens that one request runs in a step; `last` says that a token comes out of it."""

    request: Request
    tokens: list[int]
    last: bool


class Scheduler:
    """Steps through requests: those that decode run every step, prompts fill what is left.

    Args:
        num_blocks, block_size: of the cache.
        max_step_tokens: most tokens in one step; longer prompts are computed in pieces.
    """

    def __init__(self, num_blocks: int, block_size: int, *, max_step_tokens: int = 2048) -> None:
        if max_step_tokens < 1:
            raise ConfigError(f"max_step_tokens is {max_step_tokens}; it takes at least 1")
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self._pool = BlockPool(num_blocks)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, in order; all of them or none.

        Raises:
            ConfigError: an empty prompt, or no token to generate.
            OutOfBlocksError: a request that the whole cache could not hold.
        """
        for request in requests:
            if not request.prompt:
                raise ConfigError(f"request {request.index} has an empty prompt")
            if request.max_new_tokens < 1:
                raise ConfigError(
                    f"max_new_tokens is {request.max_new_tokens}; it takes at least 1"
                )
            needed = self._blocks_for(request)
            if needed > self._pool.num_blocks:
                raise OutOfBlocksError(
                    f"request {request.index} ({len(request.prompt)} prompt tokens and "
                    f"{request.max_new_tokens} new) needs {needed} blocks of {self.block_size} "
                    f"tokens; the cache has {self._pool.num_blocks}. Give it {needed}, or generate "
                    "fewer tokens"
                )
        self._waiting.extend(requests)

    @property
    def done(self) -> bool:
        """Whether no request is left."""
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    def next_step(self) -> list[Work]:
        """What runs next; not empty unless `done`."""
        self._admit()
        room = self.max_step_tokens
        step = []
        # Decoding first: a prompt must not hold up those that are being read.
        for request in sorted(self._running, key=lambda r: r.in_prompt):
            tokens = request.tokens[request.computed :][:room]
            if not tokens:
                continue
            room -= len(tokens)
            last = request.computed + len(tokens) == len(request.prompt) + len(request.output)
            step.append(Work(request, tokens, last))
        return step

    def advance(self, work: Work, token: int | None, stop: bool) -> None:
        """Note that `work` has run and gave `token`; `stop` ends its request."""
        request = work.request
        request.computed += len(work.tokens)
        if token is not None:
            request.output.append(token)
        if stop:
            self._running.remove(request)
            self._pool.give_back(request.blocks)
            request.blocks = []

    def _admit(self) -> None:
        """First come, first served, so that a large request is not overtaken for ever."""
        while self._waiting:
            needed = self._blocks_for(self._waiting[0])
            if needed > self._pool.num_free:
                return
            request = self._waiting.popleft()
            request.blocks = self._pool.take(needed)
            self._running.append(request)

    def _blocks_for(self, request: Request) -> int:
        return -(-request.most_cached // self.block_size)


def blocks_for_all(prompts: Sequence[Sequence[int]], max_new_tokens: int, block_size: int) -> int:
    """Blocks with which no request has to wait."""
    requests = (Request(i, prompt, max_new_tokens) for i, prompt in enumerate(prompts))
    return sum(-(-request.most_cached // block_size) for request in requests)

"""The engine's requests behind one HTTP request: submitted together, ended together."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.async_llm import AsyncLLM, RequestStream
from headrace.frontend import Prepared
from headrace.outputs import RequestOutput, RequestUpdate
from headrace.server.errors import failure_of

__all__ = ["Run"]


class Run:
    """One engine request a prompt. Used on the engine's event loop."""

    def __init__(self, engine: AsyncLLM, requests: Sequence[Prepared]) -> None:
        self._engine = engine
        self._requests = requests
        self._positions = {request.front.request_id: place for place, request in enumerate(requests)}
        self._stream: RequestStream | None = None
        self.outputs: dict[int, RequestOutput] = {}
        """What came so far, by the number of the prompt."""

    def submit(self) -> None:
        """Hand all to the engine. Raises what the engine refuses with; `abort` must follow either way."""
        for request in self._requests:
            self._stream = self._engine.submit(request, self._stream)

    @property
    def num_prompts(self) -> int:
        """Engine requests."""
        return len(self._requests)

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._stream is not None and self._stream.is_over

    async def take(self) -> list[tuple[int, RequestUpdate]]:
        """Wait for something new; each update comes with the number of its prompt.

        Raises `EngineError` where the engine is gone.
        """
        assert self._stream is not None
        updates = [
            (self._positions[update.output.request_id], update) for update in await self._stream.take()
        ]
        self.outputs.update((place, update.output) for place, update in updates)
        return updates

    async def finish(self) -> list[RequestOutput]:
        """Wait for the end, and return what came out, by prompt. Raises `ApiError` for an answer that failed."""
        while not self.is_over:
            for _, update in await self.take():
                for delta in update.deltas:
                    failure = failure_of(delta)
                    if failure is not None:
                        raise failure
        return [self.outputs[place] for place in range(len(self._requests))]

    def abort(self) -> None:
        """End what is not finished."""
        self._engine.abort(self._positions)

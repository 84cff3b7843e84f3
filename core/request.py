"""A request: as it enters the core (`EngineRequest`) and as the scheduler keeps it (`Request`)."""

from __future__ import annotations

import enum

import msgspec

from headrace.core.sampling_params import SamplingParams
from headrace.core.stash import Stash

__all__ = ["BlockKey", "EngineRequest", "FinishReason", "Request", "RequestState"]

FinishReason = str
"""`"stop"`, `"length"`, `"abort"`, `"error"`, or a word of a plugin's own."""


class BlockKey(msgspec.Struct, frozen=True, array_like=True):
    """What besides tokens decides the KV of a span: part of the hash of every block that meets it.

    The span is half open, in token positions; `end=None` means without end.
    """

    start: int
    end: int | None
    value: bytes


class EngineRequest(msgspec.Struct, kw_only=True):
    """What the front end sends to the core: validated, tokenized, seeded. Never changed afterwards."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    """Ids that end this request unless `params.ignore_eos`."""
    arrival_time: float = 0.0
    """Seconds since the epoch, on the front end's clock."""
    priority: int = 0
    """Smaller is more urgent; used by the `priority` policy."""
    block_keys: list[BlockKey] = []
    reads_prefix_cache: bool = True
    """False: every prompt token is computed, because somebody needs what the forward pass makes of it. The KV
    computed is offered to others all the same."""
    stash: Stash = msgspec.field(default_factory=Stash)


class RequestState(enum.Enum):
    """Where the scheduler keeps a request."""

    WAITING = "waiting"
    """In the queue: never admitted, or preempted."""
    PARKED = "parked"
    """A constraint said `Wait`: it holds no place among the running ones."""
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """The scheduler's view of a request.

    Positions are counted from 0 over prompt and output alike:

        0 ............ num_computed ...... num_scheduled ...... num_tokens ...... num_known
        |  valid KV    | in plans sent     | to schedule        | tentative       |

    `num_tokens` counts confirmed tokens. *Tentative* ones follow: either `drafts` (ids somebody proposed)
    or `num_expected` (ids that a plan in flight will sample, known to the worker alone).
    """

    __slots__ = (
        "admission",
        "block_hashes",
        "block_ids",
        "drafts",
        "engine_request",
        "finish_reason",
        "first_step",
        "max_tokens_total",
        "num_cached",
        "num_computed",
        "num_expected",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_released",
        "num_scheduled",
        "on_worker",
        "queue_key",
        "scheduled_time",
        "state",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "valid_from_step",
        "wait_reason",
        "worker_tokens",
    )

    def __init__(self, engine_request: EngineRequest, *, max_tokens_total: int, first_step: int = 0) -> None:
        self.engine_request = engine_request
        self.token_ids: list[int] = list(engine_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens_total = max_tokens_total
        """Prompt and output together never exceed this."""
        self.first_step = first_step
        """Plans before this step cannot hold it: an entry of its name there is another request's."""
        params = engine_request.params
        self.stop_token_ids = frozenset(
            [*params.stop_token_ids, *(() if params.ignore_eos else engine_request.eos_token_ids)]
        )

        # Set by the scheduler.
        self.state = RequestState.WAITING
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_expected = 0
        self.drafts: list[int] = []
        self.num_in_flight = 0
        """Plans sent and not yet updated that hold this request."""
        self.valid_from_step = first_step
        """Results of plans before this step speak of a state that a rollback or preemption undid."""
        self.on_worker = False
        """Whether workers keep state for it."""
        self.worker_tokens = 0
        """How many of `token_ids` the worker has been told or has sampled itself."""
        self.num_preemptions = 0
        self.admission = 0
        """Running number of its last admission: the order among the running ones."""
        self.scheduled_time: float | None = None
        """When it was first admitted, in seconds since the epoch."""
        self.queue_key: tuple[object, ...] = ()
        self.wait_reason: str | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

        # Set by the KV cache manager.
        self.block_ids: list[list[int]] = []
        """One list a KV group; entry i covers positions [i·block_size, (i+1)·block_size)."""
        self.block_hashes: list[bytes] = []
        self.num_published = 0
        """How many leading blocks were offered to the prefix cache."""
        self.num_released: list[int] = []
        """A KV group: how many leading blocks fell behind the window and went back."""
        self.num_cached = 0
        """Prompt tokens found in the prefix cache at first admission."""

    @property
    def request_id(self) -> str:
        """The engine-wide unique name."""
        return self.engine_request.request_id

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.engine_request.params

    @property
    def stash(self) -> Stash:
        """What plugins keep on this request."""
        return self.engine_request.stash

    @property
    def priority(self) -> int:
        """Smaller is more urgent."""
        return self.engine_request.priority

    @property
    def arrival_time(self) -> float:
        """Seconds since the epoch."""
        return self.engine_request.arrival_time

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed tokens behind the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Confirmed and tentative tokens: how far a plan may reach."""
        return len(self.token_ids) + len(self.drafts) + self.num_expected

    @property
    def was_preempted(self) -> bool:
        """Whether it has been admitted before."""
        return self.num_preemptions > 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.state.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed}, scheduled={self.num_scheduled})"
        )

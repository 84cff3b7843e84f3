"""The contracts. Small files, one idea each; every name here is public and versioned by `API_VERSION`."""

from headrace.core.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    CacheSpec,
)
from headrace.core.interfaces.checkpoint import Checkpoint, CheckpointTensor, ModelSource, WeightLoader
from headrace.core.interfaces.executor import Executor, StepHandle
from headrace.core.interfaces.grammar import (
    Grammar,
    GrammarBackend,
    GrammarKind,
    GrammarMatcher,
    GrammarSpec,
    Vocabulary,
)
from headrace.core.interfaces.graph import Graph, GraphRecorder, RecordError
from headrace.core.interfaces.kv_cache import (
    KVCacheGroup,
    KVCacheLayout,
    KVCacheManager,
    KVCacheSpec,
    PrefixHit,
)
from headrace.core.interfaces.model import (
    Embedding,
    ForwardContext,
    Linear,
    Model,
    ModelBuild,
    ModelDefinition,
    Parallel,
    Weights,
)
from headrace.core.interfaces.ops import LinearFormat, Op, OpSet
from headrace.core.interfaces.quantization import (
    ChannelWeight,
    GroupedWeight,
    QuantizationMethod,
    QuantizedWeight,
    QuantizedWeights,
    WeightQuantizer,
)
from headrace.core.interfaces.runner import (
    BatchRow,
    LogitsProcessor,
    LogitsRow,
    ProcessorFactory,
    Proposer,
    RunnerBatch,
    RunnerListener,
    SelectableProcessor,
)
from headrace.core.interfaces.scheduling import Constraint, EngineListener, Scheduler, SchedulingPolicy, Wait
from headrace.core.interfaces.text import InputProcessor, ProcessedInput, Tokenizer

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionSpec",
    "BatchRow",
    "CacheSpec",
    "ChannelWeight",
    "Checkpoint",
    "CheckpointTensor",
    "Constraint",
    "Embedding",
    "EngineListener",
    "Executor",
    "ForwardContext",
    "Grammar",
    "GrammarBackend",
    "GrammarKind",
    "GrammarMatcher",
    "GrammarSpec",
    "Graph",
    "GraphRecorder",
    "GroupedWeight",
    "InputProcessor",
    "KVCacheGroup",
    "KVCacheLayout",
    "KVCacheManager",
    "KVCacheSpec",
    "Linear",
    "LinearFormat",
    "LogitsProcessor",
    "LogitsRow",
    "Model",
    "ModelBuild",
    "ModelDefinition",
    "ModelSource",
    "Op",
    "OpSet",
    "Parallel",
    "PrefixHit",
    "ProcessedInput",
    "ProcessorFactory",
    "Proposer",
    "QuantizationMethod",
    "QuantizedWeight",
    "QuantizedWeights",
    "RecordError",
    "RunnerBatch",
    "RunnerListener",
    "Scheduler",
    "SchedulingPolicy",
    "SelectableProcessor",
    "StepHandle",
    "Tokenizer",
    "Vocabulary",
    "Wait",
    "WeightLoader",
    "WeightQuantizer",
    "Weights",
]

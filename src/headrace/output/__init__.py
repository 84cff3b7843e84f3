"""From the core's token ids to the text a caller reads."""

from headrace.output.completion import FrontRequest
from headrace.output.detokenizer import IncrementalDetokenizer
from headrace.output.processor import OutputProcessor, ProcessedOutputs
from headrace.output.stop_strings import StopMatch, StopMatcher

__all__ = [
    "FrontRequest",
    "IncrementalDetokenizer",
    "OutputProcessor",
    "ProcessedOutputs",
    "StopMatch",
    "StopMatcher",
]

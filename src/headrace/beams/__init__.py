"""Beam search: the likeliest answers of a model, looked for in the front end, token by token."""

from headrace.beams.params import BeamSearchParams
from headrace.beams.request import BeamRequest, search_all

__all__ = ["BeamRequest", "BeamSearchParams", "search_all"]

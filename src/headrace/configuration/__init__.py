"""From a file, flags and keywords to one frozen `EngineConfig`.

    read the file (`yaml_file`) → what it, the flags and the keywords give, option by option (`given`)
      → the plugins section → plugins loaded → the union of all sections (`loading`)
      → values validated (`values`) → values against each other (`checks`) → config, provenance, notes

Default < file < flag or keyword.
"""

from __future__ import annotations

from headrace.configuration.given import Source
from headrace.configuration.loading import Provenance, Started, load_config, start_configuration
from headrace.configuration.request_options import request_options
from headrace.configuration.schema import json_schema

__all__ = [
    "Provenance",
    "Source",
    "Started",
    "json_schema",
    "load_config",
    "request_options",
    "start_configuration",
]

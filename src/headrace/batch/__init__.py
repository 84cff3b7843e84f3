"""Many requests from a file, answered into a file: what `headrace batch` runs, in OpenAI's batch format.

lines    the input: requests, and lines that are none
journal  the output: finished lines, whole and once, whatever ends a run
run      lines to a handler, so many at a time

A run that was ended, by whatever, is continued by the same call.
"""

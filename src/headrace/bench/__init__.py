"""Benchmarks of one's own machine and model: what `headrace bench` runs.

workloads    the requests: from a file, or made up
datasets     which workload a call asks for, checked before a model is loaded
measure      a started `LLM` runs them against the clock
startup      fresh processes, from the command to the first token
first_token  what each of those processes does
facts        machine and engine, told beside every figure

Results are plain dicts with vLLM's key names where the meaning is the same.
"""

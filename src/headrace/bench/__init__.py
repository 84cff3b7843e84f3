"""Benchmarks of one's own machine and model: what `headrace bench` runs.

workloads    the requests: from a file, or made up
datasets     which workload a call asks for, checked before a model is loaded
measure      a started `LLM` runs them against the clock
startup      fresh processes, from the command to the first token
first_token  what each of those processes does
facts        machine and engine, told beside every figure

For `bench serve`, whose server may be anybody's:

load_options      how it is loaded and what is told: flags' texts, checked
remote            what the server says of itself: model, tokenizer
serving_requests  a workload as prompts for it
payloads          a prompt as the body of a request
arrivals          when each is sent
serving           all requests on their way, and the answers
streams           one answer's bytes: when each token came
serving_run       warm-up and measured run
serving_figures   from answers to figures
serving_plot      figures as a picture

Results are plain dicts with vLLM's key names where the meaning is the same.
"""

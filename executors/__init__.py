"""Floor 2: where steps run. The runner turns a plan into a result; executors decide in which process."""

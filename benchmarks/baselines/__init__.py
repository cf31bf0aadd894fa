"""Published baselines that runs and benchmarks are compared with."""

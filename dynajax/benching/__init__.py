"""Speed measured in rounds that take turns, one process an engine: for `bench` and for benchmarks/."""

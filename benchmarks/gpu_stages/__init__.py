"""The stages of `benchmarks/gpu_check.py`: one question to the machine per module."""

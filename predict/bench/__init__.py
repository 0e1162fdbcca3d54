"""Benchmarks: one engine run (throughput), one operator at a time (kernels), and their reports."""

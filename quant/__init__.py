"""Quantization with calibration data: observers, SmoothQuant, AWQ, GPTQ, and measuring the loss.

Imports `predict`, never the reverse. Command lines: `run_quantization.py` and `evaluate.py`.
"""

"""Quantization, as PaddleNLP's pages call it there: see quant/run_quantization.py."""

import sys

from quant.run_quantization import main

if __name__ == "__main__":
    sys.exit(main())

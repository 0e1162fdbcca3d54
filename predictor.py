"""Prompts to answers, as PaddleNLP's older pages call it there: see predict/predictor.py."""

import sys

from predict.predictor import main

if __name__ == "__main__":
    sys.exit(main())

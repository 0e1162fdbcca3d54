"""The export, as PaddleNLP's older pages call it there: see export/export_model.py."""

import sys

from export.export_model import main

if __name__ == "__main__":
    sys.exit(main())

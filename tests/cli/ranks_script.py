"""Several commands one after the other on the same ranks, so that these start once: torchrun ranks_script.py '[["evaluate", ...], ...]'."""

from __future__ import annotations

import json
import os
import sys

from nvalchemi.cli import app

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        try:
            app(words, prog_name="nvalchemi")
        except SystemExit as end:
            os.write(1, f"exit {end.code}\n".encode())  # in one piece: two ranks write here

"""``python -m nvalchemi``: the program, also under ``torchrun -m``."""

from nvalchemi.cli import main

if __name__ == "__main__":
    main()

"""``python -m lightning_memopt``."""

from lightning_memopt.cli import main

if __name__ == "__main__":
    main()

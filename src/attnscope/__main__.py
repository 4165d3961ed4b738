"""``python -m attnscope``, also straight from ``src/``."""

from attnscope.cli import main

if __name__ == "__main__":
    main()

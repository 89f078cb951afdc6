"""python -m ostro: the same as the `ostro` command."""

import sys

from ostro.cli import main

sys.exit(main())

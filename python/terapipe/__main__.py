"""`python -m terapipe`: the same as the `terapipe` command; workers are started this way."""

import sys

from terapipe.cli import main

sys.exit(main())

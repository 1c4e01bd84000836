"""`python -m distca` is the console command."""

import sys

from distca.cli import main

sys.exit(main())

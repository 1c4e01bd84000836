"""The console command as a module: `python -m distca`."""

import sys

from distca.commands.main import main

sys.exit(main())

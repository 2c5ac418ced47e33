"""`python -m tsmem` is the command line tool."""
import sys

from _tsmem_cli import main

sys.exit(main())

"""`python -m readymark_client.cli`: the same as the `readymark` command."""

import sys

from readymark_client.cli import main

sys.exit(main())

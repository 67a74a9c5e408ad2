"""`python -m muletrain`: the command `mule` where it is not installed, as on a machine that only has the source."""

from __future__ import annotations

from muletrain.cli.app import main

if __name__ == "__main__":
    main()

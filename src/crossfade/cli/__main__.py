"""`python -m crossfade.cli`."""

from . import main

main()

"""`python -m ckpttool`."""

from .cli.main import main

main()

"""The command line: one typer application; commands parse, call and print."""
